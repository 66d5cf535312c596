//! The payment provider's inside: its ledger, and the trouble it makes.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::faults::{Fate, Faults};
use crate::ledger::{Ledger, NotBooked, Repeats};

/// How long the provider takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// From a request to its answer.
    pub(crate) answer: Duration,
    /// From a request to giving up on its answer.
    pub(crate) timeout: Duration,
    /// From a request to a charge that arrives late.
    pub(crate) late: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            answer: Duration::from_millis(20),
            timeout: Duration::from_millis(60),
            late: Duration::from_millis(250),
        }
    }
}

/// A card that was looked up.
#[derive(Clone, Debug)]
pub(crate) struct Card(pub(crate) String);

/// Why the provider did not do it, or did not say so.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProviderError {
    /// It was not asked, or refused to work just now.
    #[error("the provider is not available: {0}")]
    Unavailable(String),
    /// It may have done it.
    #[error("the provider did not answer in time")]
    TimedOut,
    /// It refuses what was voided.
    #[error("the provider refused: {0}")]
    Refused(String),
}

/// The provider itself.
#[derive(Debug)]
pub(crate) struct Bank {
    ledger: Mutex<Ledger>,
    faults: Faults,
    repeats: Repeats,
    pace: Pace,
    look_ups: AtomicU64,
    /// How often each id was asked to be charged: no fault repeats itself for ever.
    asked: Mutex<HashMap<String, u32>>,
    /// The payments that it never says anything of.
    unsure_of: HashSet<String>,
}

impl Bank {
    /// A provider with this book. It charges the payments that it is unsure of, and never says so.
    pub(crate) fn new(
        ledger: Ledger,
        faults: Faults,
        repeats: Repeats,
        pace: Pace,
        unsure_of: impl IntoIterator<Item = String>,
    ) -> Arc<Self> {
        let (ledger, unsure_of) = (Mutex::new(ledger), unsure_of.into_iter().collect());
        Arc::new(Self {
            ledger,
            faults,
            repeats,
            pace,
            look_ups: AtomicU64::new(0),
            asked: Mutex::default(),
            unsure_of,
        })
    }

    /// Its book, to be counted. Not to be held over an await.
    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Each entry is one step: a panic elsewhere leaves no half of one.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks a card up.
    ///
    /// # Errors
    /// Now and then; nothing happened then.
    pub(crate) async fn card(&self, number: &str) -> Result<Card, ProviderError> {
        self.look_up().await?;
        Ok(Card(number.to_owned()))
    }

    /// Charges a card. Goes on by itself when the caller is gone.
    ///
    /// # Errors
    /// [`ProviderError::TimedOut`] leaves open what happened.
    pub(crate) async fn charge(
        self: &Arc<Self>,
        card: Card,
        amount: u64,
        id: &str,
        attempt: u32,
    ) -> Result<(), ProviderError> {
        debug_assert!(!card.0.is_empty(), "a card that was looked up has a number");
        let fate = if self.unsure_of.contains(id) {
            Fate::AnswerLost
        } else {
            self.faults.charge(id, self.count(id))
        };
        let booking_after = if fate == Fate::ArrivesLate {
            self.pace.late
        } else {
            self.pace.answer / 2
        };
        let (bank, id) = (Arc::clone(self), id.to_owned());
        // What has left the caller arrives, whatever becomes of the caller: hence a task of its
        // own.
        let booking = (fate != Fate::NeverArrives).then(|| {
            tokio::spawn(async move {
                tokio::time::sleep(booking_after).await;
                bank.ledger().charge(&id, amount, attempt, bank.repeats)
            })
        });
        match (fate, booking) {
            (Fate::Answered, Some(booking)) => {
                let booked = booking.await.map_err(|_| ProviderError::TimedOut)?;
                tokio::time::sleep(self.pace.answer / 2).await;
                booked.map_err(|error| match error {
                    NotBooked::Voided(voided) => ProviderError::Refused(voided.to_string()),
                    NotBooked::Unwritten(error) => ProviderError::Unavailable(error.to_string()),
                })
            }
            _ => {
                tokio::time::sleep(self.pace.timeout).await;
                Err(ProviderError::TimedOut)
            }
        }
    }

    /// Whether a payment was charged; if not, its attempts up to and including this one are refused
    /// from now on.
    ///
    /// # Errors
    /// Now and then, and always of a payment that it is unsure of; nothing is refused then.
    pub(crate) async fn find_or_void(
        &self,
        id: &str,
        attempt: u32,
    ) -> Result<Option<()>, ProviderError> {
        self.look_up().await?;
        if self.unsure_of.contains(id) {
            return Err(ProviderError::Unavailable(
                "nothing can be said of this payment".to_owned(),
            ));
        }
        let found = self
            .ledger()
            .find_or_void(id, attempt)
            .map_err(|error| ProviderError::Unavailable(error.to_string()))?;
        Ok(found.then_some(()))
    }

    fn count(&self, id: &str) -> u32 {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let times = asked.entry(id.to_owned()).or_default();
        *times += 1;
        *times
    }

    async fn look_up(&self) -> Result<(), ProviderError> {
        tokio::time::sleep(self.pace.answer / 4).await;
        if self
            .faults
            .look_up_fails(self.look_ups.fetch_add(1, Ordering::Relaxed))
        {
            return Err(ProviderError::Unavailable("try again".to_owned()));
        }
        Ok(())
    }
}
