//! The payment provider: charges cards, keeps a ledger, and fails at random.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncegate_config::Config;
use rusqlite::{Connection, params};
use tokio::time::sleep;

use crate::{Cli, Error, Result, WITH_INBOX};

const LATENCY: Duration = Duration::from_millis(10);
const TIMEOUT: Duration = Duration::from_millis(60);
/// The latency of a request that takes longer than the client waits.
const DELAYED: Duration = Duration::from_millis(250);

const TABLES: &str = include_str!("../ledger.sql");
const CHARGE: &str = include_str!("../charge.sql");
const VOID: &str = include_str!("../void.sql");

#[derive(Clone)]
pub(crate) struct Provider {
    /// A SQLite file, which several processes may share.
    ledger: Arc<Mutex<Connection>>,
    /// Whether the id is an idempotency key: then a second charge is accepted and not booked.
    deduplicates: bool,
    /// With an inbox, the file of its records, if these are not in PostgreSQL.
    pub(crate) inbox: Option<PathBuf>,
    /// The first id whose charge has no reply and whose look-ups fail; so do all higher ids.
    first_unsure: Option<String>,
}

/// A card that was looked up.
pub(crate) struct Card;

impl Provider {
    /// The provider with the ledger in this directory; with an inbox, in the file of its records.
    pub(crate) fn open(cli: &Cli, run_dir: &Path) -> Result<Self> {
        let inbox = (cli.guarantee == WITH_INBOX).then(|| run_dir.join("payments.db"));
        let file = inbox.clone().unwrap_or(run_dir.join("ledger.db"));
        let ledger = Connection::open(file)?;
        ledger.busy_timeout(Duration::from_secs(10))?;
        ledger.execute_batch(TABLES)?;
        let first_unsure = cli.payments.saturating_sub(cli.unsure) + 1;
        Ok(Self {
            ledger: Arc::new(Mutex::new(ledger)),
            deduplicates: cli.guarantee == "effectively-once",
            inbox,
            first_unsure: (cli.unsure > 0).then(|| format!("pay-{first_unsure:06}")),
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
        let fault = fastrand::u8(0..100) * u8::from(!self.is_unsure(&id));
        // A task, because a sent request arrives even if its caller is aborted.
        let booking = tokio::spawn(async move {
            let (is_late, is_lost) = (matches!(fault, 2..4), matches!(fault, 4..6));
            sleep(if is_late { DELAYED } else { LATENCY }).await;
            let once = provider.deduplicates;
            let charge = params![id, amount, attempt, once];
            match is_lost || provider.ledger().execute(CHARGE, charge)? > 0 || once {
                true => Ok(()),
                false => Err(Error::from("the provider refused a voided attempt")),
            }
        });
        if fault < 6 {
            sleep(TIMEOUT).await;
            return Err("the provider did not answer in time".into());
        }
        booking.await??;
        sleep(LATENCY).await;
        Ok(())
    }

    /// Whether a payment was charged. If not, the provider refuses its attempts up to and including
    /// this one from now on, also those in transit. After an error, the outcome is unknown.
    pub(crate) async fn find_or_void(&self, id: &str, attempt: u32) -> Result<Option<()>> {
        self.look_up().await?;
        if self.is_unsure(id) {
            return Err("the provider is not available".into());
        }
        let voided = self.ledger().execute(VOID, params![id, attempt])?;
        Ok((voided == 0).then_some(()))
    }

    /// 5% of look-ups fail.
    async fn look_up(&self) -> Result<()> {
        sleep(LATENCY / 2).await;
        match fastrand::u8(0..100) {
            0..5 => Err("the provider is not available".into()),
            _ => Ok(()),
        }
    }

    fn is_unsure(&self, id: &str) -> bool {
        self.first_unsure.as_deref().is_some_and(|from| id >= from)
    }

    /// How often each payment was charged.
    pub(crate) async fn charges(&self, config: &Config) -> Result<HashMap<String, i64>> {
        const COUNT: &str = "SELECT id, count(*) FROM charges GROUP BY id";
        #[cfg(feature = "postgres")]
        if self.inbox.is_some() && config.postgres(None).is_ok() {
            let pool = crate::inbox::ledger(config).await?;
            let rows: Vec<_> = sqlx::query_as(COUNT).fetch_all(&pool).await?;
            return Ok(rows.into_iter().collect());
        }
        let _ = config; // only PostgreSQL needs it
        let ledger = self.ledger();
        let mut query = ledger.prepare(COUNT)?;
        let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Connection> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
