//! The handler with an inbox: a charge is a row of the database that records the message, and a run
//! that fails after it is rolled back.

use oncegate::prelude::*;
use oncegate::{SqliteInbox, SqliteTransaction, TransactionalHandler};

use crate::charge::Charge;
use crate::traffic::Payment;

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
