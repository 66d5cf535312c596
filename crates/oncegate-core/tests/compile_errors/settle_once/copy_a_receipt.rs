//! A receipt cannot be copied to settle a delivery a second time.
use oncegate_core::Receipt;

fn copy(receipt: &Receipt) -> Receipt {
    receipt.clone()
}

fn main() {}
