//! Which delivery tags of a channel may be acknowledged, and with which frames.

use std::collections::VecDeque;

/// The unacknowledged deliveries of one channel, each with a context of type `T` until it is
/// settled.
///
/// A `basic.ack` with `multiple` covers every tag up to its own. The ledger returns such a tag only
/// for a prefix in which every tag is settled, and never one that was acknowledged before: the
/// broker closes the channel for an unknown delivery tag (406).
///
/// Acknowledged tags are removed at once, so the prefetch limits the number of entries.
#[derive(Debug)]
pub(crate) struct AckLedger<T> {
    /// Unacknowledged deliveries, in the order of their tags.
    tags: VecDeque<(u64, TagState<T>)>,
    /// How many of `tags` are settled.
    settled: usize,
}

#[derive(Debug)]
enum TagState<T> {
    Unsettled(T),
    Settled,
}

impl<T> AckLedger<T> {
    /// The ledger of a new channel.
    pub(crate) fn new() -> Self {
        Self {
            tags: VecDeque::new(),
            settled: 0,
        }
    }

    /// Adds a delivery. The tags of a channel increase; a tag not above the last one is ignored.
    pub(crate) fn delivered(&mut self, tag: u64, context: T) {
        if self.tags.back().is_none_or(|(last, _)| *last < tag) {
            self.tags.push_back((tag, TagState::Unsettled(context)));
        }
    }

    /// The context of an unsettled delivery; `None` for any other tag.
    pub(crate) fn context(&self, tag: u64) -> Option<&T> {
        match &self.tags[self.index(tag)?] {
            (_, TagState::Unsettled(context)) => Some(context),
            (_, TagState::Settled) => None,
        }
    }

    /// Marks a delivery as settled and returns its context; `None` for a tag that is not
    /// unsettled.
    pub(crate) fn settle(&mut self, tag: u64) -> Option<T> {
        let index = self.index(tag)?;
        match std::mem::replace(&mut self.tags[index].1, TagState::Settled) {
            TagState::Unsettled(context) => {
                self.settled += 1;
                Some(context)
            }
            TagState::Settled => None,
        }
    }

    /// Removes a delivery that is to be rejected and returns its context; `None` for a tag that is
    /// not unsettled. The caller must send `basic.reject` before the next `basic.ack`, which may cover
    /// the tag.
    pub(crate) fn reject(&mut self, tag: u64) -> Option<T> {
        self.context(tag)?;
        let index = self.index(tag)?;
        match self.tags.remove(index)? {
            (_, TagState::Unsettled(context)) => Some(context),
            (_, TagState::Settled) => None,
        }
    }

    /// The context of the delivery that has been unsettled for longest.
    pub(crate) fn oldest_unsettled(&self) -> Option<&T> {
        self.tags.iter().find_map(|(_, tag)| {
            if let TagState::Unsettled(context) = tag {
                Some(context)
            } else {
                None
            }
        })
    }

    /// Removes the settled prefix and returns its last tag, to be acknowledged with `multiple`;
    /// `None` if there is no such prefix.
    pub(crate) fn take_prefix(&mut self) -> Option<u64> {
        let mut last = None;
        while let Some((tag, TagState::Settled)) = self.tags.front() {
            last = Some(*tag);
            self.tags.pop_front();
            self.settled -= 1;
        }
        last
    }

    /// Removes all settled tags and returns them in order, to be acknowledged one by one. To be called
    /// after [`take_prefix`](Self::take_prefix).
    pub(crate) fn take_singles(&mut self) -> Vec<u64> {
        let mut singles = Vec::with_capacity(self.settled);
        if self.settled > 0 {
            self.tags.retain(|(tag, state)| {
                let is_unsettled = matches!(state, TagState::Unsettled(_));
                if !is_unsettled {
                    singles.push(*tag);
                }
                is_unsettled
            });
        }
        self.settled = 0;
        singles
    }

    /// How many deliveries are settled and not acknowledged yet.
    pub(crate) fn settled(&self) -> usize {
        self.settled
    }

    /// How many deliveries are unacknowledged, settled or not.
    pub(crate) fn unacked(&self) -> usize {
        self.tags.len()
    }

    fn index(&self, tag: u64) -> Option<usize> {
        self.tags.binary_search_by_key(&tag, |(tag, _)| *tag).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ledger with the unsettled deliveries 1 to `count`; the context of each is its tag.
    fn delivered(count: u64) -> AckLedger<u64> {
        let mut acks = AckLedger::new();
        (1..=count).for_each(|tag| acks.delivered(tag, tag));
        acks
    }

    #[test]
    fn only_the_contiguous_prefix_is_acknowledged_together() {
        let mut acks = delivered(4);
        for tag in [2, 3] {
            assert_eq!(acks.settle(tag), Some(tag));
        }
        assert_eq!(acks.take_prefix(), None);
        assert_eq!(acks.settle(1), Some(1));
        assert_eq!(acks.take_prefix(), Some(3));
        assert_eq!(acks.take_prefix(), None);
        assert_eq!(acks.settle(4), Some(4));
        assert_eq!(acks.take_prefix(), Some(4));
    }

    #[test]
    fn a_prefix_never_ends_with_a_tag_that_was_acknowledged_singly() {
        let mut acks = delivered(4);
        acks.settle(3);
        assert_eq!(acks.take_singles(), [3]);
        acks.settle(2);
        acks.settle(1);
        assert_eq!(acks.take_prefix(), Some(2));
        assert_eq!(acks.settled(), 0);
        acks.settle(4);
        assert_eq!(acks.take_prefix(), Some(4));
    }

    #[test]
    fn a_rejected_tag_is_never_acknowledged_and_the_oldest_is_the_first_unsettled_one() {
        let mut acks = delivered(4);
        assert_eq!(
            (acks.reject(2), acks.reject(2), acks.settle(2)),
            (Some(2), None, None)
        );
        assert_eq!((acks.oldest_unsettled(), acks.unacked()), (Some(&1), 3));
        acks.settle(1);
        acks.settle(3);
        assert_eq!(
            (acks.take_prefix(), acks.oldest_unsettled(), acks.unacked()),
            (Some(3), Some(&4), 1)
        );
        assert_eq!(acks.reject(4), Some(4));
        assert_eq!((acks.take_prefix(), acks.unacked()), (None, 0));
    }

    #[test]
    fn a_tag_is_settled_once_and_only_if_it_was_delivered() {
        let mut acks = delivered(2);
        assert_eq!(acks.settle(0), None);
        assert_eq!(acks.settle(3), None);
        assert_eq!(acks.settle(1), Some(1));
        assert_eq!(acks.settle(1), None);
        assert_eq!(acks.context(1), None);
        assert_eq!(acks.context(2), Some(&2));
        acks.take_prefix();
        assert_eq!(acks.settle(1), None);
    }

    #[test]
    fn acknowledged_tags_behind_an_unsettled_one_use_no_memory() {
        let mut acks = delivered(1);
        for tag in 2..=100_001 {
            acks.delivered(tag, tag);
            acks.settle(tag);
            if tag % 64 == 0 {
                acks.take_singles();
            }
            assert!(
                acks.tags.len() <= 65,
                "{} entries at {tag}",
                acks.tags.len()
            );
        }
        assert!(
            acks.tags.capacity() <= 256,
            "room for {}",
            acks.tags.capacity()
        );
        acks.take_singles();
        assert_eq!((acks.unacked(), acks.oldest_unsettled()), (1, Some(&1)));
    }
}
