//! The handler with an inbox in SQLite or PostgreSQL: a charge is a row of the database that records
//! the message, and a run that fails after it is rolled back.

use oncegate::prelude::*;
use oncegate::{SqliteInbox, SqliteTransaction, TransactionalHandler};

use crate::charge::Charge;
use crate::traffic::Payment;
#[cfg(feature = "postgres")]
use {oncegate_postgres::*, sqlx::Executor};

impl TransactionalHandler<SqliteInbox> for Charge {
    type Payload = Payment;

    async fn handle(
        &self,
        payment: Payment,
        transaction: &mut SqliteTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let charge = (cx.id().to_owned(), payment.amount, cx.attempt());
        let insert = "INSERT INTO charges VALUES (?1, ?2, ?3)";
        let charged = transaction.call(move |sqlite| sqlite.execute(insert, charge));
        charged.await.retry()?;
        self.provider.card(&payment.card).await.map(drop).retry() // an error rolls the charge back
    }
}

#[cfg(feature = "postgres")]
impl TransactionalHandler<PostgresInbox> for Charge {
    type Payload = Payment;

    async fn handle(
        &self,
        payment: Payment,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let insert = sqlx::query("INSERT INTO charges VALUES ($1, $2)").bind(cx.id());
        let insert = insert.bind(i64::from(payment.amount));
        insert.execute(transaction.connection()).await.retry()?;
        self.provider.card(&payment.card).await.map(drop).retry() // an error rolls the charge back
    }
}

/// The database of the inbox, with the schema of the run and its charges.
#[cfg(feature = "postgres")]
pub(crate) async fn ledger(config: &oncegate_config::Config) -> crate::Result<sqlx::PgPool> {
    let [url, name] = ["store.url", "store.scope"].map(|key| config.text(key).unwrap_or_default());
    let pool = sqlx::PgPool::connect(url).await?;
    let create = include_str!("../inbox.sql").replace("NAME", name);
    pool.execute(sqlx::AssertSqlSafe(create)).await?;
    Ok(pool)
}
