//! A slab for deliveries in flight.

/// A place in [`Slots`] and the serial number of its occupant, so that a stale event does not reach
/// the next occupant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot {
    pub(crate) place: usize,
    serial: u64,
}

/// A slab: a vector of reusable places.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    places: Vec<(u64, Option<T>)>,
    free: Vec<usize>,
    taken: usize,
}

impl<T> Slots<T> {
    /// Reserves memory for `capacity` values, within reason: `max_in_flight` may be any number.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            places: Vec::with_capacity(capacity.min(65_536)),
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
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            self.places.len() - 1
        });
        self.places[place].1 = Some(value);
        Slot {
            place,
            serial: self.places[place].0,
        }
    }

    pub(crate) fn at(&self, slot: Slot) -> Option<&T> {
        self.places
            .get(slot.place)
            .filter(|(serial, _)| *serial == slot.serial)?
            .1
            .as_ref()
    }

    pub(crate) fn at_mut(&mut self, slot: Slot) -> Option<&mut T> {
        self.places
            .get_mut(slot.place)
            .filter(|(serial, _)| *serial == slot.serial)?
            .1
            .as_mut()
    }

    /// Takes a value out. Its place stays reserved until [`Slots::put_back`] or [`Slots::remove`].
    pub(crate) fn take(&mut self, slot: Slot) -> Option<T> {
        self.places
            .get_mut(slot.place)
            .filter(|(serial, _)| *serial == slot.serial)?
            .1
            .take()
    }

    pub(crate) fn put_back(&mut self, slot: Slot, value: T) {
        self.places[slot.place].1 = Some(value);
    }

    /// Removes a value and frees its place.
    pub(crate) fn remove(&mut self, slot: Slot) {
        if let Some((serial, value)) = self
            .places
            .get_mut(slot.place)
            .filter(|(serial, _)| *serial == slot.serial)
        {
            *serial += 1;
            *value = None;
            self.free.push(slot.place);
            self.taken -= 1;
        }
    }

    /// The slot of the current occupant of a place.
    pub(crate) fn slot(&self, place: usize) -> Option<Slot> {
        let (serial, value) = self.places.get(place)?;
        value.as_ref().map(|_| Slot {
            place,
            serial: *serial,
        })
    }

    /// The occupied slots.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        (0..self.places.len()).filter_map(|place| self.slot(place))
    }
}
