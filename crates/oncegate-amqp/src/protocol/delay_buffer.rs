//! Released deliveries that wait in memory for their redelivery. One of them at a time may move to a
//! delay queue: a copy is published there, and its confirm removes the delivery from memory.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate_core::source::Delivery;
use tokio::time::Instant;

use crate::protocol::message_copy::PublishCancellation;

/// How long the confirm of the copy may take, unless the delivery is due later. Then the copy is
/// cancelled and the delivery is redelivered from memory: a broker with a memory alarm confirms
/// nothing, and a retry must not wait for the end of the alarm.
const MOVE_CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause after a cancelled move before another delivery moves.
const MOVE_PAUSE: Duration = Duration::from_secs(30);
/// A delivery that is due sooner does not move: it would be due before the confirm arrives.
const MIN_REMAINING_DELAY: Duration = Duration::from_millis(20);

/// The delayed deliveries of one channel.
#[derive(Default)]
pub(crate) struct DelayBuffer {
    /// The deliveries, by the time when they are due and their delivery tag.
    deliveries: BTreeMap<(Instant, u64), Delivery>,
    pending_move: Option<PendingMove>,
    /// The last tag whose message cannot be copied without loss.
    unmovable: Option<u64>,
    /// The end of [`MOVE_PAUSE`].
    move_pause_end: Option<Instant>,
}

/// A move to a delay queue whose copy is not confirmed yet.
struct PendingMove {
    /// When the delivery is due in the buffer, and its copy is cancelled.
    due: Instant,
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
                self.move_pause_end = Some(now + MOVE_PAUSE);
            }
            due.push(delivery);
        }
        due
    }

    /// The delivery with this tag and the time when it is due; `None` if it is not delayed, or may not
    /// move to a delay queue now.
    pub(crate) fn movable(&self, tag: u64, now: Instant) -> Option<(Instant, &Delivery)> {
        if self.pending_move.is_some()
            || self.unmovable == Some(tag)
            || self.move_pause_end.is_some_and(|end| now < end)
        {
            return None;
        }
        let ((due, _), delivery) = self
            .deliveries
            .iter()
            .find(|((due, delayed), _)| *delayed == tag && *due >= now + MIN_REMAINING_DELAY)?;
        Some((*due, delivery))
    }

    /// Starts the move of a movable delivery, and returns the cancellation for its copy. The delivery
    /// stays in the buffer until the copy is confirmed, and is due after [`MOVE_CONFIRM_TIMEOUT`] at
    /// the earliest.
    pub(crate) fn start_move(
        &mut self,
        tag: u64,
        due: Instant,
        now: Instant,
    ) -> PublishCancellation {
        let cancellation = PublishCancellation::default();
        let extended_due = due.max(now + MOVE_CONFIRM_TIMEOUT);
        if let Some(delivery) = self.deliveries.remove(&(due, tag)) {
            self.deliveries.insert((extended_due, tag), delivery);
            self.pending_move = Some(PendingMove {
                due: extended_due,
                tag,
                cancellation: cancellation.clone(),
            });
        }
        cancellation
    }

    /// Records that the message with this tag cannot be copied without loss.
    pub(crate) fn mark_unmovable(&mut self, tag: u64) {
        self.unmovable = Some(tag);
    }

    /// Removes the delivery with this tag because its copy is confirmed; `false` if no move of it is
    /// pending.
    pub(crate) fn finish_move(&mut self, tag: u64) -> bool {
        let moved = self.pending_move.take_if(|pending| pending.tag == tag);
        moved.is_some_and(|pending| self.deliveries.remove(&(pending.due, tag)).is_some())
    }

    /// Cancels a pending move: a copy that is not published yet will not be published.
    pub(crate) fn cancel_move(&mut self) {
        if let Some(pending) = self.pending_move.take() {
            pending.cancellation.cancel();
        }
    }

    /// Removes all deliveries. Returns those without a pending move, with the times when they are due,
    /// and whether there was another one with a pending move, which its copy replaces.
    pub(crate) fn take_all(&mut self) -> (BTreeMap<(Instant, u64), Delivery>, bool) {
        let mut deliveries = std::mem::take(&mut self.deliveries);
        let has_pending_move = self
            .pending_move
            .take()
            .is_some_and(|pending| deliveries.remove(&(pending.due, pending.tag)).is_some());
        (deliveries, has_pending_move)
    }

    /// When the next delivery is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.deliveries.first_key_value().map(|((due, _), _)| *due)
    }

    pub(crate) fn len(&self) -> usize {
        self.deliveries.len()
    }

    fn is_moving(&self, tag: u64) -> bool {
        self.pending_move
            .as_ref()
            .is_some_and(|pending| pending.tag == tag)
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
        let (due, found) = buffer
            .movable(1, now)
            .expect("a delayed delivery is movable");
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
    fn a_moved_delivery_is_not_redelivered_from_memory() {
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
        assert!(
            !buffer.finish_move(1),
            "a confirm after the cancellation has no effect"
        );
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
            "a delivery that is due soon does not move"
        );
        buffer.mark_unmovable(2);
        assert!(buffer.movable(2, now).is_none());
    }

    #[test]
    fn take_all_does_not_return_a_delivery_whose_move_is_pending() {
        let now = Instant::now();
        let (mut buffer, cancellation) = moving(now);
        let (all, has_pending_move) = buffer.take_all();
        assert_eq!(
            (
                all.keys().map(|(_, tag)| *tag).collect::<Vec<_>>(),
                has_pending_move
            ),
            (vec![2], true)
        );
        buffer.cancel_move();
        assert!(buffer.len() == 0 && !cancellation.is_cancelled());
    }
}
