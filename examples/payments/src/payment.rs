//! A payment, as it travels in a message.

use serde::{Deserialize, Serialize};

/// The header that holds a payment's id.
pub(crate) const ID_HEADER: &str = "payment-id";

/// What is to be charged to whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Payment {
    /// What makes two payments the same.
    pub(crate) id: String,
    /// The card to charge.
    pub(crate) card: String,
    /// In cents.
    pub(crate) amount: u64,
}
