//! Decoding a worker's frame panics for no bytes, and a decoded message is encoded to the same bytes.
#![no_main]

use wire::ToAgent;

libfuzzer_sys::fuzz_target!(|frame: &[u8]| {
    if let Ok(message) = ToAgent::decode(frame) {
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(again, frame);
    }
});
