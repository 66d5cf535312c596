//! Estimates the memory and the connections that a load needs.

use std::time::Duration;

use crate::durability::Durability;

/// The bytes of one done marker with its key, expiry and share of the hash tables, for `processed:`
/// and a 36-byte id. Measured just after Redis doubled its table; otherwise about 20 bytes less.
const DONE_BYTES: u64 = 175;

/// The additional bytes of a fingerprint.
const FINGERPRINT_BYTES: u64 = 16;

/// The additional bytes of a marker in progress.
const IN_PROGRESS_BYTES: u64 = 112;

/// The bytes of the measured key: `processed:` and a UUID.
const MEASURED_KEY_BYTES: u64 = 46;

/// The content of done markers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Markers {
    /// `1`.
    #[default]
    Plain,
    /// With the fingerprint of the body: the default for at most once.
    WithFingerprint,
}

/// The load of a Redis server, the input of [`plan`].
///
/// ```
/// # use std::time::Duration;
/// use oncegate_redis::{Load, plan};
///
/// let plan = plan(&Load::new(1_000, Duration::from_secs(24 * 3600)));
/// assert_eq!(plan.markers, 86_400_512);
/// assert!(plan.memory > 14_000_000_000 && plan.memory < 17_000_000_000);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Load {
    /// New ids a second, averaged over a window. Default: 1,000.
    pub messages_per_second: u64,
    /// How long a done id is stored. Default: 24 h.
    pub window: Duration,
    /// The bytes of a key: prefix, scope and id. Default: 46, `processed:` and a UUID.
    pub key_bytes: u64,
    /// The content of done markers. Default: [`Markers::Plain`].
    pub markers: Markers,
    /// Consumer processes. Default: 1.
    pub processes: u64,
    /// The maximum number of messages in flight in each process. Default: 512.
    pub in_flight: u64,
    /// What claims wait for. Default: [`Durability::Primary`].
    pub durability: Durability,
    /// The number of primaries: 1, or those of a Cluster. Default: 1.
    pub primaries: u64,
}

impl Load {
    /// This many new ids a second, each remembered for the window; all else as by default.
    pub fn new(messages_per_second: u64, window: Duration) -> Self {
        Self {
            messages_per_second,
            window,
            ..Self::default()
        }
    }

    /// The same load with keys of this many bytes.
    pub fn with_key_bytes(mut self, key_bytes: u64) -> Self {
        self.key_bytes = key_bytes;
        self
    }

    /// The same load with this content of done markers.
    pub fn with_markers(mut self, markers: Markers) -> Self {
        self.markers = markers;
        self
    }

    /// The same load with this many consumer processes, each with this many messages in flight.
    pub fn with_processes(mut self, processes: u64, in_flight: u64) -> Self {
        (self.processes, self.in_flight) = (processes, in_flight);
        self
    }

    /// The same load with this durability.
    pub fn with_durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// The same load on this many primaries.
    pub fn with_primaries(mut self, primaries: u64) -> Self {
        self.primaries = primaries;
        self
    }
}

impl Default for Load {
    fn default() -> Self {
        Self {
            messages_per_second: 1_000,
            window: Duration::from_secs(24 * 3600),
            key_bytes: MEASURED_KEY_BYTES,
            markers: Markers::Plain,
            processes: 1,
            in_flight: 512,
            durability: Durability::Primary,
            primaries: 1,
        }
    }
}

/// The requirements of a [`Load`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// Keys at one time, on all primaries together.
    pub markers: u64,
    /// Bytes that the keys occupy on each server, primary or replica.
    pub memory: u64,
    /// The value of `maxmemory` for each server: a quarter more, since tables double and loads vary.
    /// While Redis rewrites its append-only file, the machine needs up to as much again.
    pub maxmemory: u64,
    /// Primaries, and their replicas if claims wait for some.
    pub servers: u64,
    /// Connections to each primary, all processes together.
    pub connections: u64,
}

/// Computes the requirements of a load from the measured size of a marker. Sums and products that
/// do not fit into 64 bits count as `u64::MAX`.
pub fn plan(load: &Load) -> Plan {
    let done = load
        .messages_per_second
        .saturating_mul(load.window.as_secs().max(1));
    let in_progress = load.processes.saturating_mul(load.in_flight);
    let longer_key = load
        .key_bytes
        .saturating_sub(MEASURED_KEY_BYTES)
        .checked_next_multiple_of(8)
        .unwrap_or(u64::MAX);
    let fingerprint = if load.markers == Markers::WithFingerprint {
        FINGERPRINT_BYTES
    } else {
        0
    };
    let each = (DONE_BYTES + fingerprint).saturating_add(longer_key);
    let bytes = done
        .saturating_mul(each)
        .saturating_add(in_progress.saturating_mul(each.saturating_add(IN_PROGRESS_BYTES)));
    let memory = bytes.div_ceil(load.primaries.max(1));
    let replicas = match load.durability {
        Durability::Primary => 0,
        Durability::Replicas { count, .. } => u64::from(count),
    };
    Plan {
        markers: done.saturating_add(in_progress),
        memory,
        maxmemory: memory.saturating_add(memory / 4),
        servers: load
            .primaries
            .max(1)
            .saturating_mul(replicas.saturating_add(1)),
        // For operations, for renewals, and for claims that wait for replicas.
        connections: load
            .processes
            .saturating_mul(if replicas > 0 { 3 } else { 2 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_computed_from_the_load() {
        let load = Load {
            messages_per_second: 10,
            window: Duration::from_secs(100),
            in_flight: 0,
            ..Load::default()
        };
        let whole = plan(&load);
        assert_eq!(
            whole,
            Plan {
                markers: 1_000,
                memory: 175_000,
                maxmemory: 218_750,
                servers: 1,
                connections: 2
            }
        );
        let longer = plan(&Load {
            key_bytes: 50,
            markers: Markers::WithFingerprint,
            ..load.clone()
        });
        assert_eq!(longer.memory, 1_000 * (175 + 8 + 16));
        let replicas = Durability::Replicas {
            count: 2,
            timeout: Duration::ZERO,
        };
        let spread = plan(&Load {
            primaries: 4,
            durability: replicas,
            processes: 5,
            ..load
        });
        assert_eq!(
            (spread.memory, spread.servers, spread.connections),
            (43_750, 12, 15)
        );
    }

    #[test]
    fn overflow_saturates() {
        let all = Load {
            messages_per_second: u64::MAX,
            window: Duration::MAX,
            processes: u64::MAX,
            ..Load::default()
        };
        assert_eq!(plan(&all).memory, u64::MAX);
        for key_bytes in [
            u64::MAX,
            u64::MAX - 7,
            u64::MAX - MEASURED_KEY_BYTES - DONE_BYTES,
        ] {
            let long = Load {
                key_bytes,
                markers: Markers::WithFingerprint,
                ..Load::default()
            };
            assert_eq!(plan(&long).memory, u64::MAX, "{key_bytes}");
        }
    }
}
