//! Numbers of `/proc` at the ends of their range, in each field: a sum is the largest number, or the file is malformed.

use host::{Mapping, ProcessStat, Usage};

const EXTREMES: [u64; 5] = [0, 1, 1 << 52, u64::MAX / 1024, u64::MAX];
/// Keys of `smaps` that are counted.
const KEYS: [&str; 16] = [
    "Rss",
    "Pss",
    "Private_Clean",
    "Private_Dirty",
    "Anonymous",
    "Swap",
    "AnonHugePages",
    "ShmemPmdMapped",
    "FilePmdMapped",
    "Private_Hugetlb",
    "Shared_Hugetlb",
    "KSM",
    "Locked",
    "Size",
    "Shared_Clean",
    "Shared_Dirty",
];
/// A line of `/proc/PID/stat`, up to its fields.
const NAME: &str = "7 (a) b) S";
/// Fields after the state.
const FIELDS: usize = 49;

#[test]
fn sizes_of_mappings_are_summed_to_the_largest_number_at_most() {
    for kib in EXTREMES {
        for key in KEYS {
            let of = |first: &str| format!("{first} rw-p 00000000 00:00 0 \n{key}: {kib} kB\n{key}: {kib} kB\n");
            let text = of("1000-2000") + &of("2000-ffffffffffffffff") + &of("0-ffffffffffffffff");
            let Ok(mappings) = Mapping::parse_all(&text) else {
                assert!(kib > u64::MAX / 1024, "{key} {kib}");
                continue;
            };
            let sum = mappings.iter().fold(Usage::default(), |sum, mapping| sum.plus(&mapping.usage));
            let all = mappings.iter().map(Mapping::bytes).fold(0, u64::saturating_add);
            assert_eq!((all, mappings.len()), (u64::MAX, 3));
            let largest = [sum.rss_bytes, sum.swap_bytes, sum.thp_bytes, sum.locked_bytes].into_iter().max();
            assert!(largest.is_some_and(|bytes| bytes == 0 || bytes >= kib), "{key} {kib}: {sum:?}");
        }
    }
}

#[test]
fn fields_of_a_process_at_their_ends_are_read_or_malformed() {
    for number in EXTREMES {
        for place in 0..FIELDS {
            let fields = (0..FIELDS).map(|n| if n == place { number } else { 5 }.to_string()).collect::<Vec<_>>();
            let stat = ProcessStat::parse(&format!("{NAME} {}", fields.join(" ")));
            // The parent is a pid. Others are numbers of 64 bits.
            assert_eq!(stat.is_some(), place != 0 || number <= u32::MAX.into(), "field {place} is {number}");
            assert!(stat.is_none_or(|stat| stat.cpu_ticks >= 5), "field {place} is {number}");
        }
    }
}
