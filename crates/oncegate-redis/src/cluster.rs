//! The slots of a Cluster and the nodes that serve them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::internal::Lock;
use redis::{Pipeline, Value};

use crate::client::connection::{Endpoint, Timeouts};
use crate::client::server::{ServerConfig, host_and_port};
use crate::durability::Durability;
use crate::failure::StoreFailure;
use crate::reply;
use crate::router::ConnectionPair;

/// The number of hash slots.
const SLOTS: u16 = 16_384;

/// The nodes of a Cluster and their slots.
pub(crate) struct Cluster {
    /// The nodes that the user configured; at least one.
    seeds: Vec<ServerConfig>,
    timeouts: Timeouts,
    durability: Durability,
    /// Whether to fetch the slot map again before it is used.
    invalidated: AtomicBool,
    pub(crate) migrating: MigratingSlots,
    state: tokio::sync::Mutex<TopologyCache>,
}

#[derive(Default)]
struct TopologyCache {
    /// The last slot map.
    map: Option<Arc<SlotMap>>,
    /// The connections by address: to the seeds, the nodes of the last map, and the targets of
    /// redirections since.
    nodes: HashMap<String, Arc<ConnectionPair>>,
    /// The node that is queried first for the next slot map: another one each time, since any node
    /// may have an old map.
    next_node: usize,
}

/// The primary of each slot.
pub(crate) struct SlotMap {
    /// The last slot of each range, in order, and its primary's address.
    ranges: Vec<(u16, String)>,
    /// Cache of [`key_on_node`](Self::key_on_node): a node with few slots takes thousands of tries.
    keys: Lock<HashMap<String, KeysByName>>,
}

/// The keys on one node, by the name that they begin with.
type KeysByName = HashMap<Vec<u8>, Vec<u8>>;

/// How long a slot counts as migrating after an `ASK` redirection.
const MIGRATION_TTL: Duration = Duration::from_secs(60);

/// The slots that are migrating, with the time of the last `ASK` redirection.
#[derive(Default)]
pub(crate) struct MigratingSlots(Lock<HashMap<u16, Instant>>);

impl MigratingSlots {
    pub(crate) fn add(&self, slot: u16) {
        let mut migrating = self.0.lock();
        migrating.retain(|_, since| since.elapsed() < MIGRATION_TTL);
        migrating.insert(slot, Instant::now());
    }

    fn contains(&self, slot: u16) -> bool {
        self.0
            .lock()
            .get(&slot)
            .is_some_and(|since| since.elapsed() < MIGRATION_TTL)
    }
}

impl SlotMap {
    /// The primary of a slot, if it has one.
    pub(crate) fn owner(&self, slot: u16) -> Option<&str> {
        let index = self.ranges.partition_point(|(last, _)| *last < slot);
        self.ranges
            .get(index)
            .map(|(_, address)| address.as_str())
            .filter(|address| !address.is_empty())
    }

    /// The number of slots that have a primary.
    fn served(&self) -> u16 {
        let mut next = 0;
        let mut served = 0;
        for (last, address) in &self.ranges {
            served += if address.is_empty() {
                0
            } else {
                (last + 1).saturating_sub(next)
            };
            next = next.max(last + 1);
        }
        served
    }

    fn of(ranges: Vec<(u16, String)>) -> Self {
        Self {
            ranges,
            keys: Lock::default(),
        }
    }

    /// The first key of the form `<name><number>` that a node serves and whose slot is not
    /// migrating.
    pub(crate) fn key_on_node(
        &self,
        address: &str,
        name: &[u8],
        migrating: &MigratingSlots,
    ) -> Option<Vec<u8>> {
        let known = self
            .keys
            .lock()
            .get(address)
            .and_then(|keys| keys.get(name))
            .cloned();
        if let Some(key) = known.filter(|key| !migrating.contains(slot(key))) {
            return Some(key);
        }
        if !self.ranges.iter().any(|(_, primary)| primary == address) {
            return None;
        }
        let numbered = |number: u16| [name, number.to_string().as_bytes()].concat();
        let mut serves = (0..SLOTS)
            .map(numbered)
            .filter(|key| self.owner(slot(key)) == Some(address));
        let first = serves.next()?;
        if !migrating.contains(slot(&first)) {
            self.keys
                .lock()
                .entry(address.to_owned())
                .or_default()
                .insert(name.to_vec(), first.clone());
            return Some(first);
        }
        // Not cached: after the migration all processes use the first key again.
        serves.find(|key| !migrating.contains(slot(key)))
    }

    /// Each primary once.
    pub(crate) fn primaries(&self) -> Vec<&str> {
        let mut primaries: Vec<&str> = self
            .ranges
            .iter()
            .map(|(_, address)| address.as_str())
            .filter(|address| !address.is_empty())
            .collect();
        primaries.sort_unstable();
        primaries.dedup();
        primaries
    }
}

impl Cluster {
    pub(crate) fn new(
        seeds: Vec<ServerConfig>,
        timeouts: Timeouts,
        durability: Durability,
    ) -> Self {
        Self {
            seeds,
            timeouts,
            durability,
            invalidated: AtomicBool::new(false),
            migrating: MigratingSlots::default(),
            state: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn described(&self) -> String {
        let seeds: Vec<&str> = self.seeds.iter().map(ServerConfig::address).collect();
        seeds.join(", ")
    }

    /// The slot map, fetched again after [`invalidate`](Self::invalidate). Queries one node after
    /// the other until one reports all slots, and otherwise takes the map with the most slots: a
    /// node that was reset reports none.
    ///
    /// # Errors
    /// `NotApplied` if no node reports a slot; `Misconfigured` if all servers reply and none is in
    /// a Cluster.
    pub(crate) async fn map(&self) -> Result<Arc<SlotMap>, StoreFailure> {
        let mut state = self.state.lock().await;
        if self.invalidated.swap(false, Ordering::Relaxed) {
            state.map = None;
        }
        if let Some(map) = &state.map {
            return Ok(map.clone());
        }
        for seed in &self.seeds {
            state
                .nodes
                .entry(seed.address().to_owned())
                .or_insert_with(|| self.connections(seed.clone()));
        }
        let mut known: Vec<(String, Arc<ConnectionPair>)> = state
            .nodes
            .iter()
            .map(|(address, node)| (address.clone(), node.clone()))
            .collect();
        known.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        let (mut best, mut last_failure): (Option<SlotMap>, Option<StoreFailure>) = (None, None);
        for _ in 0..known.len() {
            let (_, node) = &known[state.next_node % known.len()];
            // Before the query: a caller that is cancelled before this node replies queries another
            // node the next time.
            state.next_node = (state.next_node + 1) % known.len();
            match self.fetch_slots(node).await {
                Ok(map) => {
                    let served = map.served();
                    if served > best.as_ref().map_or(0, SlotMap::served) {
                        best = Some(map);
                    }
                    if served == SLOTS {
                        break;
                    }
                }
                Err(failure) => last_failure = Some(failure.prefer_retryable(last_failure)),
            }
        }
        if let Some(map) = best {
            let is_seed =
                |address: &String| self.seeds.iter().any(|seed| seed.address() == address);
            state.nodes.retain(|address, _| {
                is_seed(address) || map.primaries().contains(&address.as_str())
            });
            let map = Arc::new(map);
            state.map = Some(map.clone());
            return Ok(map);
        }
        // No operation was sent, so the outcome is known even if a query got no reply.
        Err(match last_failure {
            Some(StoreFailure::Unknown(problem)) => StoreFailure::NotApplied(problem),
            Some(failure) => failure,
            None => StoreFailure::not_applied(format!(
                "Redis::cluster: {} report no served slot; check that the Cluster was created",
                self.described()
            )),
        })
    }

    /// Fetches the slot map again before it is used next.
    pub(crate) fn invalidate(&self) {
        self.invalidated.store(true, Ordering::Relaxed);
    }

    /// The connections to a node.
    pub(crate) async fn node(&self, address: &str) -> Option<Arc<ConnectionPair>> {
        let mut state = self.state.lock().await;
        if let Some(node) = state.nodes.get(address) {
            return Some(node.clone());
        }
        let (host, port) = address.rsplit_once(':')?;
        let node = self.connections(self.seeds.first()?.with_address(host, port.parse().ok()?));
        state.nodes.insert(address.to_owned(), node.clone());
        Some(node)
    }

    fn connections(&self, server: ServerConfig) -> Arc<ConnectionPair> {
        Arc::new(ConnectionPair::to(
            Ok(Endpoint::Fixed(server)),
            self.timeouts,
            self.durability,
        ))
    }

    async fn fetch_slots(&self, node: &ConnectionPair) -> Result<SlotMap, StoreFailure> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.cmd("CLUSTER").arg("SLOTS");
        match node.general.send(&pipeline).await?.pop() {
            Some(Value::Array(ranges)) => {
                let host = node.general.host();
                let mut ranges: Vec<(u16, u16, String)> = ranges
                    .into_iter()
                    .map(|range| read_range(range, host))
                    .collect::<Option<_>>()
                    .ok_or_else(|| reply::wrong_type("CLUSTER SLOTS"))?;
                ranges.sort_unstable();
                Ok(SlotMap::of(fill_gaps(ranges)))
            }
            Some(Value::ServerError(error))
                if error
                    .details()
                    .is_some_and(|detail| detail.contains("cluster support disabled")) =>
            {
                Err(StoreFailure::misconfigured(
                    "Redis::cluster: the server is not in cluster mode; use Redis::at for a single server",
                ))
            }
            Some(Value::ServerError(error)) => Err(crate::failure::of_reply(&error)),
            _ => Err(reply::wrong_type("CLUSTER SLOTS")),
        }
    }
}

/// Reads the first slot, the last slot and the primary of `[first, last, [host, port, …], …]`. A
/// node that does not know its own host sends none; the host it was queried at is used instead.
fn read_range(range: Value, queried_host: &str) -> Option<(u16, u16, String)> {
    let Value::Array(fields) = range else {
        return None;
    };
    let [
        Value::Int(first),
        Value::Int(last),
        Value::Array(primary),
        ..,
    ] = fields.as_slice()
    else {
        return None;
    };
    let [host, Value::Int(port), ..] = primary.as_slice() else {
        return None;
    };
    let host = match host {
        Value::BulkString(host) if !host.is_empty() => String::from_utf8_lossy(host).into_owned(),
        _ => queried_host.to_owned(),
    };
    let last = u16::try_from(*last).ok().filter(|last| *last < SLOTS)?;
    Some((
        (*first).try_into().ok()?,
        last,
        host_and_port(&host, (*port).try_into().ok()?),
    ))
}

/// Adds ranges with an empty address for slots without a primary.
fn fill_gaps(ranges: Vec<(u16, u16, String)>) -> Vec<(u16, String)> {
    let mut complete = Vec::with_capacity(ranges.len());
    let mut next = 0;
    for (first, last, address) in ranges {
        if first > next {
            complete.push((first - 1, String::new()));
        }
        complete.push((last, address));
        next = last.saturating_add(1);
    }
    complete
}

/// The hash tag of a key: the bytes between the first `{` and the first `}` after it, if there are any.
pub(crate) fn hash_tag(key: &[u8]) -> Option<&[u8]> {
    let open = key.iter().position(|byte| *byte == b'{')?;
    let after_brace = &key[open + 1..];
    let length = after_brace.iter().position(|byte| *byte == b'}')?;
    (length > 0).then(|| &after_brace[..length])
}

/// The hash slot of a key: CRC16 (XMODEM) of the key or of its hash tag.
pub(crate) fn slot(key: &[u8]) -> u16 {
    let crc = hash_tag(key)
        .unwrap_or(key)
        .iter()
        .fold(0_u16, |crc, byte| {
            (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
                if crc & 0x8000 == 0 {
                    crc << 1
                } else {
                    crc << 1 ^ 0x1021
                }
            })
        });
    crc % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_the_specification() {
        assert_eq!(slot(b"123456789"), 0x31C3 % SLOTS);
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        assert_eq!(slot(b"foo{}{bar}"), slot(b"foo{}{bar}"));
        assert_ne!(slot(b"foo{}{bar}"), slot(b"bar"));
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
    }

    #[test]
    fn a_slot_maps_to_its_primary_or_none() {
        let ranges = vec![
            (0, 5460, "a:1".into()),
            (5462, 10_922, "b:2".into()),
            (10_923, 16_000, "a:1".into()),
        ];
        let map = SlotMap::of(fill_gaps(ranges));
        for (slot, owner) in [
            (0, Some("a:1")),
            (5460, Some("a:1")),
            (5461, None),
            (5462, Some("b:2")),
            (16_000, Some("a:1")),
            (16_001, None),
        ] {
            assert_eq!(map.owner(slot), owner, "{slot}");
        }
        assert_eq!(map.primaries(), ["a:1", "b:2"]);
        assert_eq!(map.served(), 16_000);
        assert_eq!(
            SlotMap::of(fill_gaps(vec![(0, SLOTS - 1, "a:1".into())])).served(),
            SLOTS
        );
        assert_eq!(SlotMap::of(vec![]).served(), 0);
    }

    #[test]
    fn the_key_on_a_node_is_cached() {
        let map = SlotMap::of(fill_gaps(vec![
            (0, 9_999, "a:1".into()),
            (10_000, SLOTS - 1, "b:2".into()),
        ]));
        let none = MigratingSlots::default();
        let key = map.key_on_node("a:1", b"name", &none).expect("a key");
        assert_eq!(map.owner(slot(&key)), Some("a:1"));
        assert_ne!(map.key_on_node("b:2", b"name", &none), Some(key));
        assert_eq!(map.key_on_node("c:3", b"name", &none), None);
        map.keys
            .lock()
            .get_mut("a:1")
            .expect("the key is cached")
            .insert(b"name".to_vec(), b"known".to_vec());
        assert_eq!(
            map.key_on_node("a:1", b"name", &none),
            Some(b"known".to_vec())
        );
    }

    #[test]
    fn a_key_in_a_migrating_slot_is_avoided_for_a_while() {
        let map = SlotMap::of(fill_gaps(vec![(0, SLOTS - 1, "a:1".into())]));
        let migrating = MigratingSlots::default();
        let first = map.key_on_node("a:1", b"name", &migrating).expect("a key");
        migrating.add(slot(&first));
        let next = map
            .key_on_node("a:1", b"name", &migrating)
            .expect("another slot is not migrating");
        assert_ne!(slot(&first), slot(&next));
        for since in migrating.0.lock().values_mut() {
            *since = Instant::now()
                .checked_sub(MIGRATION_TTL)
                .expect("the machine has run for longer than MIGRATION_TTL");
        }
        assert_eq!(map.key_on_node("a:1", b"name", &migrating), Some(first));
    }
}
