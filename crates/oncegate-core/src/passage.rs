//! One delivery on the road.

use crate::road::{Event, History, Policy, Settlement, Stage, Step, next};
use crate::source::{Delivery, Settled, Story};

/// One delivery on the road: moved by each step, never copied, and gone once it is settled.
#[derive(Debug)]
pub struct Passage(Box<Travelling>);

/// It lies where it is while a passage moves: a step moves a pointer.
#[derive(Debug)]
struct Travelling {
    delivery: Delivery,
    stage: Stage,
    /// Only what failed has one.
    story: Option<Box<Story>>,
}

/// What a step made of a [`Passage`].
#[derive(Debug)]
pub enum Onward {
    /// It goes on; this is to be done.
    Travels(Passage, Step),
    /// It left the road, for the source to settle.
    Left(Settled),
    /// It was let go without a settlement, and comes back by itself.
    Dropped(Delivery),
}

impl Passage {
    /// A delivery at the beginning of the road.
    pub fn new(delivery: Delivery, history: History) -> Self {
        Self(Box::new(Travelling { delivery, stage: Stage::New(history), story: None }))
    }

    /// Takes the passage one step on, as [`road::next`](crate::road::next) says.
    pub fn next(self, event: Event, policy: &Policy) -> Onward {
        let Self(mut travelling) = self;
        match next(travelling.stage, event, policy) {
            (_, Step::Settle(settlement)) => {
                let Travelling { delivery, story, .. } = *travelling;
                let story = story.filter(|_| matches!(settlement, Settlement::Reject(_)));
                Onward::Left(Settled { delivery, settlement, story })
            }
            (_, Step::Drop) => Onward::Dropped(travelling.delivery),
            (stage, step) => {
                travelling.stage = stage;
                Onward::Travels(Self(travelling), step)
            }
        }
    }

    /// The delivery.
    pub fn delivery(&self) -> &Delivery {
        &self.0.delivery
    }

    /// Where it stands.
    pub fn stage(&self) -> Stage {
        self.0.stage
    }

    /// Writes down what a person will want to know if it is dead-lettered.
    pub fn tell(&mut self, write: impl FnOnce(&mut Story)) {
        write(self.0.story.get_or_insert_default());
    }
}
