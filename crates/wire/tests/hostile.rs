//! Frames of honest peers arrive as they were sent. Any other frame is refused, without panic, and takes no more memory
//! than its length justifies.

mod messages;

use messages::{to_agent, to_worker};
use proptest::prelude::*;
use wire::{FRAME_BYTES, Malformed, ToAgent, ToWorker};

/// Most bytes of memory that a decoded message may take for each byte of its frame.
const BYTES_A_BYTE: usize = 16;

fn list<T>(list: &[T]) -> usize {
    size_of_val(list)
}

fn bytes_of(message: &ToWorker) -> usize {
    match message {
        ToWorker::Held(runs) | ToWorker::Released(runs) | ToWorker::Home(runs) => list(runs),
        ToWorker::Rested(runs, fingerprints) => list(runs) + list(fingerprints),
        ToWorker::Donated(_, given) => list(given),
        ToWorker::Folded(_, outcomes) => list(outcomes),
        ToWorker::Because(_, reasons) => list(reasons),
        ToWorker::Hello(_) | ToWorker::LeaseTaken(_) => 0,
        ToWorker::Stats(stats) => size_of_val(&**stats) + stats.detail.len(),
        ToWorker::Bye(why) => why.len(),
    }
}

fn bytes_to_agent(message: &ToAgent) -> usize {
    match message {
        ToAgent::Donate(_, ranges) | ToAgent::Why(_, ranges) => list(ranges),
        ToAgent::Fold(_, runs) => list(runs),
        _ => 0,
    }
}

/// Decodes a frame as a message of either side. A message must be no larger than [`BYTES_A_BYTE`] allows, and must be
/// encoded again to the same bytes.
fn decode(frame: &[u8]) {
    let mut again = Vec::new();
    if let Ok(message) = ToWorker::decode(frame) {
        assert!(bytes_of(&message) <= BYTES_A_BYTE * frame.len(), "{message:?}");
        message.encode(&mut again);
        assert_eq!(again, frame, "{message:?}");
    }
    if let Ok(message) = ToAgent::decode(frame) {
        assert!(bytes_to_agent(&message) <= BYTES_A_BYTE * frame.len(), "{message:?}");
        message.encode(&mut again);
        assert_eq!(again, frame, "{message:?}");
    }
}

fn encoded() -> impl Strategy<Value = Vec<u8>> {
    let frame = |encode: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = Vec::new();
        encode(&mut frame);
        frame
    };
    prop_oneof![
        to_worker().prop_map(move |message| frame(&|f| message.encode(f))),
        to_agent().prop_map(move |message| frame(&|f| message.encode(f))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn agent_message_arrives(message in to_worker()) {
        let mut frame = vec![1, 2, 3];
        message.encode(&mut frame);
        prop_assert!(frame.len() <= FRAME_BYTES);
        prop_assert_eq!(ToWorker::decode(&frame), Ok(message));
    }

    #[test]
    fn worker_message_arrives(message in to_agent()) {
        let mut frame = vec![1, 2, 3];
        message.encode(&mut frame);
        prop_assert!(frame.len() <= FRAME_BYTES);
        prop_assert_eq!(ToAgent::decode(&frame), Ok(message));
    }

    #[test]
    fn cut_frame_is_refused(frame in encoded(), at in any::<prop::sample::Index>()) {
        let cut = &frame[..at.index(frame.len())];
        decode(cut);
        let known = (ToWorker::decode(&frame).is_ok(), ToAgent::decode(&frame).is_ok());
        prop_assert!(!known.0 || ToWorker::decode(cut).is_err());
        prop_assert!(!known.1 || ToAgent::decode(cut).is_err());
    }

    #[test]
    fn frame_with_bytes_left_over_is_refused(mut frame in encoded(), more in prop::collection::vec(any::<u8>(), 1..20)) {
        let known = (ToWorker::decode(&frame).is_ok(), ToAgent::decode(&frame).is_ok());
        frame.extend(more);
        decode(&frame);
        prop_assert!(!known.0 || ToWorker::decode(&frame).is_err());
        prop_assert!(!known.1 || ToAgent::decode(&frame).is_err());
    }

    #[test]
    fn flipped_bits_do_no_harm(mut frame in encoded(), flips in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8)) {
        for (at, bit) in flips {
            let at = at.index(frame.len());
            frame[at] ^= 1 << (bit % 8);
        }
        decode(&frame);
    }

    #[test]
    fn any_bytes_do_no_harm(kind in 0_u16..12, frame in prop::collection::vec(any::<u8>(), 0..600)) {
        decode(&frame);
        decode(&[&kind.to_le_bytes()[..], &frame].concat());
    }
}

/// Lists at their bounds are decoded, and longer ones are refused. A promised length without the bytes is refused too.
#[test]
fn lists_are_bounded() {
    let mut frame = Vec::new();
    ToWorker::Folded(1, vec![wire::Outcome::Folded; wire::FOLD_PAGES]).encode(&mut frame);
    assert!(ToWorker::decode(&frame).is_ok());
    ToWorker::Folded(1, vec![wire::Outcome::Folded; wire::FOLD_PAGES + 1]).encode(&mut frame);
    assert!(matches!(ToWorker::decode(&frame), Err(Malformed::OutOfRange(_))));
    for kind in 1..9_u16 {
        for promised in [100, 2048, 4096, u32::MAX] {
            let mut frame = kind.to_le_bytes().to_vec();
            frame.extend([promised.to_le_bytes(), promised.to_le_bytes(), promised.to_le_bytes()].concat());
            decode(&frame);
        }
    }
}

#[test]
fn longest_messages_fit_into_a_frame() {
    let start = page::HostVirt(0);
    let slot = page::PoolSlot::from_bits(0);
    let mut frame = Vec::new();
    let runs = vec![wire::RestedRun { start, pages: 2, huge: false }; 2048];
    ToWorker::Rested(runs, vec![page::Fingerprint(1); wire::RESTED_PAGES]).encode(&mut frame);
    assert!(frame.len() <= FRAME_BYTES && ToWorker::decode(&frame).is_ok(), "{}", frame.len());
    ToWorker::Held(vec![wire::SlotRun { start, slot, pages: 1 }; 2048]).encode(&mut frame);
    assert!(frame.len() <= FRAME_BYTES && ToWorker::decode(&frame).is_ok(), "{}", frame.len());
    let fold = wire::FoldRun { start, pages: 1, target: wire::Target::Slot(slot) };
    ToAgent::Fold(1, vec![fold; wire::FOLD_PAGES]).encode(&mut frame);
    assert!(frame.len() <= FRAME_BYTES && ToAgent::decode(&frame).is_ok(), "{}", frame.len());
}
