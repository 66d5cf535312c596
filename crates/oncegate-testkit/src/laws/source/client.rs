//! Operations on a source, with assertions, for the laws.

use std::time::{Duration, Instant};

use oncegate_core::internal::lifecycle::{
    self, Action, ClaimTries, Event, Freshness, History, Policy, Stage,
};
use oncegate_core::lifecycle::Settlement;
use oncegate_core::marker::Verdict;
use oncegate_core::source::RetryDelays;
use oncegate_core::{
    Delivery, FailureHistory, Guarantee, Incoming, Limit, Message, Outage, Settled, Source,
};

use super::{Destination, TestQueue};

/// A limit that no law reaches.
pub(super) const ALL: Limit = Limit::new(10_000, 64 << 20);

/// A connected source, and the time limit for one step.
pub(super) struct SourceClient<S>(pub(super) Box<S>, Duration);

impl<S: Source + 'static> SourceClient<S> {
    pub(super) async fn of(queue: &impl TestQueue<Source = S>) -> Self {
        Self(Box::new(queue.source().await), queue.step_timeout())
    }

    /// The delay of a release; zero if the source leaves delays to the consumer.
    pub(super) fn delay(&self, millis: u64) -> Duration {
        match self.0.properties().retry_delays {
            RetryDelays::InSource { .. } => Duration::from_millis(millis),
            _ => Duration::ZERO,
        }
    }

    /// Receives exactly this many deliveries.
    pub(super) async fn receive(&mut self, count: usize) -> Vec<Delivery> {
        let (mut all, step_timeout) = (Vec::new(), self.1);
        let receiving = async {
            while all.len() < count {
                let mut incoming = Vec::new();
                self.0
                    .receive(Limit::new(count - all.len(), ALL.bytes), &mut incoming)
                    .await
                    .expect("receive succeeds");
                all.extend(incoming.into_iter().filter_map(delivery));
            }
        };
        let in_time = tokio::time::timeout(step_timeout, receiving).await.is_ok();
        assert!(
            in_time,
            "{} of {count} deliveries within {step_timeout:?}: {:?}",
            all.len(),
            bodies(&all)
        );
        all
    }

    pub(super) async fn receive_one(&mut self) -> Delivery {
        self.receive(1).await.remove(0)
    }

    /// Receives for `time` and panics if the source delivers a message.
    pub(super) async fn expect_no_delivery(&mut self, time: Duration, why: &str) {
        let until = Instant::now() + time;
        while let Some(remaining) = until.checked_duration_since(Instant::now()) {
            let mut incoming = Vec::new();
            let _ = tokio::time::timeout(remaining, self.0.receive(ALL, &mut incoming)).await;
            let received: Vec<_> = incoming.into_iter().filter_map(delivery).collect();
            assert!(
                received.is_empty(),
                "{why}, but it delivered {:?}",
                bodies(&received)
            );
        }
    }

    pub(super) async fn settle(
        &mut self,
        settled: impl IntoIterator<Item = (Delivery, Settlement)>,
    ) {
        let mut settled = settled
            .into_iter()
            .map(|(delivery, settlement)| Settled::new(delivery, settlement))
            .collect();
        self.0.settle(&mut settled).await.expect("settle succeeds");
        assert!(settled.is_empty(), "settling empties the list");
    }

    pub(super) async fn settle_with(
        &mut self,
        delivery: Delivery,
        settlement: Settlement,
        failure_history: FailureHistory,
    ) {
        let mut settled =
            vec![Settled::new(delivery, settlement).with_failure_history(failure_history)];
        self.0.settle(&mut settled).await.expect("settle succeeds");
    }

    pub(super) async fn accept(&mut self, deliveries: impl IntoIterator<Item = Delivery>) {
        self.settle(
            deliveries
                .into_iter()
                .map(|delivery| (delivery, accepted())),
        )
        .await;
    }

    pub(super) async fn close(self) {
        self.0
            .close(Instant::now() + self.1)
            .await
            .expect("close carries out every settlement");
    }

    /// Closes the source while deliveries are unsettled, which is not an error.
    pub(super) async fn close_unsettled(mut self) {
        self.0.stop().await;
        self.close().await;
    }
}

pub(super) fn delivery(incoming: Incoming) -> Option<Delivery> {
    match incoming {
        Incoming::Delivery(delivery) => Some(delivery),
        Incoming::Revoked(_) => None,
    }
}

pub(super) fn body(delivery: &Delivery) -> String {
    String::from_utf8_lossy(&delivery.message.body).into_owned()
}

pub(super) fn bodies(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(body).collect()
}

/// Publishes messages with the bodies `0`, `1`, …
pub(super) async fn publish_numbers(queue: &impl TestQueue, count: usize) {
    for number in numbers(0..count) {
        queue.publish(Message::new(number)).await;
    }
}

pub(super) fn numbers(range: impl IntoIterator<Item = usize>) -> Vec<String> {
    range.into_iter().map(|number| number.to_string()).collect()
}

/// Waits until a destination has this many messages and returns them.
pub(super) async fn rejected_messages(
    queue: &impl TestQueue,
    destination: Destination,
    count: usize,
) -> Vec<Message> {
    let until = Instant::now() + queue.step_timeout();
    loop {
        let found = queue.rejected_messages(destination).await;
        if found.len() >= count {
            assert_eq!(found.len(), count, "{destination:?}");
            return found;
        }
        assert!(
            Instant::now() < until,
            "{} of {count} messages in {destination:?}",
            found.len()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns a settlement that accepts, for tests of a source. Only the delivery lifecycle can make
/// one, so this function takes the one that `transition` returns for a duplicate.
pub fn accepted() -> Settlement {
    let policy = Policy {
        guarantee: Guarantee::EffectivelyOnce,
        max_attempts: 5,
        max_crashes: 10,
        max_inline_retries: 0,
        max_reconciles: 1,
        max_claim_retries: 1,
        backoff: Duration::from_millis(1),
        longest_backoff: Duration::from_millis(1),
        outage: Outage::Hold,
    };
    let stage = Stage::Claiming(
        History {
            failures: 0,
            freshness: Freshness::Fresh,
        },
        ClaimTries(0),
    );
    match lifecycle::transition(stage, Event::Answer(Verdict::Duplicate), &policy) {
        (_, Action::Settle(settlement)) => settlement,
        other => unreachable!("a duplicate is accepted: {other:?}"),
    }
}

pub(super) fn released(after: Duration, failures: u32) -> Settlement {
    Settlement::Release { after, failures }
}
