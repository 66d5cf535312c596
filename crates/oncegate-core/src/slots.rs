//! A slab for deliveries in flight.

/// An index into [`Slots`], with a serial number that grows with each removal: an event for a
/// removed value does not reach the next value at that index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot {
    pub(crate) index: usize,
    serial: u64,
}

/// A slab: a vector whose indexes are reused.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    values: Vec<(u64, Option<T>)>,
    free: Vec<usize>,
    taken: usize,
}

impl<T> Slots<T> {
    /// Reserves memory for `capacity` values, at most 65,536: `max_in_flight` may be any number.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            values: Vec::with_capacity(capacity.min(65_536)),
            free: Vec::new(),
            taken: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.taken
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.taken == 0
    }

    pub(crate) fn insert(&mut self, value: T) -> Slot {
        self.taken += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.values.push((0, None));
            self.values.len() - 1
        });
        self.values[index].1 = Some(value);
        Slot {
            index,
            serial: self.values[index].0,
        }
    }

    pub(crate) fn at(&self, slot: Slot) -> Option<&T> {
        self.values
            .get(slot.index)
            .filter(|(serial, _)| *serial == slot.serial)?
            .1
            .as_ref()
    }

    pub(crate) fn at_mut(&mut self, slot: Slot) -> Option<&mut T> {
        self.values
            .get_mut(slot.index)
            .filter(|(serial, _)| *serial == slot.serial)?
            .1
            .as_mut()
    }

    /// Takes a value out. Its index stays reserved until [`Slots::put_back`] or [`Slots::remove`].
    pub(crate) fn take(&mut self, slot: Slot) -> Option<T> {
        self.values
            .get_mut(slot.index)
            .filter(|(serial, _)| *serial == slot.serial)?
            .1
            .take()
    }

    pub(crate) fn put_back(&mut self, slot: Slot, value: T) {
        self.values[slot.index].1 = Some(value);
    }

    /// Removes a value and frees its index.
    pub(crate) fn remove(&mut self, slot: Slot) {
        if let Some((serial, value)) = self
            .values
            .get_mut(slot.index)
            .filter(|(serial, _)| *serial == slot.serial)
        {
            *serial += 1;
            *value = None;
            self.free.push(slot.index);
            self.taken -= 1;
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
