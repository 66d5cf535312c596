//! What is handled one after the other.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use crate::id::Key;
use crate::message::Position;
use crate::slots::Slot;
use crate::source::{Delivery, Order, Returns};

/// How long a lane waits for a released delivery beyond its delay, before it is taken for gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// How soon a delivery is looked at again that came before those that come at once.
const SOON: Duration = Duration::from_millis(5);
/// The same, where what it waits for is late.
const LATER: Duration = Duration::from_millis(200);
/// How late that is.
const LATE: Duration = Duration::from_secs(1);

/// Which deliveries wait for which. A lane is held from the delivery's arrival to its settlement.
///
/// A released delivery keeps its place: what comes after it in its lane is given back to the source too, behind it, so
/// that it takes no slot meanwhile, and enters only when it is its turn. So is what waits behind a long pause.
#[derive(Debug)]
pub(crate) struct Lanes {
    order: Order,
    returns: Returns,
    hasher: RandomState,
    lanes: HashMap<Lane, Line>,
    /// When so many lanes exist, those are looked for whose deliveries never came back.
    crowded: usize,
}

/// As many lanes as are not worth a look.
const FEW: usize = 4096;

/// Two keys that share a hash share a lane: they wait for each other, and nothing else changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lane(u64);

/// Who is in a lane, in its order: the one that holds it, those that wait, those that were given back.
#[derive(Debug)]
struct Line {
    held: Held,
    waiting: VecDeque<Slot>,
    away: VecDeque<Away>,
    /// When the last that is away comes back. Whatever comes out of turn is sent behind it, so that the next time all come in
    /// their order.
    latest: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Yes,
    No,
}

/// A delivery that was given back and has kept its place.
#[derive(Debug)]
pub(crate) struct Away {
    pub(crate) key: Key,
    pub(crate) epoch: u64,
    pub(crate) due: Instant,
}

impl Lanes {
    pub(crate) fn new(order: Order, returns: Returns) -> Self {
        Self { order, returns, hasher: RandomState::new(), lanes: HashMap::new(), crowded: FEW }
    }

    /// The lane of a delivery; `None` if it waits for nobody.
    pub(crate) fn of(&self, delivery: &Delivery) -> Option<Lane> {
        let origin = &delivery.message.origin;
        match (self.order, origin.position) {
            (Order::Unordered, _) => None,
            (Order::ByKey, _) => delivery.message.key.as_ref().map(|key| Lane(self.hasher.hash_one((&*origin.name, &key[..])))),
            (Order::ByPartition, Position::Offset { partition, .. }) => Some(Lane(self.hasher.hash_one((&*origin.name, partition)))),
            (Order::ByPartition, Position::Queue) => Some(Lane(self.hasher.hash_one(&*origin.name))),
        }
    }

    /// Enters a lane; whether it was free. If not, the slot waits its turn, or goes back behind what is away.
    /// The clock is read only where something is away.
    pub(crate) fn enter(&mut self, lane: Lane, slot: Slot, (key, epoch): (&Key, u64), now: impl FnOnce() -> Instant) -> Turn {
        let line = match self.lanes.entry(lane) {
            hashbrown::hash_map::Entry::Vacant(free) => {
                free.insert(Line { held: Held::Yes, waiting: VecDeque::new(), away: VecDeque::new(), latest: None });
                return Turn::Now;
            }
            hashbrown::hash_map::Entry::Occupied(taken) => taken.into_mut(),
        };
        if !line.away.is_empty() {
            let now = now();
            line.forget_what_is_gone(key, now, self.returns);
            if let Some(turn) = line.return_of(key, epoch, now) {
                return turn;
            }
        }
        match line.held {
            Held::Yes => {
                line.waiting.push_back(slot);
                Turn::Later
            }
            Held::No => {
                line.held = Held::Yes;
                Turn::Now
            }
        }
    }

    /// Leaves a lane; the slot whose turn it is now.
    pub(crate) fn leave(&mut self, lane: Lane) -> Option<Slot> {
        let line = self.lanes.get_mut(&lane)?;
        let next = line.waiting.pop_front();
        if next.is_none() {
            line.held = Held::No;
            if line.away.is_empty() {
                self.lanes.remove(&lane);
            }
        }
        next
    }

    /// Who waits in a lane.
    pub(crate) fn waiting(&self, lane: Lane) -> impl Iterator<Item = Slot> {
        self.lanes.get(&lane).into_iter().flat_map(|line| line.waiting.iter().copied())
    }

    /// All that waited is given back, and if it stands first in the list, so is the one that holds the lane. They keep their
    /// places.
    pub(crate) fn give_back(&mut self, lane: Lane, all: Vec<Away>) {
        let Some(line) = self.lanes.get_mut(&lane) else { return };
        line.waiting.clear();
        line.latest = all.iter().map(|it| it.due).max().max(line.latest);
        all.into_iter().rev().for_each(|it| line.away.push_front(it));
        if self.returns == Returns::Anywhere && self.lanes.len() >= self.crowded {
            self.forget_what_never_came(Instant::now());
        }
    }

    /// What is away and belongs to this epoch comes back to someone else.
    pub(crate) fn revoke(&mut self, epoch: u64) {
        self.lanes.retain(|_, line| {
            line.away.retain(|it| it.epoch != epoch);
            line.held == Held::Yes || !line.away.is_empty()
        });
    }

    /// Takes a slot that waits out of its lane; whether it waited there.
    pub(crate) fn withdraw(&mut self, lane: Lane, slot: Slot) -> Waited {
        let Some(line) = self.lanes.get_mut(&lane) else { return Waited::No };
        let Some(place) = line.waiting.iter().position(|it| *it == slot) else { return Waited::No };
        line.waiting.remove(place);
        Waited::Yes
    }

    fn forget_what_never_came(&mut self, now: Instant) {
        self.lanes.retain(|_, line| line.held == Held::Yes || line.latest.is_some_and(|latest| now <= latest + PATIENCE));
        self.crowded = (self.lanes.len() * 2).max(FEW);
    }
}

impl Line {
    /// One comes while others are away; nothing if it is its turn.
    fn return_of(&mut self, key: &Key, epoch: u64, now: Instant) -> Option<Turn> {
        let first = self.away.front()?;
        if first.key == *key {
            self.away.pop_front();
            return None;
        }
        let soon = now + if now > first.due + LATE { LATER } else { SOON };
        let due = self.latest.map_or(soon, |latest| latest.max(soon));
        self.latest = Some(due);
        match self.away.iter_mut().find(|it| it.key == *key) {
            Some(place) => place.due = due,
            None => self.away.push_back(Away { key: key.clone(), epoch, due }),
        }
        Some(Turn::Behind(due - now))
    }

    /// Waits no longer for what will not come: it went elsewhere, or what comes now would have come after it.
    fn forget_what_is_gone(&mut self, comes: &Key, now: Instant, returns: Returns) {
        while let Some(first) = self.away.front().filter(|first| now > first.due + PATIENCE && first.key != *comes) {
            let comes_after = self.away.iter().find(|it| it.key == *comes).is_none_or(|it| it.due >= first.due);
            if returns == Returns::Here && !comes_after {
                return;
            }
            self.away.pop_front();
        }
    }
}

/// Whose turn it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The lane was free.
    Now,
    /// Another delivery is in it.
    Later,
    /// An earlier delivery is away: this one has its place behind it, and is given back for so long.
    Behind(Duration),
}

/// Whether a slot waited in a lane.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// It did, and does not any more.
    Yes,
    /// It holds the lane, or never entered it.
    No,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::MessageId;
    use crate::message::Message;
    use crate::slots::Slots;
    use crate::source::Receipt;

    const DELAY: Duration = Duration::from_secs(1);

    fn key(id: &str) -> Key {
        Key::new(&MessageId::new(id).expect("an id"))
    }

    fn lane(lanes: &Lanes) -> Lane {
        let receipt = Receipt { epoch: 1, partition: 0, position: 0 };
        lanes.of(&Delivery { message: Message::new("x").with_key("k"), receipt, failures: 0 }).expect("it has a key")
    }

    fn away(ids: &[&str], due: Instant) -> Vec<Away> {
        ids.iter().map(|id| Away { key: key(id), epoch: 1, due }).collect()
    }

    /// A lane whose first delivery was given back with the one that waited behind it.
    fn with_two_away(returns: Returns, slot: Slot, now: Instant) -> (Lanes, Lane) {
        let mut lanes = Lanes::new(Order::ByKey, returns);
        let lane = lane(&lanes);
        assert_eq!(lanes.enter(lane, slot, (&key("first"), 1), || now), Turn::Now);
        assert_eq!(lanes.enter(lane, slot, (&key("second"), 1), || now), Turn::Later);
        lanes.give_back(lane, away(&["first", "second"], now + DELAY));
        assert_eq!(lanes.leave(lane), None);
        (lanes, lane)
    }

    #[test]
    fn what_is_away_keeps_its_place() {
        let (slot, now) = (Slots::new(1).insert(()), Instant::now());
        let (mut lanes, lane) = with_two_away(Returns::Here, slot, now);
        for id in ["third", "second", "third"] {
            assert_eq!(lanes.enter(lane, slot, (&key(id), 1), || now), Turn::Behind(DELAY), "{id}");
        }
        let late = now + DELAY + PATIENCE;
        assert_eq!(lanes.enter(lane, slot, (&key("third"), 1), || late), Turn::Behind(LATER));
        assert_eq!(lanes.enter(lane, slot, (&key("first"), 1), || late), Turn::Now);
        assert_eq!(lanes.enter(lane, slot, (&key("third"), 1), || late), Turn::Behind(LATER));
        assert_eq!(lanes.enter(lane, slot, (&key("second"), 1), || late), Turn::Later);
        assert_eq!(lanes.enter(lane, slot, (&key("third"), 1), || late), Turn::Later);
        assert_eq!([lanes.leave(lane), lanes.leave(lane), lanes.leave(lane)], [Some(slot), Some(slot), None]);
        assert!(lanes.lanes.is_empty());
    }

    #[test]
    fn what_came_out_of_turn_comes_behind_the_last() {
        let (slot, now) = (Slots::new(1).insert(()), Instant::now());
        let (mut lanes, lane) = with_two_away(Returns::Here, slot, now);
        let due = now + DELAY;
        assert_eq!(lanes.enter(lane, slot, (&key("fourth"), 1), || due), Turn::Behind(SOON));
        assert_eq!(lanes.enter(lane, slot, (&key("third"), 1), || due), Turn::Behind(SOON), "not before the fourth");
        assert_eq!(lanes.enter(lane, slot, (&key("second"), 1), || due - SOON), Turn::Behind(SOON * 2));
    }

    #[test]
    fn what_went_elsewhere_is_not_waited_for_without_end() {
        let (slot, now) = (Slots::new(1).insert(()), Instant::now());
        let (mut lanes, lane) = with_two_away(Returns::Anywhere, slot, now);
        assert_eq!(lanes.enter(lane, slot, (&key("second"), 1), || now + DELAY + PATIENCE), Turn::Behind(LATER));
        assert_eq!(lanes.enter(lane, slot, (&key("second"), 1), || now + DELAY + PATIENCE * 2), Turn::Now);
        let (mut lanes, _) = with_two_away(Returns::Anywhere, slot, now);
        lanes.forget_what_never_came(now + DELAY + PATIENCE);
        assert_eq!(lanes.lanes.len(), 1);
        lanes.forget_what_never_came(now + DELAY + PATIENCE * 2);
        assert_eq!(lanes.lanes.len(), 0);
    }

    #[test]
    fn what_comes_back_here_is_waited_for_until_what_follows_it_comes() {
        let (slot, now) = (Slots::new(1).insert(()), Instant::now());
        let (mut lanes, lane) = with_two_away(Returns::Here, slot, now);
        // The first comes back and is given back once more, for longer; the second is due before it and comes first.
        assert_eq!(lanes.enter(lane, slot, (&key("first"), 1), || now), Turn::Now);
        lanes.give_back(lane, away(&["first"], now + DELAY * 2));
        assert_eq!(lanes.leave(lane), None);
        let late = now + DELAY * 2 + PATIENCE * 2;
        assert_eq!(lanes.enter(lane, slot, (&key("second"), 1), || late), Turn::Behind(LATER));
        // It was sent behind the first now. If it comes again, the first is gone.
        assert_eq!(lanes.enter(lane, slot, (&key("second"), 1), || late + LATER), Turn::Now);
    }

    #[test]
    fn what_is_revoked_is_not_waited_for() {
        let (slot, now) = (Slots::new(1).insert(()), Instant::now());
        let (mut lanes, lane) = with_two_away(Returns::Here, slot, now);
        lanes.revoke(2);
        assert_eq!(lanes.enter(lane, slot, (&key("third"), 2), || now), Turn::Behind(DELAY));
        lanes.revoke(1);
        assert_eq!(lanes.enter(lane, slot, (&key("third"), 2), || now), Turn::Now);
    }
}
