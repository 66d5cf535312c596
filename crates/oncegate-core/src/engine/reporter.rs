//! Updates metrics and status, and logs events of deliveries.

use std::time::{Duration, Instant};

use super::entry::{InFlightEntry, Phase, has_running_task};
use super::intake::Intake;
use super::logs::Logs;
use super::suspects::Suspects;
use crate::boot_time::BootTime;
use crate::clock::now;
use crate::consumer_metrics::{ConsumerMetrics, GaugeValues};
use crate::context::SharedDelivery;
use crate::lifecycle::{Event, Freshness, Outcome, Reason, Settlement, Stage};
use crate::marker::Guarantee;
use crate::message::Message;
use crate::outcome::Outcomes;
use crate::run::RunResult;
use crate::settings::InboxUse;
use crate::source::Settled;
use crate::spans;
use crate::status::{ConsumerStatus, DeliveryState, InFlightDelivery, PUBLISH_INTERVAL};
use crate::store_health::StoreHealth;

/// Updates metrics and status, and logs events. Nothing that the engine decides depends on it.
pub(super) struct Reporter {
    pub(super) outcomes: Outcomes,
    pub(super) metrics: ConsumerMetrics,
    pub(super) logs: Logs,
    status: Option<ConsumerStatus>,
    /// When to publish the next status.
    next_status_at: Instant,
}

impl Reporter {
    pub(super) fn new(status: Option<ConsumerStatus>, inbox: InboxUse) -> Self {
        Self {
            outcomes: Outcomes::new(),
            metrics: ConsumerMetrics::new(),
            logs: Logs::new(inbox),
            status,
            next_status_at: now(),
        }
    }

    /// Counts a received message that is too old, or whose age is unknown (`None`).
    #[inline]
    pub(super) fn received(
        &mut self,
        message: &Message,
        age: Option<Duration>,
        freshness: Freshness,
        guarantee: Guarantee,
    ) {
        match (age, freshness) {
            (None, _) => {
                self.outcomes.unknown_age();
                if guarantee == Guarantee::AtMostOnce {
                    self.logs.unknown_age(message);
                }
            }
            (Some(_), Freshness::TooOld) => self.outcomes.too_old(),
            (Some(_), Freshness::Fresh) => {}
        }
    }

    /// Counts and logs an event of a delivery, before the delivery processes it.
    #[inline]
    pub(super) fn event(&mut self, entry: &InFlightEntry, event: Event) {
        self.outcomes.count_event(event);
        if event == Event::LeaseOver && has_running_task(entry.stage()) {
            self.logs.lease_lost(entry);
        }
        if event == Event::StopNow {
            self.logs.not_recorded(entry);
        }
    }

    /// Records the duration of a run, and logs its failure.
    #[inline]
    pub(super) fn run_ended(&mut self, entry: &InFlightEntry, result: &RunResult, took: Duration) {
        self.metrics.handled(took);
        if !matches!(result.event, Event::Returned(Outcome::Done)) {
            self.logs.run_failed(entry, result);
        }
    }

    /// Records the settlement of a delivery, `after` this time since its receipt. `destination`
    /// returns the name of the topic or queue to which a message is rejected.
    #[inline]
    pub(super) fn settled(
        &mut self,
        settled: &Settled,
        shared: &SharedDelivery,
        after: Duration,
        destination: impl FnOnce(&Reason) -> Option<String>,
    ) {
        self.metrics.settled(after);
        if let Settlement::Reject(reason) = &settled.settlement {
            self.logs.rejected(settled, destination(reason));
        }
        let span = spans::if_enabled(|| {
            let (id, attempt) = (shared.id.as_ref(), shared.attempt);
            spans::settle(&settled.delivery, id, attempt, &settled.settlement)
        });
        let count = || self.outcomes.settled(&settled.settlement);
        match span {
            Some(span) => span.in_scope(count),
            None => count(),
        }
    }

    /// Updates the state of the store in the status.
    pub(super) fn store_health(&self, update: impl FnOnce(&mut StoreHealth)) {
        if let Some(status) = &self.status {
            status.update_store(update);
        }
    }

    /// When [`observe`](Self::observe) has to be called at the latest.
    pub(super) fn next_report_at(&mut self) -> Option<Instant> {
        let next_status = self.status.is_some().then_some(self.next_status_at);
        next_status.into_iter().chain(self.logs.report_at()).min()
    }

    /// Updates the gauges, and the status if it is due. Logs a full queue and suppressed lines.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        intake: &Intake,
        suspects: &Suspects,
        unavailable_stores: usize,
    ) {
        if let Some((count, bytes)) = intake.full_queue() {
            self.logs.queue_full(count, bytes);
        }
        self.logs.log_suppressed(now);
        let (in_flight, queued) = (intake.in_flight(), intake.count(Phase::Queued));
        let isolated = suspects.count(|slot| {
            let entry = intake.at(slot);
            entry.is_some_and(|entry| matches!(entry.stage(), Stage::New(_)))
        });
        self.metrics.set_gauges(GaugeValues {
            in_flight,
            waiting: queued,
            awaiting_claim: intake.count(Phase::AwaitingClaim),
            isolated,
            unavailable_stores,
        });
        let Some(status) = &self.status else { return };
        if now < self.next_status_at {
            return;
        }
        self.next_status_at = now + PUBLISH_INTERVAL;
        let all = intake.slots().into_iter();
        let boot = BootTime::now();
        let all = all.filter_map(|slot| {
            let age = intake.at(slot)?.arrived.elapsed_at(boot);
            Some((now.checked_sub(age)?, slot))
        });
        status.publish(in_flight, queued, isolated, all.collect(), |slot| {
            let entry = intake.at(slot)?;
            Some(InFlightDelivery {
                id: entry.id().cloned(),
                origin: entry.in_flight.message().origin.clone(),
                elapsed: Duration::ZERO,
                state: DeliveryState::of(entry.stage()),
                attempt: entry.attempt(),
                crashes: entry.in_flight.driver().attempts.crashes,
            })
        });
    }
}
