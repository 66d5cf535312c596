//! Released deliveries that wait in memory for their redelivery, and the move of one of them to a
//! delay queue.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate_core::source::Delivery;
use tokio::time::Instant;

use crate::message_copy::PublishCancellation;

/// How long the confirm of a moved copy may take, unless the delivery is due later. After that the
/// copy is cancelled and the delivery is redelivered from memory: a broker under a memory alarm
/// confirms nothing, and a retry must not wait for that.
const MOVE_CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);
/// How long no other delivery moves after a cancelled move.
const MOVE_PAUSE: Duration = Duration::from_secs(30);
/// A delivery that is due sooner does not move: its redelivery comes before the confirm would.
const MIN_REMAINING_DELAY: Duration = Duration::from_millis(20);

/// The delayed deliveries of one channel.
#[derive(Default)]
pub(crate) struct DelayBuffer {
    /// By the time when they are due, and the delivery tag.
    deliveries: BTreeMap<(Instant, u64), Delivery>,
    moving: Option<PendingMove>,
    /// The last tag whose message cannot be copied without losing something.
    unmovable: Option<u64>,
    no_move_before: Option<Instant>,
}

/// A move to a delay queue whose copy is not confirmed; the delivery stays in the buffer until
/// then.
struct PendingMove {
    until: Instant,
    tag: u64,
    cancellation: PublishCancellation,
}

impl DelayBuffer {
    /// Delays a delivery until this time.
    pub(crate) fn insert(&mut self, due: Instant, delivery: Delivery) {
        self.deliveries
            .insert((due, delivery.receipt.position), delivery);
    }

    /// Removes the deliveries that are due. If one of them is being moved, cancels its copy.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<Delivery> {
        let mut due = Vec::new();
        while let Some(entry) = self
            .deliveries
            .first_entry()
            .filter(|entry| entry.key().0 <= now)
        {
            let ((_, tag), delivery) = entry.remove_entry();
            if self.is_moving(tag) {
                self.cancel_move();
                self.no_move_before = Some(now + MOVE_PAUSE);
            }
            due.push(delivery);
        }
        due
    }

    /// The delivery with this tag and the time when it is due, if it may move to a delay queue now.
    pub(crate) fn movable(&self, tag: u64, now: Instant) -> Option<(Instant, &Delivery)> {
        if self.moving.is_some()
            || self.unmovable == Some(tag)
            || self.no_move_before.is_some_and(|at| now < at)
        {
            return None;
        }
        let ((due, _), delivery) = self
            .deliveries
            .iter()
            .find(|((due, delayed), _)| *delayed == tag && *due >= now + MIN_REMAINING_DELAY)?;
        Some((*due, delivery))
    }

    /// Starts the move of a movable delivery, and returns the cancellation for its copy. The
    /// delivery stays in the buffer until the copy is confirmed.
    pub(crate) fn start_move(
        &mut self,
        tag: u64,
        due: Instant,
        now: Instant,
    ) -> PublishCancellation {
        let cancellation = PublishCancellation::default();
        let until = due.max(now + MOVE_CONFIRM_TIMEOUT);
        if let Some(delivery) = self.deliveries.remove(&(due, tag)) {
            self.deliveries.insert((until, tag), delivery);
            self.moving = Some(PendingMove {
                until,
                tag,
                cancellation: cancellation.clone(),
            });
        }
        cancellation
    }

    /// The message with this tag cannot be copied without losing something.
    pub(crate) fn mark_unmovable(&mut self, tag: u64) {
        self.unmovable = Some(tag);
    }

    /// Removes the delivery with this tag if it is the one that moves, because its copy is
    /// confirmed. `false` if it is not.
    pub(crate) fn finish_move(&mut self, tag: u64) -> bool {
        let moved = self.moving.take_if(|moving| moving.tag == tag);
        moved.is_some_and(|moving| self.deliveries.remove(&(moving.until, tag)).is_some())
    }

    /// Cancels the move: a copy that is not published yet will not be.
    pub(crate) fn cancel_move(&mut self) {
        if let Some(moving) = self.moving.take() {
            moving.cancellation.cancel();
        }
    }

    /// Removes all deliveries, with the times when they are due, and whether another one was being
    /// moved. The copy of that one replaces it.
    pub(crate) fn take_all(&mut self) -> (BTreeMap<(Instant, u64), Delivery>, bool) {
        let mut all = std::mem::take(&mut self.deliveries);
        let moves = self
            .moving
            .take()
            .is_some_and(|moving| all.remove(&(moving.until, moving.tag)).is_some());
        (all, moves)
    }

    /// When the next delivery is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.deliveries.first_key_value().map(|((due, _), _)| *due)
    }

    pub(crate) fn len(&self) -> usize {
        self.deliveries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.deliveries.is_empty()
    }

    fn is_moving(&self, tag: u64) -> bool {
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

    /// A buffer with tags 1 and 2, both due after [`DELAY`], and a move of tag 1.
    fn moving(now: Instant) -> (DelayBuffer, PublishCancellation) {
        let mut buffer = DelayBuffer::default();
        (1..=2).for_each(|tag| buffer.insert(now + DELAY, delivery(tag)));
        let (due, found) = buffer.movable(1, now).expect("it is delayed");
        assert_eq!((due, found.receipt.position), (now + DELAY, 1));
        let cancellation = buffer.start_move(1, due, now);
        (buffer, cancellation)
    }

    fn tags(deliveries: Vec<Delivery>) -> Vec<u64> {
        deliveries
            .iter()
            .map(|delivery| delivery.receipt.position)
            .collect()
    }

    #[test]
    fn a_moved_delivery_is_not_redelivered_and_others_are() {
        let now = Instant::now();
        let (mut buffer, cancellation) = moving(now);
        assert!(!buffer.finish_move(2) && buffer.finish_move(1) && !buffer.finish_move(1));
        assert_eq!(
            (
                tags(buffer.take_due(now + MOVE_PAUSE)),
                cancellation.is_cancelled()
            ),
            (vec![2], false)
        );
    }

    #[test]
    fn a_copy_that_is_not_confirmed_in_time_is_cancelled_and_moves_pause() {
        let now = Instant::now();
        let (mut buffer, cancellation) = moving(now);
        assert_eq!(
            (
                tags(buffer.take_due(now + DELAY)),
                cancellation.is_cancelled()
            ),
            (vec![2], false)
        );
        let late = now + MOVE_CONFIRM_TIMEOUT;
        assert_eq!(
            (
                buffer.next_due(),
                tags(buffer.take_due(late)),
                cancellation.is_cancelled()
            ),
            (Some(late), vec![1], true)
        );
        assert!(!buffer.finish_move(1), "its confirm comes too late");
        buffer.insert(late + DELAY, delivery(1));
        assert!(buffer.movable(1, late).is_none());
        buffer.insert(late + MOVE_PAUSE + DELAY, delivery(3));
        assert!(buffer.movable(3, late + MOVE_PAUSE).is_some());
    }

    #[test]
    fn one_delivery_moves_at_a_time_and_none_that_is_due_soon_or_unmovable() {
        let now = Instant::now();
        let (mut buffer, _cancellation) = moving(now);
        assert!(buffer.movable(2, now).is_none(), "another move is pending");
        buffer.finish_move(1);
        assert!(buffer.movable(2, now).is_some() && buffer.movable(1, now).is_none());
        assert!(
            buffer
                .movable(2, now + DELAY - MIN_REMAINING_DELAY / 2)
                .is_none(),
            "it is due soon"
        );
        buffer.mark_unmovable(2);
        assert!(buffer.movable(2, now).is_none());
    }

    #[test]
    fn take_all_leaves_a_moving_delivery_to_its_copy() {
        let now = Instant::now();
        let (mut buffer, cancellation) = moving(now);
        let (all, moves) = buffer.take_all();
        assert_eq!(
            (all.keys().map(|(_, tag)| *tag).collect::<Vec<_>>(), moves),
            (vec![2], true)
        );
        buffer.cancel_move();
        assert!(buffer.is_empty() && !cancellation.is_cancelled());
    }
}
