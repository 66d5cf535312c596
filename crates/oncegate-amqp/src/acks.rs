//! Which delivery tags of one channel may be acknowledged, and how.

use std::collections::VecDeque;

/// The deliveries of one channel, and what each still carries.
///
/// An acknowledgement with `multiple` covers every tag up to its own, so it is only ever yielded
/// for a prefix in which every tag is settled, and its own tag is one that was not acknowledged
/// before: the broker refuses a tag that it does not know, and closes the channel.
///
/// It holds what is not acknowledged, and nothing else: the prefetch bounds it, however long one of
/// them stands open.
#[derive(Debug)]
pub(crate) struct Acks<T> {
    /// What was delivered and is not acknowledged, by tag.
    tags: VecDeque<(u64, Tag<T>)>,
    settled: usize,
    /// How many were acknowledged one by one while the first entry has been the first.
    alone: usize,
}

#[derive(Debug)]
enum Tag<T> {
    Open(T),
    Settled,
}

impl<T> Acks<T> {
    /// Of a new channel.
    pub(crate) fn new() -> Self {
        Self {
            tags: VecDeque::new(),
            settled: 0,
            alone: 0,
        }
    }

    /// Takes a delivery in. The broker counts its tags up; one that it left out is none of ours.
    pub(crate) fn delivered(&mut self, tag: u64, carried: T) {
        if self.tags.back().is_none_or(|(last, _)| *last < tag) {
            self.tags.push_back((tag, Tag::Open(carried)));
        }
    }

    /// What an unsettled delivery carries; `None` for a tag that is not open.
    pub(crate) fn carried(&self, tag: u64) -> Option<&T> {
        match &self.tags[self.index(tag)?] {
            (_, Tag::Open(carried)) => Some(carried),
            (_, Tag::Settled) => None,
        }
    }

    /// Marks a delivery as done with, and gives back what it carried; `None` for a tag that is not
    /// open.
    pub(crate) fn settle(&mut self, tag: u64) -> Option<T> {
        let index = self.index(tag)?;
        match std::mem::replace(&mut self.tags[index].1, Tag::Settled) {
            Tag::Open(carried) => {
                self.settled += 1;
                Some(carried)
            }
            Tag::Settled => None,
        }
    }

    /// Takes a delivery out that is rejected, and gives back what it carried; `None` for a tag that
    /// is not open. The rejection has to leave before the next acknowledgement does: that may cover
    /// the tag.
    pub(crate) fn reject(&mut self, tag: u64) -> Option<T> {
        self.carried(tag)?;
        let index = self.index(tag)?;
        if index == 0 {
            self.alone = 0;
        }
        match self.tags.remove(index)? {
            (_, Tag::Open(carried)) => Some(carried),
            (_, Tag::Settled) => None,
        }
    }

    /// What the delivery carries that has stood open for longest.
    pub(crate) fn oldest(&self) -> Option<&T> {
        self.tags.iter().find_map(|(_, tag)| {
            if let Tag::Open(carried) = tag {
                Some(carried)
            } else {
                None
            }
        })
    }

    /// Takes the settled prefix: the tag to acknowledge with `multiple`.
    pub(crate) fn take_prefix(&mut self) -> Option<u64> {
        let mut last = None;
        while let Some((tag, Tag::Settled)) = self.tags.front() {
            last = Some(*tag);
            self.tags.pop_front();
            self.settled -= 1;
            self.alone = 0;
        }
        last
    }

    /// Takes all that is settled beyond the prefix: the tags to acknowledge one by one, in order.
    pub(crate) fn take_singles(&mut self) -> Vec<u64> {
        let mut singles = Vec::with_capacity(self.settled);
        if self.settled > 0 {
            self.tags.retain(|(tag, state)| {
                let open = matches!(state, Tag::Open(_));
                if !open {
                    singles.push(*tag);
                }
                open
            });
        }
        self.settled = 0;
        self.alone += singles.len();
        singles
    }

    /// The open delivery that keeps those behind it from being acknowledged together, and how many
    /// of them were acknowledged one by one for its sake.
    pub(crate) fn obstacle(&self) -> Option<(u64, usize)> {
        match self.tags.front() {
            Some((tag, Tag::Open(_))) => Some((*tag, self.alone)),
            _ => None,
        }
    }

    /// How many are settled and not acknowledged yet.
    pub(crate) fn settled(&self) -> usize {
        self.settled
    }

    /// How many are not acknowledged, settled or not.
    pub(crate) fn unacked(&self) -> usize {
        self.tags.len()
    }

    /// Whether all that was delivered is acknowledged.
    pub(crate) fn is_empty(&self) -> bool {
        self.tags.is_empty()
    }

    fn index(&self, tag: u64) -> Option<usize> {
        self.tags.binary_search_by_key(&tag, |(tag, _)| *tag).ok()
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
        assert_eq!(
            (acks.take_singles().len(), acks.obstacle()),
            (3, Some((1, 3)))
        );
        acks.settle(1);
        assert_eq!(
            acks.obstacle(),
            None,
            "it is settled, and its acknowledgement is only not sent"
        );
        assert_eq!(
            (acks.take_prefix(), acks.obstacle()),
            (Some(1), Some((4, 0)))
        );
        acks.settle(6);
        assert_eq!(
            (acks.take_singles(), acks.obstacle()),
            (vec![6], Some((4, 1)))
        );
    }

    #[test]
    fn a_rejected_tag_is_never_acknowledged_and_the_oldest_is_the_first_that_is_open() {
        let mut acks = delivered(4);
        assert_eq!(
            (acks.reject(2), acks.reject(2), acks.settle(2)),
            (Some(2), None, None)
        );
        assert_eq!((acks.oldest(), acks.unacked()), (Some(&1), 3));
        acks.settle(1);
        acks.settle(3);
        assert_eq!(
            (acks.take_prefix(), acks.oldest(), acks.unacked()),
            (Some(3), Some(&4), 1)
        );
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

    #[test]
    fn however_many_are_acknowledged_behind_an_open_one_nothing_is_kept_of_them() {
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
        assert_eq!(
            (acks.unacked(), acks.obstacle(), acks.oldest()),
            (1, Some((1, 100_000)), Some(&1))
        );
    }

    /// The broker's side, as RabbitMQ does it: an unknown tag closes the channel.
    #[derive(Default)]
    struct Broker(BTreeSet<u64>);

    impl Broker {
        fn acknowledge(&mut self, tag: u64, multiple: bool, settled: &BTreeSet<u64>) {
            assert!(self.0.contains(&tag), "406: unknown delivery tag {tag}");
            let covered: Vec<u64> = if multiple {
                self.0.range(..=tag).copied().collect()
            } else {
                vec![tag]
            };
            for tag in covered {
                assert!(
                    settled.contains(&tag),
                    "{tag} was acknowledged and not settled: a lost message"
                );
                self.0.remove(&tag);
            }
        }
    }

    #[test]
    fn whatever_the_order_no_tag_is_lost_refused_or_forgotten() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut acks, mut broker, mut settled) =
                (Acks::new(), Broker::default(), BTreeSet::new());
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
                    8 => acks
                        .take_prefix()
                        .into_iter()
                        .for_each(|tag| broker.acknowledge(tag, true, &settled)),
                    9 => {
                        acks.take_prefix()
                            .into_iter()
                            .for_each(|tag| broker.acknowledge(tag, true, &settled));
                        acks.take_singles()
                            .into_iter()
                            .for_each(|tag| broker.acknowledge(tag, false, &settled));
                        assert!(broker.0.iter().all(|tag| open.contains(tag)));
                    }
                    _ => {}
                }
            }
            for tag in open {
                acks.settle(tag);
                settled.insert(tag);
            }
            acks.take_prefix()
                .into_iter()
                .for_each(|tag| broker.acknowledge(tag, true, &settled));
            assert!(
                broker.0.is_empty() && acks.settled() == 0,
                "seed {seed}: left {:?}",
                broker.0
            );
        }
    }
}
