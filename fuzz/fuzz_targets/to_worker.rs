//! Whatever bytes come, decoding does not panic, and what is understood is written as it came.
#![no_main]

use wire::ToWorker;

libfuzzer_sys::fuzz_target!(|frame: &[u8]| {
    if let Ok(message) = ToWorker::decode(frame) {
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(again, frame);
    }
});
