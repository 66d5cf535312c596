//! Released deliveries that wait in memory, and the one of them that moves to a delay queue
//! meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate_core::source::Delivery;
use tokio::time::Instant;

use crate::copy::Withdrawal;

/// How long a copy of what waits here may take to be confirmed, if it is not due later. Then it is
/// handed over from here, as if there were no copy: a broker that is short of memory confirms none,
/// and tries again are not to wait for that.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(2);
/// How long nothing moves after that.
const REST: Duration = Duration::from_secs(30);
/// What is due sooner than this stays: it is out of the way before a copy would stand.
const WORTH_IT: Duration = Duration::from_millis(20);

/// What one channel holds back.
#[derive(Default)]
pub(crate) struct Held {
    /// By time and tag.
    waiting: BTreeMap<(Instant, u64), Delivery>,
    moving: Option<Moving>,
    /// The tag of which no copy can be made that has all of it.
    stays: Option<u64>,
    no_move_before: Option<Instant>,
}

/// A copy is under way, and what it was made of still waits here.
struct Moving {
    until: Instant,
    tag: u64,
    copy: Withdrawal,
}

impl Held {
    /// Holds a delivery back until then.
    pub(crate) fn insert(&mut self, due: Instant, delivery: Delivery) {
        self.waiting
            .insert((due, delivery.receipt.position), delivery);
    }

    /// Takes what is due.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<Delivery> {
        let mut due = Vec::new();
        while let Some(entry) = self
            .waiting
            .first_entry()
            .filter(|entry| entry.key().0 <= now)
        {
            let ((_, tag), delivery) = entry.remove_entry();
            if self.moves(tag) {
                self.withdraw();
                self.no_move_before = Some(now + REST);
            }
            due.push(delivery);
        }
        due
    }

    /// The delivery with this tag and when it is due, if it waits here and may move to a delay
    /// queue now.
    pub(crate) fn movable(&self, tag: u64, now: Instant) -> Option<(Instant, &Delivery)> {
        if self.moving.is_some()
            || self.stays == Some(tag)
            || self.no_move_before.is_some_and(|at| now < at)
        {
            return None;
        }
        let ((due, _), delivery) = self
            .waiting
            .iter()
            .find(|((due, waits), _)| *waits == tag && *due >= now + WORTH_IT)?;
        Some((*due, delivery))
    }

    /// A copy of a movable delivery is to be published: by what it gets this, the copy can be taken
    /// back. Until it is confirmed the delivery stays here.
    pub(crate) fn begin_to_move(&mut self, tag: u64, due: Instant, now: Instant) -> Withdrawal {
        let copy = Withdrawal::default();
        let until = due.max(now + CONFIRMED_WITHIN);
        if let Some(delivery) = self.waiting.remove(&(due, tag)) {
            self.waiting.insert((until, tag), delivery);
            self.moving = Some(Moving {
                until,
                tag,
                copy: copy.clone(),
            });
        }
        copy
    }

    /// No copy can be made of the delivery with this tag.
    pub(crate) fn stays(&mut self, tag: u64) {
        self.stays = Some(tag);
    }

    /// The copy of this tag stands in its queue, if it is one that moves: then nothing of it is
    /// left here.
    pub(crate) fn moved(&mut self, tag: u64) -> bool {
        let moved = self.moving.take_if(|moving| moving.tag == tag);
        moved.is_some_and(|moving| self.waiting.remove(&(moving.until, tag)).is_some())
    }

    /// Takes the copy that is under way back, if it is not published yet.
    pub(crate) fn withdraw(&mut self) {
        if let Some(moving) = self.moving.take() {
            moving.copy.withdraw();
        }
    }

    /// Takes all but what moves, with the time of each, and says whether something does: that is
    /// left to its copy for good.
    pub(crate) fn take_all(&mut self) -> (BTreeMap<(Instant, u64), Delivery>, bool) {
        let mut all = std::mem::take(&mut self.waiting);
        let moves = self
            .moving
            .take()
            .is_some_and(|moving| all.remove(&(moving.until, moving.tag)).is_some());
        (all, moves)
    }

    /// When the next one is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((due, _), _)| *due)
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn moves(&self, tag: u64) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.tag == tag)
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::message::Message;
    use oncegate_core::source::Receipt;

    use super::*;

    const DELAY: Duration = Duration::from_millis(600);

    fn delivery(tag: u64) -> Delivery {
        Delivery {
            message: Message::new("a"),
            receipt: Receipt {
                epoch: 1,
                partition: 0,
                position: tag,
            },
            failures: 1,
        }
    }

    /// With tags 1 and 2, both due after [`DELAY`], and 1 on its way to a delay queue.
    fn moving(now: Instant) -> (Held, Withdrawal) {
        let mut held = Held::default();
        (1..=2).for_each(|tag| held.insert(now + DELAY, delivery(tag)));
        let (due, found) = held.movable(1, now).expect("it waits");
        assert_eq!((due, found.receipt.position), (now + DELAY, 1));
        let copy = held.begin_to_move(1, due, now);
        (held, copy)
    }

    fn tags(deliveries: Vec<Delivery>) -> Vec<u64> {
        deliveries
            .iter()
            .map(|delivery| delivery.receipt.position)
            .collect()
    }

    #[test]
    fn what_moved_is_not_handed_over_and_what_did_not_is() {
        let now = Instant::now();
        let (mut held, copy) = moving(now);
        assert!(!held.moved(2) && held.moved(1) && !held.moved(1));
        assert_eq!(
            (tags(held.take_due(now + REST)), copy.is_withdrawn()),
            (vec![2], false)
        );
    }

    #[test]
    fn a_copy_that_is_not_confirmed_in_time_is_withdrawn_and_nothing_moves_for_a_while() {
        let now = Instant::now();
        let (mut held, copy) = moving(now);
        assert_eq!(
            (tags(held.take_due(now + DELAY)), copy.is_withdrawn()),
            (vec![2], false)
        );
        let late = now + CONFIRMED_WITHIN;
        assert_eq!(
            (
                held.next_due(),
                tags(held.take_due(late)),
                copy.is_withdrawn()
            ),
            (Some(late), vec![1], true)
        );
        assert!(!held.moved(1), "its confirmation comes too late");
        held.insert(late + DELAY, delivery(1));
        assert!(held.movable(1, late).is_none());
        held.insert(late + REST + DELAY, delivery(3));
        assert!(held.movable(3, late + REST).is_some());
    }

    #[test]
    fn one_moves_at_a_time_and_neither_what_is_due_soon_nor_what_stays() {
        let now = Instant::now();
        let (mut held, _copy) = moving(now);
        assert!(held.movable(2, now).is_none(), "another one moves");
        held.moved(1);
        assert!(held.movable(2, now).is_some() && held.movable(1, now).is_none());
        assert!(
            held.movable(2, now + DELAY - WORTH_IT / 2).is_none(),
            "it is due soon"
        );
        held.stays(2);
        assert!(held.movable(2, now).is_none());
    }

    #[test]
    fn at_the_end_what_moves_is_left_to_its_copy() {
        let now = Instant::now();
        let (mut held, copy) = moving(now);
        let (all, moves) = held.take_all();
        assert_eq!(
            (all.keys().map(|(_, tag)| *tag).collect::<Vec<_>>(), moves),
            (vec![2], true)
        );
        held.withdraw();
        assert!(held.is_empty() && !copy.is_withdrawn());
    }
}
