//! Headers and properties of an AMQP message, whatever types and numbers they bear.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oncegate_fuzzed::amqp_headers(data));
