//! Samples at equal distances, as bytes. A value takes its difference from the one before, in few bits.
//!
//! ```text
//!   block    checksum | each series: number of its field, length in bytes, series
//!   series   number of gaps, each: its begin and length | order and bits, unit, first value, (first difference) | differences
//!   tick     checksum | each owner: its number, less that of the one before | mask of its fields | their values
//! ```
//!
//! Numbers are varints; signed ones alternate between the signs, so that small ones are short. All differences are divided
//! by their greatest common divisor first: memory changes by pages. Order 1 has differences, order 2 the differences of
//! those, which suits counters. Each is a Rice code: its high bits as so many ones and a zero, and its low bits as they are.
//! Of all orders and numbers of low bits, [`encode`] takes the shortest.

use anyhow::{Context, bail};

/// Samples; `None` where nothing was told.
pub type Samples = Vec<Option<i64>>;

/// Most samples of a block: a day of minutes.
pub const MOST_SAMPLES: usize = 1440;
/// Ones that stand for a number of 64 bits that follows, in place of a Rice code.
const ESCAPE: u32 = 24;
/// Most low bits of a Rice code.
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

/// FNV-1a of 32 bits.
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
    /// Bits of the last byte that are not used.
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
    /// Bits of the first byte that were read.
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

/// Bits that a number takes.
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

/// The bytes of one series.
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

/// The samples of a series that has so many.
///
/// # Errors
/// These bytes are no such series.
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

/// The values that are present: one at least.
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

/// The bytes of a block: series of one owner, each by the number of its field.
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

/// The series of a block, for [`decode`], each by the number of its field.
///
/// # Errors
/// These bytes are no block.
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

/// Figures of one moment: the number of an owner, and the values of its fields.
pub type Moment = Vec<(i64, Samples)>;

/// The bytes of one moment, whose owners are in ascending order, with 64 fields at most.
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

/// The moment of [`encode_tick`]. Fields behind the last one that was told are left out.
///
/// # Errors
/// These bytes are no moment.
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
