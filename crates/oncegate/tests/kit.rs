//! The example of the book that tests a handler with the testkit.

use oncegate::{Context, Failure, FailureExt, Handler, Reconciled};

trait Carrier: Send + Sync + 'static {
    fn send(&self, order: &str);
    fn has_sent(&self, order: &str) -> bool;
}

/// Sends a parcel for each order.
struct Ship<C> {
    carrier: C,
}

impl<C: Carrier> Handler for Ship<C> {
    type Payload = String;

    async fn handle(&self, article: String, cx: &Context) -> Result<(), Failure> {
        if article.is_empty() {
            Err("nothing to send").reject()?;
        }
        self.carrier.send(cx.id());
        Ok(())
    }

    async fn reconcile(&self, _: String, cx: &Context) -> Result<Reconciled, Failure> {
        Ok(if self.carrier.has_sent(cx.id()) {
            Reconciled::Happened
        } else {
            Reconciled::DidNotHappen
        })
    }
}

#[cfg(test)]
mod tests {
    use oncegate::Guarantee;
    use oncegate_testkit::{Effects, Kit};

    use super::*;

    /// Counts the parcels of each order.
    impl Carrier for Effects {
        fn send(&self, order: &str) {
            self.happened(order);
        }

        fn has_sent(&self, order: &str) -> bool {
            self.count(order) > 0
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_order_sends_exactly_one_parcel() {
        let carrier = Effects::default();
        let kit = Kit::new(Ship {
            carrier: carrier.clone(),
        })
        .guarantee(Guarantee::AtMostOnce);
        let kit = kit
            .messages([("order-1", "tea"), ("order-2", "milk")])
            .duplicates(2);
        let report = kit
            .crash_before_handler(1)
            .crash_after_handler(1)
            .lost_replies(1)
            .run()
            .await;
        report
            .assert_none_twice(|id| carrier.count(id))
            .assert_none_lost(|id| carrier.count(id))
            .assert_none_rejected();
    }

    /// With effectively once the test fails, and the message says why.
    #[tokio::test(start_paused = true)]
    #[should_panic(
        expected = "`order-1` happened 2 times. Its runs: attempt 1 returned Ok, then attempt 2 returned Ok"
    )]
    async fn effectively_once_sends_a_second_parcel_after_a_crash() {
        let carrier = Effects::default();
        let kit = Kit::new(Ship {
            carrier: carrier.clone(),
        })
        .messages([("order-1", "tea")]);
        kit.crash_after_handler(1)
            .run()
            .await
            .assert_none_twice(|id| carrier.count(id));
    }
}
