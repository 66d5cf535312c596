//! A value that stands where a marker should: it is read as exactly one marker, or as none.
#![no_main]

#[allow(dead_code, reason = "the store uses the rest")]
#[path = "../../crates/oncegate-redis/src/record.rs"]
mod record;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(marker) = record::decode(data) {
        let written = record::encode(&marker);
        // Numbers may have been written with zeros before them; once written by us, nothing changes any more.
        let again = record::decode(written.as_bytes());
        let again = again.unwrap_or_else(|problem| panic!("{written:?} was written and is {problem:?}"));
        assert_eq!(record::encode(&again), written);
    }
});
