// Holds buffers and strings of a few contents, lets them rest, checks them, gives some back and takes new ones, which must
// hold zeros.
'use strict';
const BYTES = 1 << 16, HELD = 768, CONTENTS = 16;
const counted = { checks: 0, freed: 0, fresh: 0 };

const contents = Array.from({ length: CONTENTS }, (_, content) => {
  const bytes = Buffer.alloc(BYTES);
  for (let at = 0; at < BYTES; at++) bytes[at] = (Math.imul((content << 16) | (at & 4095), 0x9e3779b1) >>> 13) | 1;
  return bytes;
});

function filled(content) {
  const bytes = new Uint8Array(BYTES);
  if (bytes.some((byte) => byte !== 0)) throw new Error('a fresh buffer holds something');
  bytes.set(contents[content]);
  counted.fresh++;
  // Strings live in the heap of the engine's own, which is collected and compacted.
  return { bytes, text: contents[content].toString('latin1').repeat(1) };
}

function check(held, content) {
  if (Buffer.compare(held.bytes, contents[content]) !== 0) throw new Error(`bytes of content ${content} are wrong`);
  if (held.text !== contents[content].toString('latin1')) throw new Error(`text of content ${content} is wrong`);
  counted.checks++;
}

const held = new Array(HELD).fill(null);
const end = Date.now() + Number(process.argv[2]) * 1000;

function round() {
  for (let i = 0; i < HELD; i++) {
    if (held[i] === null) continue;
    check(held[i], i % CONTENTS);
    if (Math.random() < 1 / 3) {
      held[i] = null;
      counted.freed++;
    }
  }
  global.gc();
  for (let i = 0; i < HELD; i++) if (held[i] !== null) check(held[i], i % CONTENTS);
  if (Date.now() >= end) return console.log(JSON.stringify(counted));
  for (let i = 0; i < HELD; i++) if (held[i] === null) held[i] = filled(i % CONTENTS);
  setTimeout(round, 2000);
}
round();
