//! Whatever a broker sends passes in its order and its length, but for what comes back, in however
//! small pieces it comes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::amqp_frames(data));
