//! A delivery that was released cannot be accepted too: settling consumes it.
use oncegate_core::internal::in_flight::InFlight;
use oncegate_core::internal::lifecycle::Policy;
use oncegate_core::lifecycle::Settlement;

fn both(in_flight: InFlight, release: Settlement, accept: Settlement, policy: &Policy) {
    let _released = in_flight.settle(release, policy);
    let _accepted = in_flight.settle(accept, policy);
}

fn main() {}
