//! A value that stands where a marker should: it is read as exactly one marker, or as none.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::markers(data));
