//! Only the road makes a proof, out of a verdict.
use oncegate_core::lifecycle::{Proof, Settlement};

fn forged() -> Settlement {
    Settlement::Accept(Proof("trust me"))
}

fn main() {
    forged();
}
