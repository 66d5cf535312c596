//! Sources that make one mistake each, and the laws that detect it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{RetryDelays, SourceProperties};
use oncegate_core::{
    Delivery, Incoming, Limit, MemoryBroker, MemorySource, Message, Receipt, Settled, Source,
    SourceError, async_trait,
};
use oncegate_testkit::laws::run_source;
use oncegate_testkit::laws::source::{self as law, Destination, TestQueue};

use crate::memory_broker::Memory;

/// The mistake of a source that otherwise behaves like that of the memory broker, and delays releases
/// itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    DropsHeaders,
    DeliversTwice,
    IgnoresTheLimit,
    LosesDeliveriesOfADroppedReceive,
    LeavesTheLastUnsettled,
    RedeliversAccepted,
    AcceptsAtDelivery,
    AcceptsAllBefore,
    StopsSettling,
    ReleasesAtOnce,
    ReleasesWithOneDelay,
    LosesLongReleases,
    DropsTheFailureCount,
    DropsTheFailureHistory,
    HasOneDestination,
    RejectsOneInABatch,
    SettlesABatchAsItsFirst,
}

struct Queue {
    memory: Memory,
    mistake: Mistake,
}

struct Mistaken {
    inner: MemorySource,
    broker: MemoryBroker,
    mistake: Mistake,
    open: Vec<Receipt>,
    stopped: Option<Instant>,
    /// Releases, and when they are due.
    delayed: Vec<(Instant, Settled)>,
}

#[async_trait]
impl TestQueue for Queue {
    type Source = Mistaken;

    async fn source(&self) -> Mistaken {
        Mistaken {
            inner: self.memory.0.source(),
            broker: self.memory.0.clone(),
            mistake: self.mistake,
            open: Vec::new(),
            stopped: None,
            delayed: Vec::new(),
        }
    }

    async fn publish(&self, message: Message) {
        self.memory.publish(message).await;
    }

    async fn rejected_messages(&self, destination: Destination) -> Vec<Message> {
        self.memory.rejected_messages(destination).await
    }

    fn step_timeout(&self) -> Duration {
        Duration::from_secs(6)
    }
}

/// The same delivery, which only a test can make.
fn copy(receipt: &Receipt) -> Delivery {
    let Receipt {
        epoch,
        partition,
        position,
        ..
    } = *receipt;
    Delivery::new(
        Message::new(""),
        Receipt::new(epoch, position).with_partition(partition),
    )
}

#[async_trait]
impl Source for Mistaken {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        let limit = match self.mistake {
            Mistake::IgnoresTheLimit => Limit::new(1_000, 1 << 30),
            _ => limit,
        };
        let mut taken = Vec::new();
        loop {
            self.release_due().await?;
            let next_due = self.delayed.first().map(|(due, _)| *due);
            let receiving = self.inner.receive(limit, &mut taken);
            let Some(due) = next_due else {
                break receiving.await?;
            };
            if let Ok(received) = tokio::time::timeout_at(due.into(), receiving).await {
                break received?;
            }
        }
        if self.mistake == Mistake::LosesDeliveriesOfADroppedReceive {
            tokio::task::yield_now().await;
        }
        for incoming in taken {
            let Incoming::Delivery(mut delivery) = incoming else {
                continue;
            };
            match self.mistake {
                Mistake::DropsHeaders => delivery.message.headers = Message::default().headers,
                Mistake::DeliversTwice => self.broker.publish(delivery.message.clone()),
                Mistake::AcceptsAtDelivery => {
                    self.inner
                        .settle(&mut vec![Settled::new(
                            copy(&delivery.receipt),
                            law::accepted(),
                        )])
                        .await?;
                }
                _ => {}
            }
            self.open.push(copy(&delivery.receipt).receipt);
            into.push(Incoming::Delivery(delivery));
        }
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        let left = match self.mistake {
            Mistake::LeavesTheLastUnsettled => settled.pop(),
            _ => None,
        };
        let mut first = true;
        for mut it in std::mem::take(settled) {
            if self.stopped.is_some() && self.mistake == Mistake::StopsSettling {
                continue;
            }
            let before = self
                .open
                .iter()
                .take_while(|open| **open != it.delivery.receipt)
                .count();
            it.settlement = match (self.mistake, it.settlement) {
                (Mistake::RedeliversAccepted, Settlement::Accept(_)) => Settlement::Release {
                    after: Duration::ZERO,
                    failures: 0,
                },
                (Mistake::AcceptsAllBefore, accepted @ Settlement::Accept(_)) => {
                    let delivery = |receipt: &Receipt| Settled::new(copy(receipt), law::accepted());
                    let mut all: Vec<Settled> = self.open[..before].iter().map(delivery).collect();
                    self.inner.settle(&mut all).await?;
                    accepted
                }
                (Mistake::ReleasesAtOnce, Settlement::Release { failures, .. }) => {
                    Settlement::Release {
                        after: Duration::ZERO,
                        failures,
                    }
                }
                (Mistake::ReleasesWithOneDelay, Settlement::Release { failures, .. }) => {
                    Settlement::Release {
                        after: Duration::from_secs(2),
                        failures,
                    }
                }
                (Mistake::LosesLongReleases, Settlement::Release { after, .. })
                    if after > Duration::from_secs(3) =>
                {
                    law::accepted()
                }
                (Mistake::DropsTheFailureCount, Settlement::Release { after, .. }) => {
                    Settlement::Release { after, failures: 0 }
                }
                (Mistake::HasOneDestination, Settlement::Reject(_)) => {
                    Settlement::Reject(Reason::Refused)
                }
                (Mistake::RejectsOneInABatch, Settlement::Reject(_)) if !first => law::accepted(),
                (Mistake::SettlesABatchAsItsFirst, _) if !first => law::accepted(),
                (_, settlement) => settlement,
            };
            if self.mistake == Mistake::DropsTheFailureHistory {
                it.failure_history = None;
            }
            first = false;
            match it.settlement {
                Settlement::Release { after, .. } => {
                    self.delayed.push((Instant::now() + after, it))
                }
                _ => self.inner.settle(&mut vec![it]).await?,
            }
        }
        settled.extend(left);
        Ok(())
    }

    async fn stop(&mut self) {
        self.stopped = Some(Instant::now());
        self.inner.stop().await;
    }

    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        Box::new(self.inner).close(deadline).await
    }

    fn properties(&self) -> SourceProperties {
        let mut properties = SourceProperties::default();
        properties.retry_delays = RetryDelays::InSource {
            above: Duration::from_secs(1),
            max_kept: usize::MAX,
        };
        properties
    }
}

impl Mistaken {
    /// Releases the deliveries whose delay has ended.
    async fn release_due(&mut self) -> Result<(), SourceError> {
        self.delayed.sort_by_key(|(due, _)| *due);
        let is_delayed = |(due, _): &(Instant, Settled)| *due > Instant::now();
        let due = self.delayed.iter().position(is_delayed);
        let due = self.delayed.drain(..due.unwrap_or(self.delayed.len()));
        let mut settled = due.map(|(_, settled)| settled).collect();
        self.inner.settle(&mut settled).await
    }
}

/// Whether a law fails with a source that makes this mistake.
macro_rules! breaks {
    ($mistake:ident, $law:ident) => {{
        let queue = async || Queue {
            memory: Memory(MemoryBroker::new("mistaken")),
            mistake: Mistake::$mistake,
        };
        catch_unwind(AssertUnwindSafe(|| run_source(queue, law::$law))).is_err()
    }};
}

mistakes! {
    headers_that_are_dropped: DropsHeaders breaks messages_are_delivered_unchanged_and_in_order;
    a_second_delivery_before_the_settlement: DeliversTwice breaks an_unsettled_delivery_is_not_delivered_again;
    a_limit_that_is_ignored: IgnoresTheLimit breaks receive_respects_its_limit, receive_with_an_empty_limit_delivers_nothing;
    deliveries_that_a_dropped_receive_loses: LosesDeliveriesOfADroppedReceive breaks a_dropped_receive_loses_nothing;
    a_settlement_that_stays_in_the_list: LeavesTheLastUnsettled breaks settling_empties_the_list;
    an_accepted_delivery_that_is_redelivered: RedeliversAccepted breaks an_accepted_delivery_is_not_redelivered, a_stopped_source_still_settles;
    an_acceptance_at_delivery: AcceptsAtDelivery breaks unsettled_deliveries_are_redelivered_after_a_close, unsettled_deliveries_are_redelivered_after_a_crash;
    an_acceptance_of_all_earlier_deliveries: AcceptsAllBefore breaks accepting_a_later_delivery_does_not_accept_an_earlier_one;
    a_stop_that_ends_settling: StopsSettling breaks a_stopped_source_still_settles;
    a_delay_that_is_ignored: ReleasesAtOnce breaks a_release_is_redelivered_after_its_delay_and_blocks_no_other;
    one_delay_for_all: ReleasesWithOneDelay breaks releases_are_redelivered_in_the_order_of_their_delays;
    a_long_release_that_is_lost: LosesLongReleases breaks a_release_with_a_long_delay_survives_a_close;
    a_failure_count_that_is_dropped: DropsTheFailureCount breaks repeated_releases_keep_the_failure_count;
    a_dead_letter_without_failure_history: DropsTheFailureHistory breaks a_rejected_message_is_a_dead_letter_with_its_failure_history;
    in_doubt_messages_in_the_dead_letters: HasOneDestination breaks in_doubt_messages_have_a_destination_of_their_own;
    one_dead_letter_for_a_batch: RejectsOneInABatch breaks many_rejections_at_once_all_arrive;
    a_batch_that_is_settled_as_one: SettlesABatchAsItsFirst breaks settlements_in_one_batch_are_independent;
}
