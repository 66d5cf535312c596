//! A delivery whose claim is cleared cannot be completed, too.
use oncegate_core::in_flight::InFlight;
use oncegate_core::lifecycle::{Event, Outcome, Policy};

fn both(running: InFlight, policy: &Policy) {
    let _cleared = running.handle(Event::Returned(Outcome::Retry), policy, |token| token);
    let _completed = running.handle(Event::Returned(Outcome::Done), policy, |token| token);
}

fn main() {}
