//! URLs with a password in them: whatever is wrong with one, nothing that is shown holds the
//! password.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::urls(data));
