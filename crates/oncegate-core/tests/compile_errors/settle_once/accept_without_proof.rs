//! Only `lifecycle::transition` creates a proof, from a verdict of the store.
use oncegate_core::lifecycle::{Proof, Settlement};

fn forged() -> Settlement {
    Settlement::Accept(Proof("trust me"))
}

fn main() {
    forged();
}
