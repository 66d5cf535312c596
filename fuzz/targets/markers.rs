//! An arbitrary value under the key of a marker: it decodes to exactly one marker, or to none.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::markers(data));
