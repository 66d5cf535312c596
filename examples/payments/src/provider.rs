//! What the handler calls: the provider in this process, or over HTTP.

use std::sync::Arc;

use crate::bank::{Bank, Card, ProviderError};

/// A payment provider.
#[derive(Clone, Debug)]
pub(crate) enum Provider {
    /// In this process.
    Memory(Arc<Bank>),
    /// A server of its own.
    #[cfg(feature = "real")]
    Http(crate::http::Client),
}

impl Provider {
    /// Looks a card up.
    ///
    /// # Errors
    /// Now and then; nothing happened then.
    pub(crate) async fn card(&self, number: &str) -> Result<Card, ProviderError> {
        match self {
            Self::Memory(bank) => bank.card(number).await,
            #[cfg(feature = "real")]
            Self::Http(client) => client.card(number).await,
        }
    }

    /// Charges a card under the payment's id.
    ///
    /// # Errors
    /// Any error leaves open whether it was charged.
    pub(crate) async fn charge(
        &self,
        card: Card,
        amount: u64,
        id: &str,
        attempt: u32,
    ) -> Result<(), ProviderError> {
        match self {
            Self::Memory(bank) => bank.charge(card, amount, id, attempt).await,
            #[cfg(feature = "real")]
            Self::Http(client) => client.charge(card, amount, id, attempt).await,
        }
    }

    /// Whether a payment was charged. If it was not, the provider refuses its attempts up to and
    /// including this one from now on, even those that are still under way.
    ///
    /// # Errors
    /// Now and then; nothing is known then.
    pub(crate) async fn find_or_void(
        &self,
        id: &str,
        attempt: u32,
    ) -> Result<Option<()>, ProviderError> {
        match self {
            Self::Memory(bank) => bank.find_or_void(id, attempt).await,
            #[cfg(feature = "real")]
            Self::Http(client) => client.find_or_void(id, attempt).await,
        }
    }
}
