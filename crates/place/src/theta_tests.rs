//! Sketches beside those of the library, and beside bytes of the reference: Apache DataSketches 5.2 for C++, by its
//! Python package.

use super::*;
use datasketches::common::NumStdDev;
use datasketches::theta::ThetaUnionBuilder;

fn sketch(lg_k: u8, contents: std::ops::Range<u64>) -> Vec<u8> {
    let mut sketch = begin(lg_k);
    contents.for_each(|content| sketch.update(content));
    finish(sketch)
}

#[test]
fn unions_are_those_of_the_library() {
    let bytes = [sketch(10, 0..50_000), sketch(10, 30_000..90_000), sketch(13, 80_000..81_000)];
    let mut union = ThetaUnionBuilder::default().lg_k(20).build().unwrap();
    for bytes in &bytes {
        union.update(&CompactThetaSketch::deserialize(bytes).unwrap()).unwrap();
    }
    let theirs = union.to_sketch(true);
    let sets = bytes.map(|bytes| Sketch::read(&bytes, usize::MAX).unwrap());
    let ours = Sketch::union_of(sets.iter());
    assert_eq!(ours.size().pages, theirs.estimate());
    assert_eq!(ours, sets[0].union(&sets[1]).union(&sets[2]));
    // The library's bounds are of the binomial distribution, ours of the normal one.
    let bar = (theirs.upper_bound(NumStdDev::Two) - theirs.lower_bound(NumStdDev::Two)) / 2.0;
    assert!((ours.size().error / bar - 1.0).abs() < 0.05, "{:?} {bar}", ours.size());
    assert!((ours.size().pages - 90_000.0).abs() < 2.0 * ours.size().error, "{:?}", ours.size());
}

#[test]
fn sketches_of_fleet_take_8_kib() {
    assert_eq!(sketch(FLEET_LG_K, 0..100_000).len(), 24 + (8 << 10));
    assert_eq!(sketch(FINE_LG_K, 0..100_000).len(), 24 + (64 << 10));
    assert_eq!(Sketch::read(&sketch(10, 0..0), 10).unwrap(), Sketch::default());
    assert_eq!(Sketch::read(&sketch(10, 0..500), 1000).unwrap().size(), Estimate::exact(500.0));
    assert!(Sketch::read(b"no sketch", 10).is_err());
    let large = sketch(FLEET_LG_K, 0..100_000);
    assert_eq!(Sketch::read(&large, 1 << 20).unwrap().bytes(), large);
}

#[test]
fn common_contents_lie_within_error_bar() {
    let [a, b] = [0..40_000, 25_000..65_000].map(|set| Sketch::read(&sketch(13, set), usize::MAX).unwrap());
    let common = a.common(&b);
    assert!((common.pages - 15_000.0).abs() < common.error * 1.5 && common.error < 1500.0, "{common:?}");
    let likeness = a.likeness(&b, 1000);
    assert!((likeness - 15.0 / 65.0).abs() < 0.05, "{likeness}");
    let fewer = a.clone().cut(256);
    assert_eq!(fewer.hashes.len(), 256);
    assert!((fewer.size().pages - 40_000.0).abs() < 2.0 * fewer.size().error, "{:?}", fewer.size());
}

/// `data/golden/make.py` writes them.
#[test]
fn bytes_are_those_of_the_reference() {
    let golden: [(u64, &[u8]); 4] = [
        (0, include_bytes!("../data/golden/theta-0.bin")),
        (1, include_bytes!("../data/golden/theta-1.bin")),
        (500, include_bytes!("../data/golden/theta-500.bin")),
        (100_000, include_bytes!("../data/golden/theta-100000.bin")),
    ];
    for (contents, bytes) in golden {
        let ours = sketch(FLEET_LG_K, 1..contents + 1);
        // An empty sketch has a hash of the seed there, or none, and readers do not look: the reference reads both.
        let meant = if contents == 0 { &bytes[..6] } else { bytes };
        assert!(ours.starts_with(meant) && ours.len() == bytes.len(), "{:?}... and {:?}...", &ours[..8], &bytes[..8]);
        let read = Sketch::read(bytes, usize::MAX).unwrap();
        assert_eq!(read.hashes.len() as u64, contents.min(1 << FLEET_LG_K));
    }
}

#[test]
fn sketch_that_somebody_made_up_is_refused_or_in_order() {
    let whole = sketch(FLEET_LG_K, 0..2000);
    let put = |at: usize, word: u64| {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        Sketch::read(&bytes, usize::MAX)
    };
    // No hash, one beyond theta, theta 0, and more hashes than there are.
    for (at, word) in [(32, 0), (32, u64::MAX), (16, 0), (8, u64::from(u32::MAX))] {
        assert!(put(at, word).is_err(), "{word} at {at}");
    }
    // The last hash comes first, too: it counts once.
    let last = u64::from_le_bytes(*whole.last_chunk().unwrap());
    let read = put(24, last).unwrap();
    assert_eq!(read.hashes.len(), (1 << FLEET_LG_K) - 1);
    assert!(read.hashes.is_sorted());
    assert!(Sketch::read(&vec![0; MOST_BYTES + 1], 10).is_err());
}
