//! Compresses series of samples that lie at equal distances in time. Each value is stored as its difference from the
//! one before, in few bits.
//!
//! ```text
//!   block    checksum | each series: number of its field, length in bytes, series
//!   series   number of gaps, each: its begin and length | order and bits, unit, first value, (first difference) | differences
//!   tick     checksum | each owner: its number, less the number before it | mask of its fields | their values
//! ```
//!
//! An *owner* is a group or a member, and its *fields* are the figures that are kept of it (`fields`). Numbers are
//! varints (LEB128). Signed ones are first replaced by their index in 0, -1, 1, -2, 2, ... (zigzag), so that small ones
//! are short. All differences of a series are divided by their greatest common divisor, its unit: memory changes by
//! whole pages. A series of order 1 has the differences, one of order 2 the differences between these, which suits
//! counters. Each difference is a Rice code: its high bits in unary (that many ones, and a zero), and its low bits as
//! they are. [`encode`] tries both orders and all numbers of low bits, and takes what is shortest.

use anyhow::{Context, bail};

/// Samples of one series; `None` for a sample whose value is not known.
pub type Samples = Vec<Option<i64>>;

/// Most samples in a series of a block: 1440, a day with a sample each minute.
pub const MOST_SAMPLES: usize = 1440;
/// A number whose high bits would take 24 ones or more is stored as 24 ones and its 64 bits, and not as a Rice code.
const ESCAPE: u32 = 24;
/// Most low bits of a Rice code that are tried and accepted.
const MOST_BITS: u32 = 48;

fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take(bytes: &mut &[u8]) -> anyhow::Result<u64> {
    let mut number = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let (first, rest) = bytes.split_first().context("it ends too early")?;
        *bytes = rest;
        number |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(number);
        }
    }
    bail!("it has a number that is too long")
}

fn take_size(bytes: &mut &[u8]) -> anyhow::Result<usize> {
    Ok(usize::try_from(take(bytes)?)?)
}

const fn alternate(value: i64) -> u64 {
    (value << 1 ^ value >> 63).cast_unsigned()
}

const fn signed(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

/// The checksum of blocks and ticks: FNV-1a of 32 bits.
fn checksum(bytes: &[u8]) -> [u8; 4] {
    bytes.iter().fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193)).to_le_bytes()
}

fn sealed(content: &[u8]) -> Vec<u8> {
    [&checksum(content)[..], content].concat()
}

fn opened(bytes: &[u8]) -> anyhow::Result<&[u8]> {
    let (sum, content) = bytes.split_first_chunk().context("it ends too early")?;
    if *sum != checksum(content) {
        bail!("its checksum is another one");
    }
    Ok(content)
}

/// Writes bits, the highest first.
#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    /// Number of bits of the last byte that are not used yet.
    free: u32,
}

impl Writer {
    fn put(&mut self, value: u64, mut bits: u32) {
        while bits > 0 {
            if self.free == 0 {
                self.bytes.push(0);
                self.free = 8;
            }
            let now = self.free.min(bits);
            let part = value >> (bits - now) & ((1 << now) - 1);
            if let Some(last) = self.bytes.last_mut() {
                *last |= (part << (self.free - now)) as u8;
            }
            (self.free, bits) = (self.free - now, bits - now);
        }
    }
}

/// Reads what [`Writer`] has written.
struct Reader<'a> {
    bytes: &'a [u8],
    /// Number of bits of the first byte that were read already.
    used: u32,
}

impl Reader<'_> {
    fn skip(&mut self, bits: u32) {
        self.used += bits;
        if self.used == 8 {
            (self.bytes, self.used) = (&self.bytes[1..], 0);
        }
    }

    fn take(&mut self, mut bits: u32) -> anyhow::Result<u64> {
        let mut value = 0;
        while bits > 0 {
            let first = *self.bytes.first().context("it ends too early")?;
            let now = (8 - self.used).min(bits);
            let part = u64::from(first) >> (8 - self.used - now) & ((1 << now) - 1);
            value = value << now | part;
            bits -= now;
            self.skip(now);
        }
        Ok(value)
    }

    /// The number of ones before the next zero, up to [`ESCAPE`]. The zero is read, too.
    fn ones(&mut self) -> anyhow::Result<u32> {
        let mut ones = 0;
        loop {
            let first = *self.bytes.first().context("it ends too early")?;
            let left = 8 - self.used;
            let run = (first << self.used).leading_ones().min(left).min(ESCAPE - ones);
            ones += run;
            self.skip(run);
            if ones == ESCAPE {
                return Ok(ones);
            }
            if run < left {
                self.skip(1);
                return Ok(ones);
            }
        }
    }
}

/// Number of bits that a number takes, as a Rice code with `bits` low bits or as an escaped number.
fn cost(number: u64, bits: u32) -> u64 {
    match number >> bits {
        high if high < u64::from(ESCAPE) => high + 1 + u64::from(bits),
        _ => u64::from(ESCAPE + 64),
    }
}

fn greatest_divisor(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { greatest_divisor(other, one % other) }
}

fn differences(values: &[i64]) -> Vec<i64> {
    values.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect()
}

/// Encodes one series.
pub fn encode(samples: &[Option<i64>]) -> Vec<u8> {
    let (mut gaps, mut at) = (Vec::new(), 0);
    for run in samples.chunk_by(|one, two| one.is_none() == two.is_none()) {
        if run[0].is_none() {
            gaps.push((at, run.len()));
        }
        at += run.len();
    }
    let mut bytes = Vec::new();
    put(&mut bytes, gaps.len() as u64);
    for (begin, length) in gaps {
        put(&mut bytes, begin as u64);
        put(&mut bytes, length as u64);
    }
    let present: Vec<i64> = samples.iter().flatten().copied().collect();
    let Some(first) = present.first() else { return bytes };
    let mut once = differences(&present);
    let unit = once.iter().fold(0, |unit, difference| greatest_divisor(unit, difference.unsigned_abs()));
    let unit = i64::try_from(unit).unwrap_or(1).max(1);
    once.iter_mut().for_each(|difference| *difference = difference.wrapping_div(unit));
    let orders = [once.clone(), differences(&once)].map(|all| all.into_iter().map(alternate).collect::<Vec<u64>>());
    let length = |order: &[u64], bits| order.iter().map(|number| cost(*number, bits)).sum::<u64>();
    let all = (0..2).flat_map(|order| (0..=MOST_BITS).map(move |bits| (order, bits)));
    let (order, bits) = all.min_by_key(|(order, bits)| length(&orders[*order], *bits)).unwrap_or((0, 0));
    bytes.push((bits << 1) as u8 | order as u8);
    put(&mut bytes, unit.cast_unsigned());
    put(&mut bytes, alternate(*first));
    if let (1, Some(difference)) = (order, once.first()) {
        put(&mut bytes, alternate(*difference));
    }
    let mut writer = Writer::default();
    for number in &orders[order] {
        match number >> bits {
            high if high < u64::from(ESCAPE) => {
                writer.put((1 << (high + 1)) - 2, high as u32 + 1);
                writer.put(*number, bits);
            }
            _ => {
                writer.put((1 << ESCAPE) - 1, ESCAPE);
                writer.put(*number, 64);
            }
        }
    }
    bytes.extend(writer.bytes);
    bytes
}

/// Decodes a series that has `count` samples.
///
/// # Errors
/// The bytes are no series with this number of samples.
pub fn decode(mut bytes: &[u8], count: usize) -> anyhow::Result<Samples> {
    if count > MOST_SAMPLES {
        bail!("it has {count} samples");
    }
    let bytes = &mut bytes;
    let mut is_gap = vec![false; count];
    for _ in 0..take(bytes)? {
        let (begin, length) = (take_size(bytes)?, take_size(bytes)?);
        let end = begin.checked_add(length).context("it has a gap that is too long")?;
        is_gap.get_mut(begin..end).context("it has a gap behind its end")?.fill(true);
    }
    let present = is_gap.iter().filter(|gap| !**gap).count();
    let values = if present == 0 { Vec::new() } else { values(bytes, present)? };
    let mut values = values.into_iter();
    Ok(is_gap.into_iter().map(|gap| if gap { None } else { values.next() }).collect())
}

/// Decodes the `count` values of a series that are no gaps. There is at least one.
fn values(bytes: &mut &[u8], count: usize) -> anyhow::Result<Vec<i64>> {
    let (mode, rest) = bytes.split_first().context("it ends too early")?;
    *bytes = rest;
    let (is_second, bits) = (mode & 1 == 1, u32::from(mode >> 1));
    if bits > MOST_BITS {
        bail!("it has codes of {bits} bits");
    }
    let (unit, mut value) = (take(bytes)?.cast_signed(), signed(take(bytes)?));
    let mut values = Vec::with_capacity(count);
    values.push(value);
    let mut difference = 0_i64;
    if is_second && count > 1 {
        difference = signed(take(bytes)?);
        value = value.wrapping_add(difference.wrapping_mul(unit));
        values.push(value);
    }
    let mut reader = Reader { bytes, used: 0 };
    while values.len() < count {
        let number = match reader.ones()? {
            ESCAPE => reader.take(64)?,
            high => u64::from(high) << bits | reader.take(bits)?,
        };
        difference = if is_second { difference.wrapping_add(signed(number)) } else { signed(number) };
        value = value.wrapping_add(difference.wrapping_mul(unit));
        values.push(value);
    }
    Ok(values)
}

/// Encodes a block: series of one owner, each with the number of its field.
pub fn encode_block(series: &[(u8, Samples)]) -> Vec<u8> {
    let mut content = Vec::new();
    for (field, samples) in series {
        let bytes = encode(samples);
        content.push(*field);
        put(&mut content, bytes.len() as u64);
        content.extend(bytes);
    }
    sealed(&content)
}

/// Checks a block, and returns the bytes of its series, which [`decode`] decodes, each with the number of its field.
///
/// # Errors
/// The checksum or the structure of the block is wrong.
pub fn series(bytes: &[u8]) -> anyhow::Result<Vec<(u8, &[u8])>> {
    let (mut content, mut all) = (opened(bytes)?, Vec::new());
    while let Some((field, mut rest)) = content.split_first() {
        let length = take_size(&mut rest)?;
        let (series, rest) = rest.split_at_checked(length).context("it ends too early")?;
        all.push((*field, series));
        content = rest;
    }
    Ok(all)
}

/// Figures of one moment: of each owner, its number, and the values of its fields.
pub type Moment = Vec<(i64, Samples)>;

/// Encodes a moment as a tick. Owners must be in ascending order, and have 64 fields at most.
pub fn encode_tick(moment: &Moment) -> Vec<u8> {
    let (mut content, mut before) = (Vec::new(), 0);
    for (owner, values) in moment {
        put(&mut content, owner.wrapping_sub(before).cast_unsigned());
        put(&mut content, values.iter().enumerate().map(|(field, value)| u64::from(value.is_some()) << field).sum());
        values.iter().flatten().for_each(|value| put(&mut content, alternate(*value)));
        before = *owner;
    }
    sealed(&content)
}

/// Decodes a tick of [`encode_tick`]. Of each owner, fields after the last one with a value are left out.
///
/// # Errors
/// The checksum or the structure of the tick is wrong.
pub fn decode_tick(bytes: &[u8]) -> anyhow::Result<Moment> {
    let (mut content, mut moment, mut before) = (opened(bytes)?, Moment::new(), 0_i64);
    while !content.is_empty() {
        before = before.wrapping_add(take(&mut content)?.cast_signed());
        let mask = take(&mut content)?;
        let mut values = Samples::new();
        for field in 0..u64::BITS - mask.leading_zeros() {
            values.push(if mask >> field & 1 == 1 { Some(signed(take(&mut content)?)) } else { None });
        }
        moment.push((before, values));
    }
    Ok(moment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Numbers from 0 up to a bound, always the same.
    fn random(state: &mut u64, below: u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % below
    }

    fn value() -> impl Strategy<Value = i64> {
        prop_oneof![any::<i64>(), -1000..1000_i64, (0..1_i64 << 20).prop_map(|pages| pages << 12)]
    }

    proptest! {
        #[test]
        fn samples_come_back(samples in prop::collection::vec(prop::option::weighted(0.8, value()), 0..200)) {
            prop_assert_eq!(decode(&encode(&samples), samples.len()).unwrap(), samples);
        }

        #[test]
        fn blocks_and_ticks_come_back(
            all in prop::collection::vec((0..64_u8, prop::collection::vec(prop::option::of(value()), 3)), 0..9),
        ) {
            let block = encode_block(&all);
            let found: Vec<(u8, Samples)> =
                series(&block).unwrap().into_iter().map(|(field, bytes)| (field, decode(bytes, 3).unwrap())).collect();
            prop_assert_eq!(&found, &all);
            let moment: Moment = all.into_iter().enumerate().map(|(n, (_, mut values))| {
                values.push(Some(7));
                (n as i64 * 3, values)
            }).collect();
            prop_assert_eq!(decode_tick(&encode_tick(&moment)).unwrap(), moment);
        }

        #[test]
        fn any_bytes_are_refused_or_decoded(bytes in prop::collection::vec(any::<u8>(), 0..60), count in 0..200_usize) {
            _ = decode(&bytes, count);
            let sealed = sealed(&bytes);
            _ = (series(&bytes), series(&sealed), decode_tick(&sealed));
        }
    }

    #[test]
    fn block_with_another_bit_is_refused() {
        let block = encode_block(&[(3, vec![Some(5), None, Some(9)])]);
        assert!(series(&block).is_ok());
        for bit in 0..block.len() * 8 {
            let mut other = block.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(series(&other).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn realistic_sample_takes_less_than_two_bytes() {
        let (mut state, mut total) = (1, 0);
        let mut measure = |name: &str, series: &mut dyn FnMut(&mut u64, i64) -> i64| {
            let samples: Samples = (0..96).map(|n| Some(series(&mut state, n))).collect();
            let bytes = encode_block(&[(1, samples)]).len();
            println!("{name}: {:.2} B a sample", bytes as f64 / 96.0);
            total += bytes;
            bytes
        };
        let mut level = 300_i64 << 20;
        let flat = measure("memory that stays", &mut |_, _| 300 << 20);
        let quiet = measure("memory that changes now and then", &mut |state, n| {
            level += if n % 8 == 0 { (random(state, 17).cast_signed() - 8) << 12 } else { 0 };
            level
        });
        let busy = measure("memory that a guest at work writes", &mut |state, _| {
            level += (random(state, 4001).cast_signed() - 2000) << 12;
            level
        });
        let mut time = 1_000_000_i64;
        let cpu = measure("processor time in microseconds", &mut |state, _| {
            time += 30_000 + random(state, 6000).cast_signed();
            time
        });
        let mut pages = 0_i64;
        let counter = measure("pages folded, in bursts", &mut |state, n| {
            pages += if n % 12 < 2 { random(state, 5000).cast_signed() } else { 0 };
            pages
        });
        assert!(flat < 32 && quiet < 96, "{flat} {quiet}");
        assert!([busy, cpu, counter].iter().all(|bytes| *bytes < 192), "{busy} {cpu} {counter}");
        assert!(total < 5 * 96 * 3 / 2, "{total}");
    }
}
