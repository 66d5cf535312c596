//! How much memory and how many connections a load needs.

use std::time::Duration;

use crate::durability::Durability;

/// The most that one done marker costs, key, expiry and hash tables in, for `processed:` and a
/// 36-byte id: what was measured just after Redis doubled its table. Between doublings it is some
/// 20 bytes less.
const DONE: u64 = 175;

/// What a fingerprint adds.
const FINGERPRINT: u64 = 16;

/// What a marker in progress costs more than a done one.
const HELD: u64 = 112;

/// The key that the figures were measured with: `processed:` and a UUID.
const MEASURED_KEY: u64 = 46;

/// What a done marker holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Markers {
    /// `1`.
    #[default]
    Plain,
    /// The fingerprint of the body too: the default in at most once.
    WithFingerprint,
}

/// A load on a Redis, to be planned for with [`plan`].
///
/// ```
/// # use std::time::Duration;
/// use oncegate_redis::{Load, plan};
///
/// let plan = plan(&Load { messages_per_second: 1_000, window: Duration::from_secs(24 * 3600), ..Load::default() });
/// assert_eq!(plan.markers, 86_400_512);
/// assert!(plan.memory > 14_000_000_000 && plan.memory < 17_000_000_000);
/// ```
#[derive(Clone, Debug)]
pub struct Load {
    /// New ids a second, on the average of a window. Default: 1,000.
    pub messages_per_second: u64,
    /// How long a done id is remembered. Default: 24 h.
    pub window: Duration,
    /// The bytes of a key: prefix, scope and id. Default: 46, `processed:` and a UUID.
    pub key_bytes: u64,
    /// What done markers hold.
    pub markers: Markers,
    /// Consumer processes. Default: 1.
    pub processes: u64,
    /// What each of them has in flight at the most. Default: 512.
    pub in_flight: u64,
    /// What claims wait for. Default: the primary alone.
    pub durability: Durability,
    /// Over how many primaries the keys are spread: 1, or those of a Cluster. Default: 1.
    pub primaries: u64,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            messages_per_second: 1_000,
            window: Duration::from_secs(24 * 3600),
            key_bytes: MEASURED_KEY,
            markers: Markers::Plain,
            processes: 1,
            in_flight: 512,
            durability: Durability::Primary,
            primaries: 1,
        }
    }
}

/// What a [`Load`] needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Keys that stand at a time, all primaries together.
    pub markers: u64,
    /// Bytes that they take on each server, primary or replica.
    pub memory: u64,
    /// What to set `maxmemory` to on each server: a quarter more, since tables double and loads
    /// vary. The machine needs up to as much again while Redis rewrites its append-only file.
    pub maxmemory: u64,
    /// Servers that hold the keys: primaries, and their replicas where claims wait for some.
    pub servers: u64,
    /// Connections to each primary, all processes together.
    pub connections: u64,
}

/// What a load needs, by measured bytes a marker.
pub fn plan(load: &Load) -> Plan {
    let done = load
        .messages_per_second
        .saturating_mul(load.window.as_secs().max(1));
    let held = load.processes.saturating_mul(load.in_flight);
    let longer_key = load
        .key_bytes
        .saturating_sub(MEASURED_KEY)
        .next_multiple_of(8);
    let each = DONE
        + longer_key
        + if load.markers == Markers::WithFingerprint {
            FINGERPRINT
        } else {
            0
        };
    let bytes = done
        .saturating_mul(each)
        .saturating_add(held.saturating_mul(each + HELD));
    let memory = bytes.div_ceil(load.primaries.max(1));
    let replicas = match load.durability {
        Durability::Primary => 0,
        Durability::Replicas { count, .. } => u64::from(count),
    };
    Plan {
        markers: done.saturating_add(held),
        memory,
        maxmemory: memory.saturating_add(memory / 4),
        servers: load.primaries.max(1).saturating_mul(replicas + 1),
        // Operations, renewals, and claims where replicas have to know of them.
        connections: load
            .processes
            .saturating_mul(if replicas > 0 { 3 } else { 2 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_multiplied_out() {
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
    fn what_is_too_much_to_count_is_the_most() {
        let all = Load {
            messages_per_second: u64::MAX,
            window: Duration::MAX,
            processes: u64::MAX,
            ..Load::default()
        };
        assert_eq!(plan(&all).memory, u64::MAX);
    }
}
