//! What strangers write, thrown at what reads it: each function takes any bytes, and panics if what
//! must hold does not.
//!
//! `fuzz/` hands them to libFuzzer, and is a workspace of its own, since fuzzing needs flags that
//! nobody else should build with. They stand here so that all tests of the workspace build them,
//! and try them on what fuzzing has kept (`inputs/`) and on what is made of it.
#![forbid(unsafe_code)]

// What the adapters keep to themselves, as it stands there; where it looks for its neighbours, it
// finds them here.
mod client;
#[allow(dead_code, reason = "the adapter uses the rest")]
#[path = "../../../crates/oncegate-amqp/src/incoming.rs"]
mod incoming;
#[allow(dead_code, reason = "the adapter uses the rest")]
#[path = "../../../crates/oncegate-amqp/src/node.rs"]
mod node;
mod queue_settings;
#[allow(dead_code, reason = "the store uses the rest")]
#[path = "../../../crates/oncegate-redis/src/record.rs"]
mod record;
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
