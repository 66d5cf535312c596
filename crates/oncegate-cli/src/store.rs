//! `oncegate store`: prepares the store.

use clap::Subcommand;
use oncegate_config::StoreKind;

use crate::CliContext;
use crate::error::CliError;
#[cfg(feature = "postgres")]
use crate::marker_store::REPLY_TIMEOUT;

#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// Create the tables in PostgreSQL, or update those of an older release. Other stores need no
    /// preparation
    Migrate,
}

pub(crate) async fn run(context: &CliContext, command: StoreCommand) -> Result<(), CliError> {
    context.check_configured()?;
    match command {
        StoreCommand::Migrate => migrate(context).await,
    }
}

async fn migrate(context: &CliContext) -> Result<(), CliError> {
    let config = &context.config;
    let done = match config.store_kind()? {
        #[cfg(feature = "postgres")]
        Some(StoreKind::Postgres) => {
            config.postgres(Some(REPLY_TIMEOUT))?.migrate().await?;
            "the tables in PostgreSQL are those of this release"
        }
        #[cfg(not(feature = "postgres"))]
        Some(StoreKind::Postgres) => {
            return Err(CliError::feature_missing("PostgreSQL", "postgres"));
        }
        Some(_) => "this store needs no preparation: only PostgreSQL has tables to create",
        None => return Err(CliError::usage("no store is configured; set store.url")),
    };
    context
        .format
        .print(&serde_json::json!({ "description": done }), done)
}
