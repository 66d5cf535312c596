//! Headers as Kafka's reader and the laws write them into one block, and a block of
//! arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::headers(data));
