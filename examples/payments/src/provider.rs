//! The payment provider: charges cards, writes a ledger, and fails now and then.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::sleep;

use crate::ledger::Ledger;
use crate::{Cli, Promise};

const LATENCY: Duration = Duration::from_millis(10);
const TIMEOUT: Duration = Duration::from_millis(60);
/// The latency of a request that takes longer than the client waits.
const DELAYED: Duration = Duration::from_millis(250);

#[derive(Clone)]
pub(crate) struct Provider {
    ledger: Arc<Mutex<Ledger>>,
    /// The id is an idempotency key: a second charge is not booked.
    deduplicates: bool,
    /// The provider does not tell whether it charged payments with these ids or greater ones.
    unsure_from: Option<String>,
}

/// A card that was looked up.
pub(crate) struct Card;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ProviderError {
    #[error("the provider is not available")]
    Unavailable,
    #[error("the provider did not answer in time")]
    TimedOut,
    #[error("the provider refused an attempt that was voided")]
    Voided,
    #[error("the provider cannot write its ledger: {0}")]
    Ledger(#[from] rusqlite::Error),
}

type Result<T> = std::result::Result<T, ProviderError>;

impl Provider {
    /// The provider with the ledger in this directory, which several processes may share.
    pub(crate) fn open(cli: &Cli, run_dir: &Path) -> rusqlite::Result<Self> {
        let first_unsure = cli.payments.saturating_sub(cli.unsure) + 1;
        Ok(Self {
            ledger: Arc::new(Mutex::new(Ledger::open(run_dir)?)),
            deduplicates: cli.guarantee == Promise::EffectivelyOnce,
            unsure_from: (cli.unsure > 0).then(|| format!("pay-{first_unsure:06}")),
        })
    }

    /// Looks up a card. After an error, nothing happened.
    pub(crate) async fn card(&self, _number: &str) -> Result<Card> {
        self.look_up().await.map(|()| Card)
    }

    /// Charges a card. After an error, the charge may have happened.
    ///
    /// 6% of charges have no answer: 2% are booked, 2% are booked after the caller's timeout, and
    /// 2% are never booked.
    pub(crate) async fn charge(&self, _: Card, amount: u32, id: &str, attempt: u32) -> Result<()> {
        let (provider, id) = (self.clone(), id.to_owned());
        let fault = if self.is_unsure(&id) {
            0
        } else {
            fastrand::u8(0..100)
        };
        // A task of its own: a request that was sent arrives, even if its caller is aborted.
        let booking = tokio::spawn(async move {
            let (is_late, is_lost) = ((2..4).contains(&fault), (4..6).contains(&fault));
            sleep(if is_late { DELAYED } else { LATENCY }).await;
            let once = provider.deduplicates;
            match is_lost || provider.ledger().charge(&id, amount, attempt, once)? {
                true => Ok(()),
                false => Err(ProviderError::Voided),
            }
        });
        if fault < 6 {
            sleep(TIMEOUT).await;
            return Err(ProviderError::TimedOut);
        }
        let booked = booking.await.map_err(|_| ProviderError::TimedOut)?;
        sleep(LATENCY).await;
        booked
    }

    /// Whether a payment was charged. If not, the provider refuses its attempts up to and including
    /// this one from now on, also those that are still in transit. After an error, nothing is known.
    pub(crate) async fn find_or_void(&self, id: &str, attempt: u32) -> Result<Option<()>> {
        self.look_up().await?;
        if self.is_unsure(id) {
            return Err(ProviderError::Unavailable);
        }
        Ok(self.ledger().find_or_void(id, attempt)?.then_some(()))
    }

    /// 5% of look-ups fail.
    async fn look_up(&self) -> Result<()> {
        sleep(LATENCY / 2).await;
        match fastrand::u8(0..100) {
            0..5 => Err(ProviderError::Unavailable),
            _ => Ok(()),
        }
    }

    fn is_unsure(&self, id: &str) -> bool {
        self.unsure_from.as_deref().is_some_and(|from| id >= from)
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
