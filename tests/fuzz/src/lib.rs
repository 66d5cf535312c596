//! Malformed input for all parsers: each function takes any bytes, and panics if what must hold does
//! not.
//!
//! `fuzz/` hands them to libFuzzer. It is a workspace of its own, because fuzzing needs other flags
//! than the rest. They are functions of a library so that the tests of the workspace build them, and
//! run them on the inputs that fuzzing has kept (`inputs/`) and on variations of these.
#![forbid(unsafe_code)]

mod targets;

pub use targets::*;

/// What takes any bytes.
pub type Target = fn(&[u8]);

/// Every target, by the name by which `cargo fuzz` runs it.
pub const TARGETS: [(&str, Target); 7] = [
    ("ids", ids),
    ("headers", headers),
    ("markers", markers),
    ("amqp_frames", amqp_frames),
    ("amqp_headers", amqp_headers),
    ("urls", urls),
    ("settings", settings),
];
