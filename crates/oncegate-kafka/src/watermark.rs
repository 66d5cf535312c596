//! The offset up to which a partition may be committed.

use std::collections::VecDeque;

/// The delivered offsets of one partition under one assignment, and which of them are settled.
///
/// A dense ring of the delivered offsets. Offsets that were never delivered (compacted records or
/// transaction markers) are gaps and count as settled. A settlement costs O(1) without gaps and
/// O(log n) with gaps.
#[derive(Debug, Default)]
pub(crate) struct Watermark {
    /// From the lowest unsettled offset on, ascending.
    ring: VecDeque<OffsetState>,
    /// One after the last offset that was delivered or skipped as a gap.
    end: Option<i64>,
    /// The last offset that was taken for a commit, or the start of the partition.
    committed: i64,
}

/// A delivered offset: the number itself while unsettled, its bitwise complement once settled.
/// Offsets are never negative.
#[derive(Clone, Copy, Debug)]
struct OffsetState(i64);

impl OffsetState {
    fn offset(self) -> i64 {
        self.0.max(!self.0)
    }

    fn is_settled(self) -> bool {
        self.0 < 0
    }
}

/// The order of a delivered offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffsetOrder {
    /// Higher than all before it.
    Ascending,
    /// Not higher, and not added: the log was truncated, or librdkafka reads
    /// messages again.
    Backwards,
}

/// The effect of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffsetChange {
    /// The offset is settled now.
    Settled,
    /// The offset was settled before, or never delivered.
    Unchanged,
}

impl Watermark {
    /// Adds a delivered offset.
    pub(crate) fn deliver(&mut self, offset: i64) -> OffsetOrder {
        match self.end {
            Some(end) if offset < end => return OffsetOrder::Backwards,
            Some(_) => {}
            None => self.committed = offset,
        }
        self.end = Some(offset + 1);
        self.ring.push_back(OffsetState(offset));
        OffsetOrder::Ascending
    }

    /// Starts at this offset, so that every offset below it counts as settled. Does nothing after the
    /// first delivery.
    pub(crate) fn start_at(&mut self, offset: i64) {
        if self.end.is_none() {
            (self.end, self.committed) = (Some(offset), offset);
        }
    }

    /// The log was read up to this offset: undelivered offsets below it are gaps. Without this, the
    /// transaction markers at the end of a log would keep the lag above 0. Does nothing before the
    /// first delivery or [`start_at`](Self::start_at).
    pub(crate) fn advance_to(&mut self, offset: i64) {
        self.end = self.end.map(|end| end.max(offset));
    }

    /// One after the last offset that was delivered or skipped as a gap.
    pub(crate) fn end(&self) -> Option<i64> {
        self.end
    }

    /// Settles an offset.
    pub(crate) fn settle(&mut self, offset: i64) -> OffsetChange {
        let Some(index) = self.index(offset) else {
            return OffsetChange::Unchanged;
        };
        if self.ring[index].is_settled() {
            return OffsetChange::Unchanged;
        }
        self.ring[index] = OffsetState(!offset);
        while self.ring.front().is_some_and(|slot| slot.is_settled()) {
            self.ring.pop_front();
        }
        OffsetChange::Settled
    }

    /// The offset to commit, if it is higher than the last one taken.
    pub(crate) fn take_commit(&mut self) -> Option<i64> {
        let offset = self.position().filter(|offset| *offset > self.committed)?;
        self.committed = offset;
        Some(offset)
    }

    /// The last offset that was taken for a commit, or the start of the partition; `None` before
    /// the first delivery.
    pub(crate) fn last_taken(&self) -> Option<i64> {
        self.end.map(|_| self.committed)
    }

    /// The offset to commit, even if it was taken before; `None` before the first delivery.
    pub(crate) fn take_position(&mut self) -> Option<i64> {
        self.committed = self.position()?;
        Some(self.committed)
    }

    /// The lowest unsettled offset, or the one after the last.
    pub(crate) fn position(&self) -> Option<i64> {
        self.lowest().or(self.end)
    }

    /// The lowest unsettled offset.
    pub(crate) fn lowest(&self) -> Option<i64> {
        self.ring.front().map(|slot| slot.offset())
    }

    /// The number of offsets from the lowest unsettled one to the last one, settled or not.
    pub(crate) fn span(&self) -> usize {
        self.ring.len()
    }

    /// The index of an offset. Without gaps it is the distance from the first offset.
    fn index(&self, offset: i64) -> Option<usize> {
        let ahead = usize::try_from(offset.checked_sub(self.ring.front()?.offset())?).ok()?;
        match self.ring.get(ahead) {
            Some(slot) if slot.offset() == offset => Some(ahead),
            _ => self
                .ring
                .binary_search_by_key(&offset, |slot| slot.offset())
                .ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn delivered(offsets: impl IntoIterator<Item = i64>) -> Watermark {
        let mut watermark = Watermark::default();
        for offset in offsets {
            assert_eq!(watermark.deliver(offset), OffsetOrder::Ascending);
        }
        watermark
    }

    #[test]
    fn nothing_settled_commits_nothing() {
        assert_eq!(Watermark::default().take_commit(), None);
        assert_eq!(delivered(5..9).take_commit(), None);
    }

    #[test]
    fn the_lowest_unsettled_offset_is_committed_and_only_once() {
        let mut watermark = delivered(5..9);
        watermark.settle(6);
        assert_eq!(watermark.take_commit(), None);
        watermark.settle(5);
        assert_eq!(watermark.take_commit(), Some(7));
        assert_eq!(watermark.take_commit(), None);
        watermark.settle(8);
        watermark.settle(7);
        assert_eq!(watermark.take_commit(), Some(9));
        assert_eq!(watermark.span(), 0);
    }

    #[test]
    fn take_position_returns_the_position_even_if_it_was_taken_before() {
        assert_eq!(Watermark::default().take_position(), None);
        let mut watermark = delivered(5..7);
        assert_eq!(watermark.take_position(), Some(5));
        watermark.settle(5);
        assert_eq!(watermark.take_position(), Some(6));
        assert_eq!(watermark.take_position(), Some(6));
        assert_eq!(watermark.take_commit(), None);
        watermark.settle(6);
        assert_eq!(watermark.take_commit(), Some(7));
    }

    #[test]
    fn gaps_count_as_settled() {
        let mut watermark = delivered([3, 1_000_000_000_000, 1_000_000_000_007]);
        watermark.settle(1_000_000_000_000);
        watermark.settle(3);
        assert_eq!(watermark.take_commit(), Some(1_000_000_000_007));
    }

    #[test]
    fn settling_twice_or_an_undelivered_offset_changes_nothing() {
        let mut watermark = delivered([1, 3]);
        assert_eq!(watermark.settle(2), OffsetChange::Unchanged);
        assert_eq!(watermark.settle(0), OffsetChange::Unchanged);
        assert_eq!(watermark.settle(-1), OffsetChange::Unchanged);
        assert_eq!(watermark.settle(i64::MAX), OffsetChange::Unchanged);
        assert_eq!(watermark.settle(3), OffsetChange::Settled);
        assert_eq!(watermark.settle(3), OffsetChange::Unchanged);
        assert_eq!(watermark.settle(1), OffsetChange::Settled);
        assert_eq!(watermark.settle(1), OffsetChange::Unchanged);
        assert_eq!(watermark.take_commit(), Some(4));
    }

    #[test]
    fn an_offset_below_the_last_one_is_rejected() {
        let mut watermark = delivered([7, 8]);
        assert_eq!(watermark.deliver(8), OffsetOrder::Backwards);
        assert_eq!(watermark.deliver(2), OffsetOrder::Backwards);
        assert_eq!(watermark.deliver(9), OffsetOrder::Ascending);
    }

    /// A pseudorandom generator (xorshift) whose numbers are the same in every run.
    struct Xorshift(u64);

    impl Xorshift {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % bound
        }
    }

    #[test]
    fn any_history_agrees_with_a_map_of_all_offsets() {
        for seed in 1..=300 {
            let mut random = Xorshift(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
            let gaps = random.below(2) == 0;
            let (mut watermark, mut reference) =
                (Watermark::default(), BTreeMap::<i64, bool>::new());
            let mut next = random.below(100) as i64;
            let mut last_commit = next;
            for _ in 0..400 {
                if random.below(5) < 2 {
                    if gaps {
                        next += (random.below(4) * random.below(50)) as i64;
                    }
                    assert_eq!(watermark.deliver(next), OffsetOrder::Ascending);
                    if reference.is_empty() {
                        last_commit = next;
                    }
                    reference.insert(next, false);
                    next += 1;
                } else {
                    let offset = next - random.below(60) as i64;
                    let expected = match reference.get_mut(&offset) {
                        Some(settled) if !*settled => {
                            *settled = true;
                            OffsetChange::Settled
                        }
                        _ => OffsetChange::Unchanged,
                    };
                    assert_eq!(watermark.settle(offset), expected, "seed {seed}");
                }
                if random.below(3) == 0 {
                    let lowest = reference
                        .iter()
                        .find(|(_, settled)| !**settled)
                        .map(|(offset, _)| *offset);
                    let expected = lowest
                        .or(reference.keys().last().map(|last| last + 1))
                        .filter(|offset| *offset > last_commit);
                    assert_eq!(watermark.take_commit(), expected, "seed {seed}");
                    last_commit = expected.unwrap_or(last_commit);
                }
            }
        }
    }
}
