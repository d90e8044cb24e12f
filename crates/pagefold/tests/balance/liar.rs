//! Two guests whose roots lie to the balancer, with a real device, beside two honest ones, which come last. Those have their loans as ever.
//!
//! `PAGEFOLD_SOAK_SECONDS` says for how long; turns with lies and without them alternate.

use crate::common::lies::{END, LIARS, LIES, begin};
use crate::common::number;
use crate::common::service::{seconds, until};
use crate::rig::{Guests, KEPT, M, RAM, guests};
use std::time::{Duration, Instant};

/// Tolerated ratio of the time for loans beside liars to that without: 4 in a short run, 1.1 in a long one, by the median.
const TOLERATED: [f64; 2] = [4.0, 1.1];
/// Time that a turn may take longer in any case: 2 s. A round of the balancer's is not cut in pieces.
const ROUND_S: f64 = 2.0;
/// Has the honest guests' loans withdrawn, and made again. Returns how long it took, in seconds.
fn loans_go_and_come(guests_of: &Guests) -> f64 {
    // Memory that was used and is free again lies in frames of the host.
    guests_of.lab.everywhere(&guests_of.names(), "dd if=/dev/zero of=/tmp/x bs=1M count=60 2>/dev/null ; rm /tmp/x");
    let began = Instant::now();
    for (size, floor) in [(KEPT, &["--floor", "100T"][..]), (RAM, &[])] {
        until(120, "the honest ones' loans", || {
            guests_of.run(&[&["apply"], floor].concat());
            let sizes = guests_of.sizes();
            assert!(sizes[LIARS..].iter().all(|size| *size >= KEPT), "{sizes:?}");
            sizes[LIARS..].iter().all(|own| own.abs_diff(size) < 4 * M)
        });
    }
    began.elapsed().as_secs_f64()
}

#[test]
fn guests_that_lie_take_no_loan_from_others_and_slow_none() {
    let Some(guests_of) = Guests::many(4, "liar", "virtio-balloon-pci") else { return };
    let (end, mut ratios) = (Instant::now() + Duration::from_secs(seconds(1)), Vec::new());
    while ratios.is_empty() || Instant::now() < end {
        let alone = loans_go_and_come(&guests_of);
        begin(&guests_of.lab, &guests_of.listed, &LIES);
        let attacked = loans_go_and_come(&guests_of);
        it_is_not_believed(&guests_of);
        let drivers = guests_of.lab.everywhere(&guests_of.names()[..LIARS], END);
        assert_eq!(drivers, ["1"; LIARS], "the drivers are there again");
        eprintln!("loans went and came in {alone:.1} s, and beside liars in {attacked:.1} s");
        ratios.push((attacked - ROUND_S) / alone);
    }
    assert_eq!(guests_of.lab.everywhere(&guests_of.names(), "echo alive"), ["alive"; 4]);
    ratios.sort_by(f64::total_cmp);
    let tolerated = TOLERATED[usize::from(ratios.len() > 1)];
    assert!(ratios[(ratios.len() - 1) / 2] <= tolerated, "{ratios:?}");
}

/// The first liar's device says that its loan is back, which its frames do not.
fn it_is_not_believed(guests_of: &Guests) {
    guests_of.qmp(0, "balloon", serde_json::json!({"value": KEPT}));
    until(30, "the liar says that it is small", || guests_of.sizes()[0] == KEPT);
    let status = guests_of.status();
    let liar = &guests(&status)[0];
    assert!(number(&liar["resident_bytes"]) > KEPT + 8 * M, "{liar}");
}
