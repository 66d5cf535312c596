//! Fuzz targets of all parsers: each takes any bytes, and panics if a property is violated.
//!
//! `fuzz/` runs them with libFuzzer. It is a separate workspace, because fuzzing needs other
//! compiler flags. The targets are library functions, so that the tests of the workspace run them
//! on the stored inputs (`inputs/`) and on variations of these.
#![forbid(unsafe_code)]

mod targets;

pub use targets::*;

/// A function that takes any bytes.
pub type Target = fn(&[u8]);

/// Every target, by its name in `cargo fuzz`.
pub const TARGETS: [(&str, Target); 7] = [
    ("ids", ids),
    ("headers", headers),
    ("markers", markers),
    ("amqp_frames", amqp_frames),
    ("amqp_headers", amqp_headers),
    ("urls", urls),
    ("settings", settings),
];
