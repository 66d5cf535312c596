//! What `/status` shows.

use std::time::Duration;

use oncegate::{
    ConsumerStatus, InFlightDelivery, Position, Readiness, StoreSnapshot, StoreState, StoreTrouble,
};
use serde::Serialize;

use crate::last_errors::{LONGEST, LastErrors, Said, boundary};

/// The whole page.
#[derive(Serialize)]
pub(crate) struct Page {
    pub(crate) ready: bool,
    pub(crate) consumers: Vec<Consumer>,
    pub(crate) sources: Vec<Source>,
    pub(crate) last_errors: Vec<LastError>,
}

/// A consumer, as it was given to the admin port.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    pub(crate) name: String,
    pub(crate) readiness: Readiness,
    pub(crate) status: ConsumerStatus,
}

#[derive(Serialize)]
pub(crate) struct Consumer {
    name: String,
    ready: bool,
    in_flight: usize,
    waiting: usize,
    store: Option<Store>,
    oldest: Vec<Oldest>,
}

/// What a consumer has seen of its store.
#[derive(Serialize)]
struct Store {
    name: String,
    #[serde(flatten)]
    state: State,
    last_error: Option<Trouble>,
}

/// Each with seconds: since its last answer, or since it gave none.
#[derive(Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
enum State {
    Unasked,
    Answers { last_answer_seconds: f64 },
    Away { away_seconds: f64 },
}

#[derive(Serialize)]
struct Trouble {
    seconds_ago: f64,
    text: String,
}

#[derive(Serialize)]
struct Oldest {
    id: Option<String>,
    from: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<i64>,
    seconds: f64,
    doing: &'static str,
    attempt: u32,
    crashes: u32,
}

/// A source, as it was given to the admin port.
#[derive(Clone, Debug)]
pub(crate) enum Reads {
    #[cfg(feature = "kafka")]
    Kafka(String, oncegate::KafkaStatus),
    #[cfg(feature = "rabbitmq")]
    RabbitMq(String, oncegate::RabbitMqStatus),
}

#[derive(Serialize)]
#[serde(tag = "broker", rename_all = "lowercase")]
pub(crate) enum Source {
    #[cfg(feature = "kafka")]
    Kafka {
        name: String,
        clients_replaced: u64,
        messages_missed: u64,
        partitions: Vec<Partition>,
    },
    #[cfg(feature = "rabbitmq")]
    RabbitMq {
        name: String,
        unacked: u64,
        delivered: u64,
        redelivered: u64,
        reconnects: u64,
        away_seconds: f64,
        stale_receipts: u64,
        copies: u64,
        copy_retries: u64,
        blocked_seconds: f64,
    },
}

#[cfg(feature = "kafka")]
#[derive(Serialize)]
pub(crate) struct Partition {
    topic: String,
    partition: i32,
    committable: Option<i64>,
    log_end: Option<i64>,
    lag: Option<u64>,
    handed_out: usize,
    delayed: usize,
    waits_for: Option<WaitsFor>,
}

#[cfg(feature = "kafka")]
#[derive(Serialize)]
struct WaitsFor {
    offset: i64,
    seconds: f64,
    holder: &'static str,
}

#[derive(Serialize)]
pub(crate) struct LastError {
    seconds_ago: f64,
    level: &'static str,
    by: &'static str,
    text: String,
}

/// Of a person's interest: to the millisecond.
fn seconds(duration: Duration) -> f64 {
    duration.as_millis() as f64 / 1000.0
}

impl Watched {
    pub(crate) fn now(&self) -> Consumer {
        let snapshot = self.status.snapshot();
        Consumer {
            name: self.name.clone(),
            ready: self.readiness.is_ready(),
            in_flight: snapshot.in_flight,
            waiting: snapshot.waiting,
            store: snapshot.store.map(Store::of),
            oldest: snapshot.oldest.iter().map(Oldest::of).collect(),
        }
    }
}

impl Store {
    fn of(snapshot: StoreSnapshot) -> Self {
        let state = match snapshot.state {
            StoreState::Answers { last } => State::Answers {
                last_answer_seconds: seconds(last),
            },
            StoreState::Away { since } => State::Away {
                away_seconds: seconds(since),
            },
            _ => State::Unasked,
        };
        let trouble = |StoreTrouble {
                           since, mut text, ..
                       }| {
            text.truncate(boundary(&text, LONGEST));
            Trouble {
                seconds_ago: seconds(since),
                text,
            }
        };
        Self {
            name: snapshot.name,
            state,
            last_error: snapshot.last_error.map(trouble),
        }
    }
}

impl Oldest {
    fn of(held: &InFlightDelivery) -> Self {
        let (partition, offset) = match held.origin.position {
            Position::Offset { partition, offset } => (Some(partition), Some(offset)),
            Position::Queue => (None, None),
        };
        Self {
            id: held.id.as_ref().map(ToString::to_string),
            from: held.origin.name.to_string(),
            partition,
            offset,
            seconds: seconds(held.since),
            doing: held.doing.as_str(),
            attempt: held.attempt,
            crashes: held.crashes,
        }
    }
}

impl Reads {
    pub(crate) fn now(&self) -> Source {
        match *self {
            #[cfg(feature = "kafka")]
            Self::Kafka(ref name, ref status) => Source::Kafka {
                name: name.clone(),
                clients_replaced: status.clients_replaced(),
                messages_missed: status.messages_expired(),
                partitions: status.partitions().iter().map(Partition::of).collect(),
            },
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(ref name, ref status) => {
                let now = status.snapshot();
                Source::RabbitMq {
                    name: name.clone(),
                    unacked: now.unacked,
                    delivered: now.delivered,
                    redelivered: now.redelivered,
                    reconnects: now.reconnects,
                    away_seconds: seconds(now.away),
                    stale_receipts: now.stale_receipts,
                    copies: now.copies,
                    copy_retries: now.copy_retries,
                    blocked_seconds: seconds(now.blocked),
                }
            }
        }
    }
}

#[cfg(feature = "kafka")]
impl Partition {
    fn of(status: &oncegate::PartitionStatus) -> Self {
        use oncegate::{BlockedBy, Blocker};
        let waits_for = status.blocker.map(
            |Blocker {
                 offset,
                 since,
                 blocked_by,
                 ..
             }| WaitsFor {
                offset,
                seconds: seconds(since),
                holder: match holder {
                    BlockedBy::Queue => "queue",
                    BlockedBy::Consumer => "consumer",
                    BlockedBy::Delay { .. } => "delay",
                    _ => "elsewhere",
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
            delayed: status.delayed,
            waits_for,
        }
    }
}

pub(crate) fn said(errors: &LastErrors) -> Vec<LastError> {
    let one = |Said {
                   at,
                   level,
                   by,
                   text,
               }| LastError {
        seconds_ago: seconds(at.elapsed()),
        level,
        by,
        text,
    };
    errors.newest_first().into_iter().map(one).collect()
}
