//! Which delivery tags of one channel may be acknowledged, and how.

use std::collections::VecDeque;

/// The deliveries of one channel, and what each still carries.
///
/// An acknowledgement with `multiple` covers every tag up to its own, so it is only ever yielded for a prefix in which
/// every tag is settled, and its own tag is one that was not acknowledged before: the broker refuses a tag that it
/// does not know, and closes the channel.
#[derive(Debug)]
pub(crate) struct Acks<T> {
    /// The tag of the first entry.
    first: u64,
    tags: VecDeque<Tag<T>>,
    settled: usize,
    /// How many are not acknowledged.
    unacked: usize,
    /// How many were acknowledged one by one while the first entry has been the first.
    alone: usize,
}

#[derive(Debug)]
enum Tag<T> {
    Open(T),
    Settled,
    Acknowledged,
}

impl<T> Acks<T> {
    /// Of a new channel: its tags begin with 1.
    pub(crate) fn new() -> Self {
        Self { first: 1, tags: VecDeque::new(), settled: 0, unacked: 0, alone: 0 }
    }

    /// Takes a delivery in. The broker counts its tags up by one; a tag that it left out is none of ours.
    pub(crate) fn delivered(&mut self, tag: u64, carried: T) {
        let next = self.first + self.tags.len() as u64;
        for _ in next..tag {
            self.tags.push_back(Tag::Acknowledged);
        }
        if tag >= next {
            self.tags.push_back(Tag::Open(carried));
            self.unacked += 1;
        }
    }

    /// What an unsettled delivery carries; `None` for a tag that is not open.
    pub(crate) fn carried(&self, tag: u64) -> Option<&T> {
        match self.tags.get(self.index(tag)?)? {
            Tag::Open(carried) => Some(carried),
            Tag::Settled | Tag::Acknowledged => None,
        }
    }

    /// Marks a delivery as done with, and gives back what it carried; `None` for a tag that is not open.
    pub(crate) fn settle(&mut self, tag: u64) -> Option<T> {
        let index = self.index(tag)?;
        let entry = self.tags.get_mut(index)?;
        if !matches!(entry, Tag::Open(_)) {
            return None;
        }
        let Tag::Open(carried) = std::mem::replace(entry, Tag::Settled) else { return None };
        self.settled += 1;
        Some(carried)
    }

    /// Marks a delivery as rejected, and gives back what it carried; `None` for a tag that is not open. The rejection has
    /// to leave before the next acknowledgement does: that may cover the tag.
    pub(crate) fn reject(&mut self, tag: u64) -> Option<T> {
        let index = self.index(tag)?;
        let entry = self.tags.get_mut(index)?;
        if !matches!(entry, Tag::Open(_)) {
            return None;
        }
        let Tag::Open(carried) = std::mem::replace(entry, Tag::Acknowledged) else { return None };
        self.unacked -= 1;
        Some(carried)
    }

    /// What the delivery carries that has stood open for longest.
    pub(crate) fn oldest(&self) -> Option<&T> {
        self.tags.iter().find_map(|tag| if let Tag::Open(carried) = tag { Some(carried) } else { None })
    }

    /// Takes the settled prefix: the tag to acknowledge with `multiple`.
    pub(crate) fn take_prefix(&mut self) -> Option<u64> {
        let mut last = None;
        while let Some(Tag::Settled | Tag::Acknowledged) = self.tags.front() {
            if let Some(Tag::Settled) = self.tags.pop_front() {
                last = Some(self.first);
                self.settled -= 1;
                self.unacked -= 1;
            }
            self.first += 1;
            self.alone = 0;
        }
        last
    }

    /// Takes all that is settled beyond the prefix: the tags to acknowledge one by one, in order.
    pub(crate) fn take_singles(&mut self) -> Vec<u64> {
        let mut singles = Vec::with_capacity(self.settled);
        for (tag, entry) in (self.first..).zip(&mut self.tags) {
            if singles.len() == self.settled {
                break;
            }
            if matches!(entry, Tag::Settled) {
                *entry = Tag::Acknowledged;
                singles.push(tag);
            }
        }
        self.settled = 0;
        self.unacked -= singles.len();
        self.alone += singles.len();
        singles
    }

    /// The open delivery that keeps those behind it from being acknowledged together, and how many of them were acknowledged one
    /// by one for its sake.
    pub(crate) fn obstacle(&self) -> Option<(u64, usize)> {
        matches!(self.tags.front(), Some(Tag::Open(_))).then_some((self.first, self.alone))
    }

    /// How many are settled and not acknowledged yet.
    pub(crate) fn settled(&self) -> usize {
        self.settled
    }

    /// How many are not acknowledged, settled or not.
    pub(crate) fn unacked(&self) -> usize {
        self.unacked
    }

    /// Whether all that was delivered is acknowledged.
    pub(crate) fn is_empty(&self) -> bool {
        self.unacked == 0
    }

    fn index(&self, tag: u64) -> Option<usize> {
        usize::try_from(tag.checked_sub(self.first)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn delivered(count: u64) -> Acks<u64> {
        let mut acks = Acks::new();
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
    fn a_prefix_never_ends_with_a_tag_that_was_acknowledged_alone() {
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
    fn the_obstacle_is_the_first_that_is_open_and_answers_for_those_behind_it_alone() {
        let mut acks = delivered(6);
        for tag in [2, 3, 5] {
            acks.settle(tag);
        }
        assert_eq!((acks.take_prefix(), acks.obstacle()), (None, Some((1, 0))));
        assert_eq!((acks.take_singles().len(), acks.obstacle()), (3, Some((1, 3))));
        acks.settle(1);
        assert_eq!(acks.obstacle(), None, "it is settled, and its acknowledgement is only not sent");
        assert_eq!((acks.take_prefix(), acks.obstacle()), (Some(1), Some((4, 0))));
        acks.settle(6);
        assert_eq!((acks.take_singles(), acks.obstacle()), (vec![6], Some((4, 1))));
    }

    #[test]
    fn a_rejected_tag_is_never_acknowledged_and_the_oldest_is_the_first_that_is_open() {
        let mut acks = delivered(4);
        assert_eq!((acks.reject(2), acks.reject(2), acks.settle(2)), (Some(2), None, None));
        assert_eq!((acks.oldest(), acks.unacked()), (Some(&1), 3));
        acks.settle(1);
        acks.settle(3);
        assert_eq!((acks.take_prefix(), acks.oldest(), acks.unacked()), (Some(3), Some(&4), 1));
        assert_eq!(acks.reject(4), Some(4));
        assert_eq!((acks.take_prefix(), acks.is_empty()), (None, true));
    }

    #[test]
    fn a_tag_is_settled_once_and_only_if_it_was_delivered() {
        let mut acks = delivered(2);
        assert_eq!(acks.settle(0), None);
        assert_eq!(acks.settle(3), None);
        assert_eq!(acks.settle(1), Some(1));
        assert_eq!(acks.settle(1), None);
        assert_eq!(acks.carried(1), None);
        assert_eq!(acks.carried(2), Some(&2));
        acks.take_prefix();
        assert_eq!(acks.settle(1), None);
    }

    /// The broker's side, as RabbitMQ does it: an unknown tag closes the channel.
    #[derive(Default)]
    struct Broker(BTreeSet<u64>);

    impl Broker {
        fn acknowledge(&mut self, tag: u64, multiple: bool, settled: &BTreeSet<u64>) {
            assert!(self.0.contains(&tag), "406: unknown delivery tag {tag}");
            let covered: Vec<u64> = if multiple { self.0.range(..=tag).copied().collect() } else { vec![tag] };
            for tag in covered {
                assert!(settled.contains(&tag), "{tag} was acknowledged and not settled: a lost message");
                self.0.remove(&tag);
            }
        }
    }

    #[test]
    fn whatever_the_order_no_tag_is_lost_refused_or_forgotten() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut acks, mut broker, mut settled) = (Acks::new(), Broker::default(), BTreeSet::new());
            let (mut open, mut next) = (Vec::new(), 1);
            for _ in 0..400 {
                assert_eq!(acks.unacked(), broker.0.len());
                match random.u8(..11) {
                    10 if !open.is_empty() => {
                        let tag = open.swap_remove(random.usize(..open.len()));
                        assert_eq!(acks.reject(tag), Some(()));
                        assert!(broker.0.remove(&tag), "406: unknown delivery tag {tag}");
                    }
                    0..4 => {
                        acks.delivered(next, ());
                        broker.0.insert(next);
                        open.push(next);
                        next += 1;
                    }
                    4..8 if !open.is_empty() => {
                        let tag = open.swap_remove(random.usize(..open.len()));
                        assert_eq!(acks.settle(tag), Some(()));
                        settled.insert(tag);
                    }
                    8 => acks.take_prefix().into_iter().for_each(|tag| broker.acknowledge(tag, true, &settled)),
                    9 => {
                        acks.take_prefix().into_iter().for_each(|tag| broker.acknowledge(tag, true, &settled));
                        acks.take_singles().into_iter().for_each(|tag| broker.acknowledge(tag, false, &settled));
                        assert!(broker.0.iter().all(|tag| open.contains(tag)));
                    }
                    _ => {}
                }
            }
            for tag in open {
                acks.settle(tag);
                settled.insert(tag);
            }
            acks.take_prefix().into_iter().for_each(|tag| broker.acknowledge(tag, true, &settled));
            assert!(broker.0.is_empty() && acks.settled() == 0, "seed {seed}: left {:?}", broker.0);
        }
    }
}
