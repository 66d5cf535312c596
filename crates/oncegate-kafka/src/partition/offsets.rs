//! The offsets of one assignment, and which of them are settled.

use std::collections::VecDeque;

/// The delivered offsets from the lowest unsettled one on, in a ring buffer. Offsets that were
/// never delivered (such as compacted records or transaction markers) are gaps and count as settled. A
/// settlement takes O(1) time without gaps and O(log n) with gaps.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, PartialEq, Eq, Hash))]
pub(super) struct DeliveredOffsets {
    /// From the lowest unsettled offset on, ascending.
    ring: VecDeque<OffsetState>,
    /// One after the last offset that was delivered or skipped as a gap.
    end: Option<i64>,
}

/// A delivered offset: the number itself while unsettled, its bitwise complement once settled.
/// Offsets are never negative.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
struct OffsetState(i64);

impl OffsetState {
    fn offset(self) -> i64 {
        self.0.max(!self.0)
    }

    fn is_settled(self) -> bool {
        self.0 < 0
    }
}

impl DeliveredOffsets {
    /// Adds a delivered offset, which must not be below [`end`](Self::end).
    pub(super) fn deliver(&mut self, offset: i64) {
        debug_assert!(self.end.is_none_or(|end| end <= offset), "offsets ascend");
        self.end = Some(offset + 1);
        self.ring.push_back(OffsetState(offset));
    }

    /// Skips the offsets below this one as gaps. Without this, the transaction markers at the end
    /// of a log would keep the lag above 0.
    pub(super) fn advance_to(&mut self, offset: i64) {
        self.end = self.end.max(Some(offset));
    }

    /// One after the last offset that was delivered or skipped; `None` before the first delivery
    /// or skip.
    pub(super) fn end(&self) -> Option<i64> {
        self.end
    }

    /// Settles an offset. False if it was settled before, or never delivered.
    pub(super) fn settle(&mut self, offset: i64) -> bool {
        let Some(index) = self.index(offset).filter(|it| !self.ring[*it].is_settled()) else {
            return false;
        };
        self.ring[index] = OffsetState(!offset);
        while self.ring.front().is_some_and(|slot| slot.is_settled()) {
            self.ring.pop_front();
        }
        true
    }

    /// The lowest unsettled offset, or the one after the last.
    pub(super) fn committable(&self) -> Option<i64> {
        self.lowest().or(self.end)
    }

    /// The lowest unsettled offset.
    pub(super) fn lowest(&self) -> Option<i64> {
        self.ring.front().map(|slot| slot.offset())
    }

    /// The number of delivered offsets from the lowest unsettled one on, settled or not.
    pub(super) fn span(&self) -> usize {
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
