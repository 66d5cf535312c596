//! The queues that a source needs and their arguments.

use std::time::Duration;

use lapin::types::{AMQPValue, FieldTable, ShortString};

use crate::protocol::queue_settings::{ConsumerMode, QueueSettings};
use crate::settings::QueueKind;

/// The delays of the delay queues. All messages of a queue have the same TTL, because RabbitMQ expires
/// messages only at the head of a queue.
pub(crate) const DELAYS: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
    Duration::from_secs(600),
];

/// A queue and the arguments to declare it with.
#[derive(Clone, Debug)]
pub(crate) struct QueueSpec {
    pub(crate) purpose: QueuePurpose,
    /// The setting from which the name of the queue comes.
    pub(crate) setting: &'static str,
    pub(crate) name: ShortString,
    pub(crate) arguments: FieldTable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueuePurpose {
    /// The source consumes it. It must have the declared arguments: a queue with others may lose
    /// messages, and AMQP does not report the arguments of a queue.
    Consumed,
    /// The source publishes dead letters or in-doubt messages to it.
    Destination,
    /// The source publishes delayed copies to it, and the broker dead-letters them to the consumed
    /// queue when their TTL ends.
    Delay,
}

/// The delivery limit of the dead-letter and in-doubt queues: operators read and requeue their
/// messages often, and RabbitMQ 4 drops a message after 20 redeliveries by default. The largest
/// 32-bit integer, because older releases have no value for "unlimited".
const UNLIMITED_DELIVERIES: i32 = i32::MAX;

/// The consumed queue, the dead-letter queue and the in-doubt queue.
pub(crate) fn named_queues(settings: &QueueSettings) -> [QueueSpec; 3] {
    let mut consumed = queue_arguments(settings.kind);
    if settings.kind == QueueKind::Quorum {
        // A message over the delivery limit (20 by default since RabbitMQ 4.0) must not be
        // dropped.
        dead_letter_to(&mut consumed, &settings.dead_letters, settings.kind);
    }
    if settings.consumers == ConsumerMode::SingleActive {
        consumed.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    }
    let mut destination_arguments = queue_arguments(settings.kind);
    if settings.kind == QueueKind::Quorum {
        destination_arguments.insert(
            "x-delivery-limit".into(),
            AMQPValue::LongInt(UNLIMITED_DELIVERIES),
        );
    }
    let destination = |setting, name: &ShortString| QueueSpec {
        purpose: QueuePurpose::Destination,
        setting,
        name: name.clone(),
        arguments: destination_arguments.clone(),
    };
    [
        QueueSpec {
            purpose: QueuePurpose::Consumed,
            setting: "queue",
            name: settings.queue.clone(),
            arguments: consumed,
        },
        destination("dead_letters", &settings.dead_letters),
        destination("in_doubt", &settings.in_doubt),
    ]
}

/// The delay queues, which dead-letter to the consumed queue.
pub(crate) fn delay_queues(settings: &QueueSettings) -> impl Iterator<Item = QueueSpec> {
    DELAYS.into_iter().map(|delay| {
        let mut arguments = queue_arguments(settings.kind);
        // Fits an `i32`: the longest delay is ten minutes.
        arguments.insert(
            "x-message-ttl".into(),
            AMQPValue::LongInt(delay.as_millis() as i32),
        );
        dead_letter_to(&mut arguments, &settings.queue, settings.kind);
        QueueSpec {
            purpose: QueuePurpose::Delay,
            setting: "queue",
            name: settings.delay_queue(delay),
            arguments,
        }
    })
}

fn queue_arguments(kind: QueueKind) -> FieldTable {
    let mut arguments = FieldTable::default();
    let queue_type = match kind {
        QueueKind::Quorum => "quorum",
        QueueKind::Classic => "classic",
    };
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString(queue_type.into()),
    );
    arguments
}

fn dead_letter_to(arguments: &mut FieldTable, routing_key: &ShortString, kind: QueueKind) {
    let mut set = |name: &str, value: &str| {
        arguments.insert(name.into(), AMQPValue::LongString(value.into()));
    };
    set("x-dead-letter-exchange", "");
    set("x-dead-letter-routing-key", routing_key.as_str());
    if kind == QueueKind::Quorum {
        // At-least-once dead-lettering, which requires this overflow behaviour.
        set("x-dead-letter-strategy", "at-least-once");
        set("x-overflow", "reject-publish");
    }
}

/// The delay of the delay queue for a copy that is to wait for `after`: the shortest of [`DELAYS`]
/// in `after..=2 * after`; otherwise the longest that is at most `after`, and another copy waits
/// for the remaining time; otherwise the shortest of all. So a message whose id another consumer
/// has claimed for a lease of at least one second is redelivered within two leases, and few
/// messages need more than two copies.
pub(crate) fn delay_queue_step(after: Duration) -> Duration {
    let [shortest, ..] = DELAYS;
    let fits = |delay: &Duration| *delay >= after && *delay <= after * 2;
    let shorter = DELAYS.into_iter().rfind(|delay| *delay <= after);
    DELAYS
        .into_iter()
        .find(fits)
        .or(shorter)
        .unwrap_or(shortest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RabbitMq;

    /// The arguments of each queue as text, without its type.
    fn arguments(kind: QueueKind, consumers: ConsumerMode) -> Vec<(String, Vec<String>)> {
        let source = RabbitMq::queue("q").queue_kind(kind);
        let source = match consumers {
            ConsumerMode::Competing => source,
            ConsumerMode::SingleActive => source.single_active_consumer(),
        };
        let settings = source.check().expect("settings");
        let queues = named_queues(&settings)
            .into_iter()
            .chain(delay_queues(&settings).take(1));
        let text = |value: &AMQPValue| match value {
            AMQPValue::LongString(value) => value.to_string(),
            AMQPValue::LongInt(value) => value.to_string(),
            value => format!("{value:?}"),
        };
        let described = queues.map(|queue| {
            let arguments = queue.arguments.inner().iter();
            let others = arguments.filter(|(name, _)| name.as_str() != "x-queue-type");
            let described = others.map(|(name, value)| format!("{name}={}", text(value)));
            (queue.name.to_string(), described.collect())
        });
        described.collect()
    }

    #[test]
    fn each_queue_has_the_arguments_with_which_it_loses_no_message() {
        let dead_lettered_to = |target: &str, others: &[&str]| {
            let target = format!("x-dead-letter-routing-key={target}");
            let common = ["x-dead-letter-exchange=", target.as_str()];
            let mut all = [&common[..], others].concat();
            all.sort();
            all.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let at_least_once = [
            "x-dead-letter-strategy=at-least-once",
            "x-overflow=reject-publish",
        ];
        let delay = ["x-message-ttl=1000"];
        let unlimited = vec!["x-delivery-limit=2147483647".to_owned()];
        let quorum_delay = dead_lettered_to("q", &[&at_least_once[..], &delay].concat());
        for (kind, consumers, expected) in [
            (
                QueueKind::Quorum,
                ConsumerMode::Competing,
                [
                    dead_lettered_to("q.dead-letters", &at_least_once),
                    unlimited.clone(),
                    unlimited,
                    quorum_delay,
                ],
            ),
            (
                QueueKind::Classic,
                ConsumerMode::SingleActive,
                [
                    vec!["x-single-active-consumer=Boolean(true)".to_owned()],
                    vec![],
                    vec![],
                    dead_lettered_to("q", &delay),
                ],
            ),
        ] {
            let names = ["q", "q.dead-letters", "q.in-doubt", "q.delay.1000"];
            let expected: Vec<_> = names.map(str::to_owned).into_iter().zip(expected).collect();
            assert_eq!(arguments(kind, consumers), expected);
        }
    }

    #[test]
    fn a_copy_waits_at_most_twice_its_delay_except_in_the_shortest_queue() {
        for (after, step) in [
            (1, 1_000),
            (999, 1_000),
            (1_001, 1_000),
            (2_499, 1_000),
            (2_500, 5_000),
            (6_400, 5_000),
            (10_000, 5_000),
            (14_999, 5_000),
            (15_000, 30_000),
            (59_999, 30_000),
            (60_000, 120_000),
            (299_999, 120_000),
            (600_000, 600_000),
            (9_000_000, 600_000),
        ] {
            assert_eq!(
                delay_queue_step(Duration::from_millis(after)),
                Duration::from_millis(step),
                "{after} ms"
            );
        }
        // A message waits for the remaining time of another holder's lease. The part of the lease
        // that is over and the wait together take at most two leases.
        for lease in [1, 3, 10, 30, 90, 400, 1_200].map(Duration::from_secs) {
            for remaining in (1..=100).map(|percent| lease * percent / 100) {
                let total = lease - remaining + delay_queue_step(remaining);
                assert!(total <= lease * 2, "{remaining:?} of {lease:?}");
            }
        }
    }
}
