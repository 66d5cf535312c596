//! Settings of a consumer, whatever numbers and texts: refused with a sentence, or run; never a
//! panic.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::settings(data));
