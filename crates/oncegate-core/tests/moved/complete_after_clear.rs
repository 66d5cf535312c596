//! A passage that went on to be cleared cannot be completed too.
use oncegate_core::passage::Passage;
use oncegate_core::road::{Event, Outcome, Policy};

fn both(running: Passage, policy: &Policy) {
    let _cleared = running.next(Event::Returned(Outcome::Retry), policy);
    let _completed = running.next(Event::Returned(Outcome::Done), policy);
}

fn main() {}
