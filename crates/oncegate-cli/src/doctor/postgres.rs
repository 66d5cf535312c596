//! PostgreSQL: checks that the tables exist and are usable, and that commits survive a crash.

use oncegate::{Persistence, Store, StoreError};
use oncegate_config::with_store_keys;

use super::DoctorFindings;
use super::settings::volatile_store_severity;
use crate::config::Config;
use crate::error::CliError;
use crate::marker_store::REPLY_TIMEOUT;

pub(super) async fn check(config: &Config, findings: &mut DoctorFindings) -> Result<(), CliError> {
    let postgres = config.postgres(Some(REPLY_TIMEOUT))?;
    let at = postgres.described();
    let error = |error: StoreError| with_store_keys(&error.to_string());
    match postgres.preflight(config.guarantee()).await {
        Ok(()) => {}
        Err(failure @ StoreError::NotApplied(_)) => {
            let remedy = "start it, or correct store.url";
            findings.error("store-unreachable", at, error(failure), remedy);
            return Ok(());
        }
        Err(failure) => {
            let remedy = "fix the cause that the error names";
            findings.error("store-unusable", at, error(failure), remedy);
            return Ok(());
        }
    }
    match postgres.persistence().await {
        Ok(Persistence::Durable(_)) => {}
        Ok(Persistence::Volatile(why)) => findings.add(
            volatile_store_severity(config),
            "store-volatile",
            at,
            why,
            "change that setting of the server or the table",
        ),
        Ok(other) => return Err(CliError::server(format!("{at}: {other:?}"))),
        Err(failure) => return Err(CliError::server(error(failure))),
    }
    Ok(())
}
