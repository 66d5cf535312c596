//! Headers as Kafka's reader and the laws write them into one block, and a block that nobody wrote.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::headers(data));
