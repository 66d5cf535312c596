//! The handler: charges each payment once.

use oncegate::{Context, Failure, FailureExt, Handler, Reconciled};

use crate::provider::Provider;
use crate::traffic::Payment;

pub(crate) struct Charge {
    pub(crate) provider: Provider,
}

impl Handler for Charge {
    type Payload = Payment;

    async fn handle(&self, payment: Payment, cx: &Context) -> Result<(), Failure> {
        let card = self.provider.card(&payment.card).await.retry()?; // nothing happened: run again
        self.provider
            .charge(card, payment.amount, cx.id(), cx.attempt())
            .await
            .in_doubt()?; // perhaps charged: reconcile before another run
        Ok(())
    }

    async fn reconcile(&self, _: Payment, cx: &Context) -> Result<Reconciled, Failure> {
        let found = self
            .provider
            .find_or_void(cx.id(), cx.attempt())
            .await
            .retry()?; // the provider now refuses this attempt
        Ok(found.map_or(Reconciled::DidNotHappen, |()| Reconciled::Happened))
    }
}
