// Hints on the page maps: the figures of the square under the pointer, or of the one reached with the
// arrow keys. Everything else in the report works without this.
"use strict";
(() => {
  const COLUMNS = 128;
  const MEANINGS = ["zeros", "shared already", "also in the group", "only in other groups", "twice in the guest",
    "also on the host", "nowhere else"];
  const hint = document.getElementById("hint");

  // The squares of a map: see `encode` in page_map.rs.
  const cellsOf = (map) => {
    if (!map.squares) {
      let last = "";
      map.squares = map.dataset.cells.split(" ").map((cell) => (last = cell || last));
      map.current = 0;
    }
    return map.squares;
  };

  const tell = (code) => {
    const parts = [...code.matchAll(/([a-g])(\d+)/g)]
      .map(([, letter, pages]) => ({ pages: Number(pages), what: MEANINGS[letter.charCodeAt(0) - 97] }))
      .sort((a, b) => b.pages - a.pages);
    const sum = parts.reduce((total, part) => total + part.pages, 0);
    return `${sum} pages: ` + parts.map((part) => `${part.pages} ${part.what}`).join(", ");
  };

  const show = (map, index) => {
    const cells = cellsOf(map);
    if (index < 0 || index >= cells.length) return hide();
    map.current = index;
    hint.textContent = tell(cells[index]);
    hint.hidden = false;
    const box = map.getBoundingClientRect();
    const size = box.width / COLUMNS;
    const x = box.left + (index % COLUMNS) * size;
    const y = box.top + (Math.floor(index / COLUMNS) + 1) * size + 6;
    const room = document.documentElement.clientWidth - hint.offsetWidth - 8;
    hint.style.left = `${Math.max(8, Math.min(x, room)) + window.scrollX}px`;
    hint.style.top = `${y + window.scrollY}px`;
  };

  const hide = () => { hint.hidden = true; };

  const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -COLUMNS, ArrowDown: COLUMNS };
  for (const map of document.querySelectorAll("svg.cells")) {
    map.addEventListener("pointermove", (event) => {
      const box = map.getBoundingClientRect();
      const size = box.width / COLUMNS;
      const column = Math.min(COLUMNS - 1, Math.max(0, Math.floor((event.clientX - box.left) / size)));
      show(map, Math.floor((event.clientY - box.top) / size) * COLUMNS + column);
    });
    map.addEventListener("pointerleave", hide);
    map.addEventListener("blur", hide);
    map.addEventListener("focus", () => { if (map.matches(":focus-visible")) show(map, map.current || 0); });
    map.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const step = STEPS[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const next = (map.current || 0) + step;
      if (next >= 0 && next < cellsOf(map).length) show(map, next);
    });
  }

  // Print what is folded away too.
  window.addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
  });
})();
