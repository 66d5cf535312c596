//! Two different ids never share a key, whatever bytes they are, and no id leaves its alphabet.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::ids(data));
