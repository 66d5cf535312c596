//! The JSON of `/status`.

use std::time::Duration;

use oncegate::status::{InFlightDelivery, LastStoreError, StoreSnapshot, StoreState};
use oncegate::{ConsumerStatus, Position, Readiness};
use serde::Serialize;

use crate::last_errors::{LastErrors, LogLine, MAX_LINE_BYTES, truncation_point};

/// The page `/status`.
#[derive(Serialize)]
pub(crate) struct StatusPage {
    pub(crate) ready: bool,
    pub(crate) consumers: Vec<ConsumerView>,
    pub(crate) sources: Vec<SourceView>,
    pub(crate) last_errors: Vec<LastErrorView>,
}

/// A consumer that was added to the admin port.
#[derive(Clone, Debug)]
pub(crate) struct WatchedConsumer {
    pub(crate) name: String,
    pub(crate) readiness: Readiness,
    pub(crate) status: ConsumerStatus,
}

#[derive(Serialize)]
pub(crate) struct ConsumerView {
    name: String,
    ready: bool,
    in_flight: usize,
    queued: usize,
    isolated: usize,
    store: Option<StoreView>,
    oldest: Vec<OldestDelivery>,
}

/// The store as a consumer last observed it.
#[derive(Serialize)]
struct StoreView {
    name: String,
    #[serde(flatten)]
    state: StoreStateView,
    last_error: Option<StoreErrorView>,
}

/// The state of a store, with the seconds since its last answer or since it became unavailable.
#[derive(Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
enum StoreStateView {
    /// No request was sent yet.
    Unused,
    Available {
        last_answer_seconds: f64,
    },
    Unavailable {
        unavailable_seconds: f64,
    },
}

#[derive(Serialize)]
struct StoreErrorView {
    seconds_ago: f64,
    text: String,
}

#[derive(Serialize)]
struct OldestDelivery {
    id: Option<String>,
    from: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<i64>,
    seconds: f64,
    state: &'static str,
    attempt: u32,
    crashes: u32,
}

/// A source that was added to the admin port.
#[derive(Clone, Debug)]
pub(crate) enum WatchedSource {
    #[cfg(feature = "kafka")]
    Kafka(String, oncegate::KafkaStatus),
    #[cfg(feature = "rabbitmq")]
    RabbitMq(String, oncegate::RabbitMqStatus),
}

#[derive(Serialize)]
#[serde(tag = "broker", rename_all = "lowercase")]
pub(crate) enum SourceView {
    #[cfg(feature = "kafka")]
    Kafka {
        name: String,
        clients_replaced: u64,
        messages_expired: u64,
        partitions: Vec<PartitionView>,
    },
    #[cfg(feature = "rabbitmq")]
    RabbitMq {
        name: String,
        unacked: u64,
        delivered: u64,
        redelivered: u64,
        channels_lost: u64,
        unavailable_seconds: f64,
        stale_settlements: u64,
        copies: u64,
        copy_retries: u64,
        blocked_seconds: f64,
    },
}

#[cfg(feature = "kafka")]
#[derive(Serialize)]
pub(crate) struct PartitionView {
    topic: String,
    partition: i32,
    committable: Option<i64>,
    log_end: Option<i64>,
    lag: Option<u64>,
    handed_out: usize,
    waits_for: Option<BlockerView>,
}

#[cfg(feature = "kafka")]
#[derive(Serialize)]
struct BlockerView {
    offset: i64,
    seconds: f64,
    holder: &'static str,
}

#[derive(Serialize)]
pub(crate) struct LastErrorView {
    seconds_ago: f64,
    level: &'static str,
    by: &'static str,
    text: String,
}

/// Seconds, rounded to milliseconds.
fn seconds(duration: Duration) -> f64 {
    duration.as_millis() as f64 / 1000.0
}

impl WatchedConsumer {
    pub(crate) fn view(&self) -> ConsumerView {
        let snapshot = self.status.snapshot();
        ConsumerView {
            name: self.name.clone(),
            ready: self.readiness.is_ready(),
            in_flight: snapshot.in_flight,
            queued: snapshot.queued,
            isolated: snapshot.isolated,
            store: snapshot.store.map(StoreView::of),
            oldest: snapshot.oldest.iter().map(OldestDelivery::of).collect(),
        }
    }
}

impl StoreView {
    fn of(snapshot: StoreSnapshot) -> Self {
        let state = match snapshot.state {
            StoreState::Available { last_answer } => StoreStateView::Available {
                last_answer_seconds: seconds(last_answer),
            },
            StoreState::Unavailable { elapsed } => StoreStateView::Unavailable {
                unavailable_seconds: seconds(elapsed),
            },
            _ => StoreStateView::Unused,
        };
        let to_view = |LastStoreError {
                           elapsed, mut text, ..
                       }| {
            text.truncate(truncation_point(&text, MAX_LINE_BYTES));
            StoreErrorView {
                seconds_ago: seconds(elapsed),
                text,
            }
        };
        Self {
            name: snapshot.name,
            state,
            last_error: snapshot.last_error.map(to_view),
        }
    }
}

impl OldestDelivery {
    fn of(delivery: &InFlightDelivery) -> Self {
        let (partition, offset) = match delivery.origin.position {
            Position::Offset { partition, offset } => (Some(partition), Some(offset)),
            _ => (None, None),
        };
        Self {
            id: delivery.id.as_ref().map(ToString::to_string),
            from: delivery.origin.name.to_string(),
            partition,
            offset,
            seconds: seconds(delivery.elapsed),
            state: delivery.state.as_str(),
            attempt: delivery.attempt,
            crashes: delivery.crashes,
        }
    }
}

impl WatchedSource {
    pub(crate) fn view(&self) -> SourceView {
        match *self {
            #[cfg(feature = "kafka")]
            Self::Kafka(ref name, ref status) => SourceView::Kafka {
                name: name.clone(),
                clients_replaced: status.clients_replaced(),
                messages_expired: status.messages_expired(),
                partitions: status.partitions().iter().map(PartitionView::of).collect(),
            },
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(ref name, ref status) => {
                let snapshot = status.snapshot();
                SourceView::RabbitMq {
                    name: name.clone(),
                    unacked: snapshot.unacked,
                    delivered: snapshot.delivered,
                    redelivered: snapshot.redelivered,
                    channels_lost: snapshot.channels_lost,
                    unavailable_seconds: seconds(snapshot.unavailable),
                    stale_settlements: snapshot.stale_settlements,
                    copies: snapshot.copies,
                    copy_retries: snapshot.copy_retries,
                    blocked_seconds: seconds(snapshot.blocked),
                }
            }
        }
    }
}

#[cfg(feature = "kafka")]
impl PartitionView {
    fn of(status: &oncegate::status::PartitionStatus) -> Self {
        use oncegate::status::{BlockedBy, Blocker};
        let waits_for = status.blocker.map(
            |Blocker {
                 offset,
                 blocked_for,
                 blocked_by,
                 ..
             }| BlockerView {
                offset,
                seconds: seconds(blocked_for),
                holder: match blocked_by {
                    BlockedBy::Queue => "queue",
                    BlockedBy::Consumer => "consumer",
                    BlockedBy::DeadLetter => "dead-letter",
                    _ => "unknown",
                },
            },
        );
        Self {
            topic: status.topic.to_string(),
            partition: status.partition,
            committable: status.committable,
            log_end: status.log_end,
            lag: status.lag,
            handed_out: status.handed_out,
            waits_for,
        }
    }
}

/// The last warnings and errors, newest first.
pub(crate) fn log_lines(errors: &LastErrors) -> Vec<LastErrorView> {
    let to_view = |LogLine {
                       at,
                       level,
                       target,
                       text,
                   }| LastErrorView {
        seconds_ago: seconds(at.elapsed()),
        level,
        by: target,
        text,
    };
    errors.newest_first().into_iter().map(to_view).collect()
}
