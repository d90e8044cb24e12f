//! Decoding an agent's frame panics for no bytes, and a decoded message is encoded to the same bytes.
#![no_main]

use wire::ToWorker;

libfuzzer_sys::fuzz_target!(|frame: &[u8]| {
    if let Ok(message) = ToWorker::decode(frame) {
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(again, frame);
    }
});
