//! Which node of a Cluster serves which key.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{Pipeline, Value};

use crate::durability::Durability;
use crate::failure::Failure;
use crate::link::{Patience, Place};
use crate::route::Lanes;
use crate::server::{Server, joined};

/// How many hash slots there are.
const SLOTS: u16 = 16_384;

/// The nodes of a Cluster, and what each serves.
pub(crate) struct Cluster {
    /// What the user named; there is at least one.
    seeds: Vec<Server>,
    patience: Patience,
    durability: Durability,
    /// Whether to ask anew who serves what.
    distrusted: AtomicBool,
    pub(crate) moving: Moving,
    state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The last one.
    map: Option<Arc<Map>>,
    /// By address: the seeds, the nodes of the last map, and those that a node named since.
    nodes: HashMap<String, Arc<Lanes>>,
    /// Which of the known nodes is asked first for the next map: another one each time, for any may
    /// be wrong.
    first: usize,
}

/// Who serves what.
pub(crate) struct Map {
    /// The last slot of each range, in order, and its primary's address.
    ranges: Vec<(u16, String)>,
    /// The keys that were looked for: where a node has a slot or two, that takes thousands of
    /// tries.
    keys: Mutex<HashMap<String, KeysByName>>,
}

type KeysByName = HashMap<Vec<u8>, Vec<u8>>;

/// For so long a slot that was on its way to another node is taken for one that still is.
const MOVES_FOR: Duration = Duration::from_secs(60);

/// The slots that were on their way, and since when that is known.
#[derive(Default)]
pub(crate) struct Moving(Mutex<HashMap<u16, Instant>>);

impl Moving {
    pub(crate) fn add(&self, slot: u16) {
        let mut moving = lock(&self.0);
        moving.retain(|_, since| since.elapsed() < MOVES_FOR);
        moving.insert(slot, Instant::now());
    }

    fn has(&self, slot: u16) -> bool {
        lock(&self.0)
            .get(&slot)
            .is_some_and(|since| since.elapsed() < MOVES_FOR)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Map {
    /// The primary of a slot, where there is one.
    pub(crate) fn owner(&self, slot: u16) -> Option<&str> {
        let place = self.ranges.partition_point(|(last, _)| *last < slot);
        self.ranges
            .get(place)
            .map(|(_, address)| address.as_str())
            .filter(|address| !address.is_empty())
    }

    /// How many slots somebody serves.
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
            keys: Mutex::default(),
        }
    }

    /// The first key of this name and a number that a node serves, and that is not on its way to
    /// another.
    pub(crate) fn key_at(&self, address: &str, name: &[u8], moving: &Moving) -> Option<Vec<u8>> {
        let known = lock(&self.keys)
            .get(address)
            .and_then(|keys| keys.get(name))
            .cloned();
        if let Some(key) = known.filter(|key| !moving.has(slot(key))) {
            return Some(key);
        }
        if !self.ranges.iter().any(|(_, it)| it == address) {
            return None;
        }
        let numbered = |number: u16| [name, number.to_string().as_bytes()].concat();
        let mut serves = (0..SLOTS)
            .map(numbered)
            .filter(|key| self.owner(slot(key)) == Some(address));
        let first = serves.next()?;
        if !moving.has(slot(&first)) {
            lock(&self.keys)
                .entry(address.to_owned())
                .or_default()
                .insert(name.to_vec(), first.clone());
            return Some(first);
        }
        // For the time being: those who look later agree on the first.
        serves.find(|key| !moving.has(slot(key)))
    }

    /// Each primary once.
    pub(crate) fn primaries(&self) -> Vec<&str> {
        let mut primaries: Vec<&str> = self
            .ranges
            .iter()
            .map(|(_, address)| address.as_str())
            .filter(|it| !it.is_empty())
            .collect();
        primaries.sort_unstable();
        primaries.dedup();
        primaries
    }
}

impl Cluster {
    pub(crate) fn new(seeds: Vec<Server>, patience: Patience, durability: Durability) -> Self {
        Self {
            seeds,
            patience,
            durability,
            distrusted: AtomicBool::new(false),
            moving: Moving::default(),
            state: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn described(&self) -> String {
        let seeds: Vec<&str> = self.seeds.iter().map(Server::address).collect();
        seeds.join(", ")
    }

    /// Who serves what, asked anew after [`distrust`](Self::distrust). One node after the other is
    /// asked until one knows of every slot; where none does, the one that knows of most is
    /// believed. A node that was reset knows of none.
    ///
    /// # Errors
    /// `NotApplied` if no node knows of a slot; `Misconfigured` if what answers is no Cluster, and
    /// all answer.
    pub(crate) async fn map(&self) -> Result<Arc<Map>, Failure> {
        let mut state = self.state.lock().await;
        if self.distrusted.swap(false, Ordering::Relaxed) {
            state.map = None;
        }
        if let Some(map) = &state.map {
            return Ok(map.clone());
        }
        for seed in &self.seeds {
            state
                .nodes
                .entry(seed.address().to_owned())
                .or_insert_with(|| self.lanes(seed.clone()));
        }
        let mut known: Vec<(String, Arc<Lanes>)> = state
            .nodes
            .iter()
            .map(|(address, node)| (address.clone(), node.clone()))
            .collect();
        known.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        let (mut best, mut why): (Option<Map>, Option<Failure>) = (None, None);
        for _ in 0..known.len() {
            let (_, node) = &known[state.first % known.len()];
            // Before it is asked: who waits no longer than this one is silent asks another the next
            // time.
            state.first = (state.first + 1) % known.len();
            match self.ask(node).await {
                Ok(map) => {
                    let served = map.served();
                    if served > best.as_ref().map_or(0, Map::served) {
                        best = Some(map);
                    }
                    if served == SLOTS {
                        break;
                    }
                }
                Err(failure) => why = Some(failure.beside(why)),
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
        // Whatever was said of the nodes, nothing was sent that could have been applied.
        Err(match why {
            Some(Failure::Unknown(problem)) => Failure::NotApplied(problem),
            Some(failure) => failure,
            None => Failure::not_applied(format!(
                "Redis::cluster: no slot is served, say {}; is the Cluster made?",
                self.described()
            )),
        })
    }

    /// The next to ask learns anew who serves what.
    pub(crate) fn distrust(&self) {
        self.distrusted.store(true, Ordering::Relaxed);
    }

    /// The connections to a node.
    pub(crate) async fn node(&self, address: &str) -> Option<Arc<Lanes>> {
        let mut state = self.state.lock().await;
        if let Some(node) = state.nodes.get(address) {
            return Some(node.clone());
        }
        let (host, port) = address.rsplit_once(':')?;
        let node = self.lanes(self.seeds.first()?.elsewhere(host, port.parse().ok()?));
        state.nodes.insert(address.to_owned(), node.clone());
        Some(node)
    }

    fn lanes(&self, server: Server) -> Arc<Lanes> {
        Arc::new(Lanes::to(
            Ok(Place::Fixed(server)),
            self.patience,
            self.durability,
        ))
    }

    async fn ask(&self, node: &Lanes) -> Result<Map, Failure> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.cmd("CLUSTER").arg("SLOTS");
        match node.general.ask(&pipeline).await?.pop() {
            Some(Value::Array(ranges)) => {
                let host = node.general.host();
                let mut ranges: Vec<(u16, u16, String)> = ranges
                    .into_iter()
                    .map(|range| read_range(range, host))
                    .collect::<Option<_>>()
                    .ok_or_else(wrong_kind)?;
                ranges.sort_unstable();
                Ok(Map::of(without_gaps(ranges)))
            }
            Some(Value::ServerError(error))
                if error
                    .details()
                    .is_some_and(|detail| detail.contains("cluster support disabled")) =>
            {
                Err(Failure::misconfigured(
                    "Redis::cluster names a server that is no Cluster; give a single server to Redis::at",
                ))
            }
            Some(Value::ServerError(error)) => Err(Failure::said_by_server(
                error.code(),
                error.details().unwrap_or_default(),
            )),
            _ => Err(wrong_kind()),
        }
    }
}

fn wrong_kind() -> Failure {
    Failure::unknown("Redis gave an answer of the wrong kind to CLUSTER SLOTS")
}

/// First, last, and the primary: `[first, last, [host, port, …], …]`. A node that does not know its
/// own host names none.
fn read_range(range: Value, asked: &str) -> Option<(u16, u16, String)> {
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
        _ => asked.to_owned(),
    };
    let last = u16::try_from(*last).ok().filter(|last| *last < SLOTS)?;
    Some((
        (*first).try_into().ok()?,
        last,
        joined(&host, (*port).try_into().ok()?),
    ))
}

/// What nobody serves gets an empty address.
fn without_gaps(ranges: Vec<(u16, u16, String)>) -> Vec<(u16, String)> {
    let mut whole = Vec::with_capacity(ranges.len());
    let mut next = 0;
    for (first, last, address) in ranges {
        if first > next {
            whole.push((first - 1, String::new()));
        }
        whole.push((last, address));
        next = last.saturating_add(1);
    }
    whole
}

/// The hash slot of a key: CRC16 (XMODEM) of the key, or of what stands in its first braces.
pub(crate) fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        rest.iter()
            .position(|byte| *byte == b'}')
            .filter(|length| *length > 0)
            .map(|length| &rest[..length])
    });
    let crc = tag.unwrap_or(key).iter().fold(0_u16, |crc, byte| {
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
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot(b"123456789"), 0x31C3 % SLOTS);
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        assert_eq!(slot(b"foo{}{bar}"), slot(b"foo{}{bar}"));
        assert_ne!(slot(b"foo{}{bar}"), slot(b"bar"));
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
    }

    #[test]
    fn a_slot_has_its_primary_or_none() {
        let ranges = vec![
            (0, 5460, "a:1".into()),
            (5462, 10_922, "b:2".into()),
            (10_923, 16_000, "a:1".into()),
        ];
        let map = Map::of(without_gaps(ranges));
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
            Map::of(without_gaps(vec![(0, SLOTS - 1, "a:1".into())])).served(),
            SLOTS
        );
        assert_eq!(Map::of(vec![]).served(), 0);
    }

    #[test]
    fn a_key_of_a_node_is_looked_for_once() {
        let map = Map::of(without_gaps(vec![
            (0, 9_999, "a:1".into()),
            (10_000, SLOTS - 1, "b:2".into()),
        ]));
        let still = Moving::default();
        let key = map.key_at("a:1", b"name", &still).expect("a key");
        assert_eq!(map.owner(slot(&key)), Some("a:1"));
        assert_ne!(map.key_at("b:2", b"name", &still), Some(key));
        assert_eq!(map.key_at("c:3", b"name", &still), None);
        lock(&map.keys)
            .get_mut("a:1")
            .expect("looked for")
            .insert(b"name".to_vec(), b"known".to_vec());
        assert_eq!(map.key_at("a:1", b"name", &still), Some(b"known".to_vec()));
    }

    #[test]
    fn a_key_that_is_on_its_way_is_left_for_the_next_for_a_while() {
        let map = Map::of(without_gaps(vec![(0, SLOTS - 1, "a:1".into())]));
        let moving = Moving::default();
        let first = map.key_at("a:1", b"name", &moving).expect("a key");
        moving.add(slot(&first));
        let next = map.key_at("a:1", b"name", &moving).expect("another key");
        assert_ne!(slot(&first), slot(&next));
        for since in lock(&moving.0).values_mut() {
            *since = Instant::now()
                .checked_sub(MOVES_FOR)
                .expect("the machine is up longer");
        }
        assert_eq!(map.key_at("a:1", b"name", &moving), Some(first));
    }
}
