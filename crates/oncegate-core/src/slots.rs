//! A slab, for deliveries in flight.

/// An index into [`Slots`], with a serial number that increases with each removal at that index:
/// the slot of a removed value does not find the next value at its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot {
    pub(crate) index: usize,
    serial: u64,
}

/// A slab: a vector whose indexes are reused.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    /// The serial number and the value of each index.
    values: Vec<(u64, Option<T>)>,
    /// The indexes without a value.
    free: Vec<usize>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T> Slots<T> {
    /// Reserves memory for `capacity` values, but at most for 65,536, because `max_in_flight` may
    /// be any number.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            values: Vec::with_capacity(capacity.min(65_536)),
            free: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len() - self.free.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline(always)]
    pub(crate) fn insert(&mut self, value: T) -> Slot {
        let Some(index) = self.free.pop() else {
            self.values.push((0, Some(value)));
            let index = self.values.len() - 1;
            return Slot { index, serial: 0 };
        };
        let (serial, free) = &mut self.values[index];
        *free = Some(value);
        Slot {
            index,
            serial: *serial,
        }
    }

    #[inline]
    pub(crate) fn at(&self, slot: Slot) -> Option<&T> {
        match self.values.get(slot.index) {
            Some((serial, value)) if *serial == slot.serial => value.as_ref(),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, slot: Slot) -> Option<&mut T> {
        match self.values.get_mut(slot.index) {
            Some((serial, value)) if *serial == slot.serial => value.as_mut(),
            _ => None,
        }
    }

    /// Removes a value and frees its index.
    #[inline(always)]
    pub(crate) fn remove(&mut self, slot: Slot) -> Option<T> {
        let (serial, value) = self.values.get_mut(slot.index)?;
        if *serial != slot.serial {
            return None;
        }
        let removed = value.take()?;
        *serial += 1;
        self.free.push(slot.index);
        Some(removed)
    }

    /// Drops a value in place, without moving it, and frees its index.
    #[inline]
    pub(crate) fn discard(&mut self, slot: Slot) {
        if let Some((serial, value)) = self.values.get_mut(slot.index)
            && *serial == slot.serial
            && value.is_some()
        {
            *value = None;
            *serial += 1;
            self.free.push(slot.index);
        }
    }

    /// The slot of the value at an index.
    pub(crate) fn slot(&self, index: usize) -> Option<Slot> {
        let (serial, value) = self.values.get(index)?;
        value.as_ref().map(|_| Slot {
            index,
            serial: *serial,
        })
    }

    /// The occupied slots.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        (0..self.values.len()).filter_map(|index| self.slot(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_reused_and_an_old_slot_finds_no_value() {
        let mut slots = Slots::new(1);
        let first = slots.insert("a");
        assert_eq!(slots.remove(first), Some("a"));
        let second = slots.insert("b");
        assert_eq!(second.index, first.index);
        assert!(slots.at(first).is_none() && slots.at_mut(first).is_none());
        assert_eq!(slots.remove(first), None);
        assert_eq!((slots.at(second), slots.len()), (Some(&"b"), 1));
        assert_eq!(slots.slots().collect::<Vec<_>>(), [second]);
    }
}
