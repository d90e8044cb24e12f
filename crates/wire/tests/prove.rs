//! Questions to the prover and its answers arrive as they were sent. Anything else is refused.

use page::{HostVirt, PAGE_BYTES, PageRange};
use proptest::prelude::*;
use wire::Malformed;
use wire::prove::{
    ANSWER_BYTES, KEEP_BYTES, Kept, Kind, PROVE_PAGES, PROVE_RANGES, Proof, QUESTION_BYTES, Question, SLOTS,
    decode_answer, decode_keep, decode_kept, encode_answer, encode_keep, encode_kept,
};

fn ranges() -> impl Strategy<Value = Vec<PageRange>> {
    let range = (0_u64..1 << 40, 1_u64..=8)
        .prop_map(|(page, pages)| PageRange { start: HostVirt(page * PAGE_BYTES as u64), pages });
    prop::collection::vec(range, 1..=PROVE_RANGES)
}

fn proofs() -> impl Strategy<Value = Vec<Proof>> {
    let proof = prop_oneof![Just(Proof::Free), Just(Proof::Referenced), Just(Proof::Unknown)];
    prop::collection::vec(proof, 1..=PROVE_PAGES)
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Private), Just(Kind::Slot)]
}

fn encoded(kind: Kind, id: u32, ranges: &[PageRange]) -> Vec<u8> {
    let mut frame = [0xaa; QUESTION_BYTES];
    let bytes = Question::encode(kind, id, ranges, &mut frame).expect("a question");
    frame[..bytes].to_vec()
}

/// Decodes a frame. A question must keep to its bounds, and must be encoded again to the same bytes.
fn decode(frame: &[u8]) -> bool {
    let Ok(question) = Question::decode(frame) else { return false };
    let ranges: Vec<PageRange> = question.ranges().collect();
    assert!((1..=PROVE_RANGES).contains(&ranges.len()));
    assert_eq!(ranges.iter().map(|r| r.pages).sum::<u64>(), question.pages as u64);
    assert!((1..=PROVE_PAGES).contains(&question.pages));
    assert!(ranges.iter().all(|r| r.end().0 <= 1 << 57 && r.pages > 0 && r.start.0.is_multiple_of(PAGE_BYTES as u64)));
    assert_eq!(encoded(question.kind, question.id, &ranges), frame);
    true
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn question_arrives(kind in kind(), id in any::<u32>(), ranges in ranges()) {
        let frame = encoded(kind, id, &ranges);
        let question = Question::decode(&frame).unwrap();
        prop_assert_eq!((question.kind, question.id), (kind, id));
        prop_assert_eq!(question.ranges().collect::<Vec<_>>(), ranges);
    }

    #[test]
    fn answer_arrives(id in any::<u32>(), proofs in proofs()) {
        let mut frame = [0xaa; ANSWER_BYTES];
        let bytes = encode_answer(id, proofs.iter().copied(), &mut frame);
        let mut found = vec![Proof::Unknown; proofs.len()];
        prop_assert_eq!(decode_answer(&frame[..bytes], id, &mut found), Ok(true));
        prop_assert_eq!(&found, &proofs);
        prop_assert_eq!(decode_answer(&frame[..bytes], id.wrapping_add(1), &mut found), Ok(false));
        let mut one_less = vec![Proof::Unknown; proofs.len() - 1];
        prop_assert_eq!(decode_answer(&frame[..bytes], id, &mut one_less), Err(Malformed::TooLong));
        prop_assert!(decode_answer(&frame[..bytes - 1], id, &mut found).is_err());
    }

    #[test]
    fn question_cut_within_a_range_or_with_bytes_left_over_is_refused(
        kind in kind(),
        ranges in ranges(),
        at in any::<prop::sample::Index>(),
        more in prop::collection::vec(any::<u8>(), 1..12),
    ) {
        let frame = encoded(kind, 1, &ranges);
        let cut = at.index(frame.len());
        let is_whole = match cut.saturating_sub(4) % 12 {
            0 => cut > 4,
            1 => cut > 5 && frame[cut - 1] == SLOTS,
            _ => false,
        };
        prop_assert_eq!(decode(&frame[..cut]), is_whole);
        let is_other_kind = kind == Kind::Private && more == [SLOTS];
        prop_assert_eq!(decode(&[&frame[..], &more].concat()), is_other_kind);
    }

    #[test]
    fn flipped_bits_do_no_harm(kind in kind(), ranges in ranges(), flips in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8)) {
        let mut frame = encoded(kind, 7, &ranges);
        for (at, bit) in flips {
            let at = at.index(frame.len());
            frame[at] ^= 1 << (bit % 8);
        }
        decode(&frame);
    }

    #[test]
    fn any_bytes_do_no_harm(frame in prop::collection::vec(any::<u8>(), 0..1000), answers in 0_usize..600) {
        decode(&frame);
        let mut proofs = vec![Proof::Unknown; answers];
        let id = frame.first_chunk().map_or(0, |id| u32::from_le_bytes(*id));
        let _ = decode_answer(&frame, id, &mut proofs);
    }
}

#[test]
fn questions_are_bounded() {
    let range = |start: u64, pages: u64| PageRange { start: HostVirt(start), pages };
    let mut frame = [0; QUESTION_BYTES];
    let mut is_taken = |ranges: &[PageRange]| Question::encode(Kind::Slot, 1, ranges, &mut frame).is_some();
    assert!(is_taken(&[range(0, 512)]) && is_taken(&[range(4096, 8); 64]));
    assert!(!is_taken(&[]) && !is_taken(&[range(0, 0)]) && !is_taken(&[range(0, 513)]));
    assert!(!is_taken(&[range(0, 1); 65]) && !is_taken(&[range(0, 256), range(0, 257)]));
    assert!(!is_taken(&[range(1, 1)]) && !is_taken(&[range((1 << 57) | 4096, 1)]) && !is_taken(&[range(1 << 57, 1)]));
    assert!(!is_taken(&[range(0, (1 << 32) + 1)]) && !is_taken(&[range(0, u64::MAX)]));
    assert!(is_taken(&[range((1 << 57) - 4096, 1)]));
    // The longest answer, and one with a byte that is no proof.
    let mut answer = [0; ANSWER_BYTES];
    let bytes = encode_answer(9, [Proof::Referenced; PROVE_PAGES + 5].into_iter(), &mut answer);
    assert_eq!(bytes, ANSWER_BYTES);
    answer[100] = 3;
    assert!(decode_answer(&answer, 9, &mut [Proof::Free; PROVE_PAGES]).is_err());
}

/// Decodes a frame about a child that is to be followed. It must be encoded again to the same bytes.
fn is_about_child(frame: &[u8]) -> bool {
    let (asked, answered) = (decode_keep(frame), decode_kept(frame));
    asked.inspect(|number| assert_eq!(encode_keep(*number), frame));
    answered.inspect(|(number, kept)| assert_eq!(encode_kept(*number, *kept), frame));
    assert!(asked.is_none() || answered.is_none());
    asked.is_some() || answered.is_some()
}

proptest! {
    #[test]
    fn requests_to_follow_a_child_and_answers_arrive_as_they_were_sent(number: u32) {
        prop_assert_eq!(decode_keep(&encode_keep(number)), Some(number));
        for kept in [Kept::Yes, Kept::Last, Kept::No] {
            prop_assert_eq!(decode_kept(&encode_kept(number, kept)), Some((number, kept)));
        }
    }

    #[test]
    fn frames_of_any_bytes_and_length_are_no_requests_to_follow_a_child(
        letter in prop_oneof![any::<u8>(), prop::sample::select(b"Kkyfn".to_vec())],
        rest in prop::collection::vec(any::<u8>(), 0..=KEEP_BYTES + 3),
    ) {
        let frame = [vec![letter], rest].concat();
        prop_assert_eq!(is_about_child(&frame), frame.len() == KEEP_BYTES && b"Kyfn".contains(&letter));
        prop_assert!(!is_about_child(&[]));
    }
}
