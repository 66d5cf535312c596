//! The checks of a store before the first message is received.

use std::time::{Duration, Instant};

use crate::error::Error;
use crate::log_throttle::LogThrottle;
use crate::marker::Guarantee;
use crate::settings::{InboxUse, Settings, VolatileStore};
use crate::store::{Persistence, Store, StoreError};

/// The pauses between two requests to an unavailable store: at most ten requests a second, and a
/// store that is available again is used within two seconds.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The interval of log lines about an unavailable store.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Checks that the store can keep the guarantee. Retries while the store is unavailable.
///
/// # Errors
/// The store cannot keep the guarantee, or is misconfigured.
pub(crate) async fn preflight(store: &dyn Store, settings: &Settings) -> Result<(), Error> {
    let mut tries = 0;
    let mut throttle = LogThrottle::every(LOG_INTERVAL);
    loop {
        let checked = check_store(store, settings).await;
        if let Some(status) = &settings.status {
            let now = Instant::now();
            status.update_store(|health| match &checked {
                Ok(_) => health.answered(now),
                Err(error) => {
                    health.failed(error, now);
                    health.not_answered(now);
                }
            });
        }
        match checked {
            Ok(Some(why)) => return Err(Error::VolatileStore(why)),
            Ok(None) => return Ok(()),
            Err(error @ StoreError::Misconfigured(_)) => return Err(error.into()),
            Err(error) => {
                if let Some(suppressed_lines) = throttle.due(Instant::now()) {
                    tracing::warn!(%error, suppressed_lines, "store unavailable, the start waits until it answers; check the store and its network");
                }
                let pause = settings.policy().pause(tries);
                tokio::time::sleep(pause.clamp(SHORTEST_PAUSE, LONGEST_PAUSE)).await;
                tries += 1;
            }
        }
    }
}

/// Checks the store once. Returns why it may lose data in a crash; `None` if it cannot, or if the
/// guarantee or the user allows that.
async fn check_store(store: &dyn Store, settings: &Settings) -> Result<Option<String>, StoreError> {
    store.preflight(settings.guarantee).await?;
    let needs_persistence =
        settings.guarantee == Guarantee::AtMostOnce || settings.inbox != InboxUse::None;
    if !needs_persistence || settings.volatile_store == VolatileStore::Allowed {
        return Ok(None);
    }
    Ok(match store.persistence().await? {
        Persistence::Volatile(why) => Some(why),
        Persistence::Durable(_) => None,
    })
}
