//! The steps of the delivery lifecycle at which a process aborts.

use super::consumer::TestedStore;
use super::group::Combination;
use crate::check::TestedGuarantee;
use crate::worker::Broker;

/// A crash point in oncegate or in the handler.
#[derive(Debug)]
pub struct CrashStep {
    /// The name of the crash point.
    pub name: &'static str,
    /// The description in the table.
    pub text: &'static str,
    /// For each of three runs, at which pass of the point the process aborts; then again from the
    /// first.
    pub(crate) passes: [u32; 3],
    /// What makes the consumer reach the point.
    pub(crate) trigger: Trigger,
    /// The combinations in which it exists.
    only: Only,
}

/// What makes a consumer reach a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trigger {
    /// Messages.
    Work,
    /// SIGTERM while handlers run.
    Drain,
    /// SIGTERM while failed messages wait in the consumer, which moves them to a delay queue.
    DrainWhileSomethingWaits,
    /// The same, without delay queues.
    DrainWhileSomethingIsHeld,
    /// The topic is deleted and recreated after all messages are settled.
    TopicRecreated,
    /// Rejections through the dead-letter exchange of the queue.
    RejectedByTheQueue,
}

/// The combinations in which a step exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Only {
    Everywhere,
    MarkerStore,
    AtMostOnce,
    NotBare,
    Kafka,
    RabbitMq,
    Sqlite,
    Inbox,
    InboxBatches,
    /// With an inbox, by messages or batches.
    AnyInbox,
}

const SEVERAL_PASSES: [u32; 3] = [1, 2, 4];
const FIRST_PASS: [u32; 3] = [1, 1, 1];

const fn step(
    name: &'static str,
    text: &'static str,
    passes: [u32; 3],
    trigger: Trigger,
    only: Only,
) -> CrashStep {
    CrashStep {
        name,
        text,
        passes,
        trigger,
        only,
    }
}

/// All steps, in the order of the delivery lifecycle.
pub const STEPS: [CrashStep; 77] = [
    step(
        "delivery",
        "a delivery was received, and nothing was sent to the store",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "claim.before",
        "before a claim is sent",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "claim.after",
        "the store applied a claim, and its reply was not read",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "handler.before",
        "the claim is granted, before the handler starts",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "effect.before",
        "in the handler, before its effect",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "effect.after",
        "in the handler, after its effect",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "handler.after",
        "after the handler returned",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "renew.before",
        "before a renewal is sent",
        FIRST_PASS,
        Trigger::Work,
        Only::NotBare,
    ),
    step(
        "renew.after",
        "the store applied a renewal, and its reply was not read",
        FIRST_PASS,
        Trigger::Work,
        Only::NotBare,
    ),
    step(
        "complete.before",
        "before a completion is sent",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "complete.after",
        "the store applied a completion, and its reply was not read",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "clear.before",
        "before an id is cleared for another attempt",
        FIRST_PASS,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "clear.after",
        "the store cleared an id, and its reply was not read",
        FIRST_PASS,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "reject.before",
        "before an id is recorded as rejected",
        FIRST_PASS,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "reject.after",
        "the store recorded a rejection, and its reply was not read",
        FIRST_PASS,
        Trigger::Work,
        Only::MarkerStore,
    ),
    step(
        "doubt.before",
        "before an id is recorded as in doubt",
        FIRST_PASS,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "doubt.after",
        "the store recorded a doubt, and its reply was not read",
        FIRST_PASS,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.before",
        "before `reconcile`",
        FIRST_PASS,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.found",
        "in `reconcile`, after the sink replied",
        FIRST_PASS,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.after",
        "after `reconcile` returned",
        FIRST_PASS,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "resolve.before",
        "before the result of `reconcile` is sent to the store",
        FIRST_PASS,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "resolve.after",
        "the store recorded the result of `reconcile`, and its reply was not read",
        FIRST_PASS,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "sqlite.commit.before",
        "in a SQLite transaction, before its commit",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Sqlite,
    ),
    step(
        "sqlite.commit.after",
        "SQLite committed, and the verdicts were not returned",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Sqlite,
    ),
    step(
        "inbox.begin.before",
        "before the transaction begins",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "inbox.begin.after",
        "the transaction has inserted its record, before the handler starts",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "inbox.rollback.before",
        "the handler failed, before the rollback",
        FIRST_PASS,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "inbox.rollback.after",
        "the transaction is rolled back",
        FIRST_PASS,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "inbox.commit.before",
        "the handler returned, before the commit",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "inbox.commit.after",
        "the transaction is committed, and nothing is settled",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "inbox.batch.begin.before",
        "before the transaction of a batch begins",
        FIRST_PASS,
        Trigger::Work,
        Only::InboxBatches,
    ),
    step(
        "inbox.batch.begin.after",
        "the transaction of a batch has inserted its records, before the handler starts",
        FIRST_PASS,
        Trigger::Work,
        Only::InboxBatches,
    ),
    step(
        "inbox.batch.rollback.before",
        "the handler of a batch failed, before the rollback",
        FIRST_PASS,
        Trigger::Work,
        Only::InboxBatches,
    ),
    step(
        "inbox.batch.rollback.after",
        "the transaction of a batch is rolled back",
        FIRST_PASS,
        Trigger::Work,
        Only::InboxBatches,
    ),
    step(
        "inbox.batch.commit.before",
        "the handler of a batch returned, before the commit",
        FIRST_PASS,
        Trigger::Work,
        Only::InboxBatches,
    ),
    step(
        "inbox.batch.commit.after",
        "the transaction of a batch is committed, and nothing is settled",
        FIRST_PASS,
        Trigger::Work,
        Only::InboxBatches,
    ),
    step(
        "postgres.commit.before",
        "outgoing messages are in the outbox, before `COMMIT` is sent",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::AnyInbox,
    ),
    step(
        "settle.before",
        "before a settlement is passed to the source",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "settle.after",
        "the source has the settlement",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "relay.read",
        "the relay has read rows, and published none",
        FIRST_PASS,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "relay.publish.before",
        "before a message of the outbox is published",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "relay.publish.sent",
        "a message of the outbox was sent, and its confirm was not read",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "relay.publish.confirmed",
        "a message of the outbox is confirmed, and its row not deleted",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "relay.remove.before",
        "before rows of confirmed messages are deleted",
        FIRST_PASS,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "relay.remove.after",
        "rows of confirmed messages are deleted",
        FIRST_PASS,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "relay.park.before",
        "before a refused message is parked",
        FIRST_PASS,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "relay.park.after",
        "a refused message is parked",
        FIRST_PASS,
        Trigger::Work,
        Only::Inbox,
    ),
    step(
        "kafka.assign.before",
        "the group assigned partitions, before `assign` is called",
        FIRST_PASS,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.assign.after",
        "`assign` was called, and no message was read",
        FIRST_PASS,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.before",
        "before an offset is stored for the commit",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.stored",
        "an offset was stored and not committed",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.sent",
        "the first commit of an assignment was sent and not confirmed",
        FIRST_PASS,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.confirmed",
        "Kafka confirmed a commit, before the consumer records it",
        FIRST_PASS,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.dead-letter.before",
        "before a dead letter is published",
        FIRST_PASS,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.dead-letter.confirmed",
        "a dead letter is confirmed, and its message is not settled",
        FIRST_PASS,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.dead-letter.settled",
        "the message of a dead letter is settled, and its offset is not committed",
        FIRST_PASS,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.seek.before",
        "the topic was recreated, before the seek to its beginning",
        FIRST_PASS,
        Trigger::TopicRecreated,
        Only::Kafka,
    ),
    step(
        "kafka.seek.after",
        "after the seek in a recreated topic, and no message was read",
        FIRST_PASS,
        Trigger::TopicRecreated,
        Only::Kafka,
    ),
    step(
        "kafka.unassign.before",
        "drained, before partitions are unassigned",
        FIRST_PASS,
        Trigger::Drain,
        Only::Kafka,
    ),
    step(
        "kafka.unassign.after",
        "partitions are unassigned, and the consumer has not left the group",
        FIRST_PASS,
        Trigger::Drain,
        Only::Kafka,
    ),
    step(
        "amqp.consume.before",
        "the queues exist, before `basic.consume`",
        FIRST_PASS,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.consume.after",
        "after `basic.consume`, and no delivery was read",
        FIRST_PASS,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.before",
        "before acknowledgements are written",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.rejected",
        "`basic.reject` was written, and acknowledgements of the same batch were not",
        FIRST_PASS,
        Trigger::RejectedByTheQueue,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.after",
        "acknowledgements were passed to the connection",
        SEVERAL_PASSES,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.dead-letter.before",
        "before a dead letter is published",
        FIRST_PASS,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.dead-letter.confirmed",
        "a dead letter is confirmed, and its message is not acknowledged",
        FIRST_PASS,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.cancel.before",
        "the drain has begun, before `basic.cancel`",
        FIRST_PASS,
        Trigger::Drain,
        Only::RabbitMq,
    ),
    step(
        "amqp.cancel.after",
        "after `basic.cancel`, and its deliveries are not settled",
        FIRST_PASS,
        Trigger::Drain,
        Only::RabbitMq,
    ),
    step(
        "amqp.delay.before",
        "before a delayed copy is published",
        FIRST_PASS,
        Trigger::DrainWhileSomethingWaits,
        Only::RabbitMq,
    ),
    step(
        "amqp.delay.confirmed",
        "a delayed copy is confirmed, and its message is not acknowledged",
        FIRST_PASS,
        Trigger::DrainWhileSomethingWaits,
        Only::RabbitMq,
    ),
    step(
        "amqp.requeue.before",
        "before unsettled deliveries are requeued",
        FIRST_PASS,
        Trigger::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "amqp.requeue.rejected",
        "failed deliveries are requeued, and the others are not",
        FIRST_PASS,
        Trigger::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "amqp.requeue.after",
        "all deliveries are requeued, and the channel is open",
        FIRST_PASS,
        Trigger::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "drain.begun",
        "the drain has begun, and handlers run",
        FIRST_PASS,
        Trigger::Drain,
        Only::MarkerStore,
    ),
    step(
        "drain.closing",
        "drained, before the source is closed",
        FIRST_PASS,
        Trigger::Drain,
        Only::MarkerStore,
    ),
    step(
        "drain.closed",
        "the source is closed, and the process has not ended",
        FIRST_PASS,
        Trigger::Drain,
        Only::MarkerStore,
    ),
];

impl CrashStep {
    /// Why the step does not exist in this combination; none if it does.
    pub fn absent(&self, combination: Combination) -> Option<&'static str> {
        let exists_with_inbox = match self.only {
            Only::Everywhere | Only::AnyInbox => true,
            Only::Inbox => combination.markers == TestedStore::PostgresInbox,
            Only::InboxBatches => combination.markers == TestedStore::PostgresBatches,
            _ => false,
        };
        match self.only {
            _ if combination.markers.is_inbox() => (!exists_with_inbox).then_some(
                "tested with a marker store, or with the other kind of transactions of the inbox",
            ),
            Only::Inbox | Only::InboxBatches | Only::AnyInbox => {
                Some("a step of the inbox or its relay")
            }
            Only::NotBare if combination.guarantee == TestedGuarantee::Bare => {
                Some("bare has no leases")
            }
            Only::AtMostOnce if combination.guarantee != TestedGuarantee::AtMostOnce => {
                Some("only at most once records doubts; otherwise the message runs again")
            }
            Only::Kafka if combination.broker != Broker::Kafka => Some("a step of Kafka"),
            Only::RabbitMq if combination.broker != Broker::Rabbitmq => Some("a step of RabbitMQ"),
            Only::Sqlite if combination.markers != TestedStore::Sqlite => {
                Some("Redis has no transactions here; its commands have steps of their own")
            }
            _ => None,
        }
    }

    /// The step of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        STEPS.iter().find(|step| step.name == name)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;

    use super::*;

    /// Appends all Rust sources below a folder.
    fn sources(folder: &Path, into: &mut String) {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                sources(&path, into);
            } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("step.rs") {
                into.push_str(&std::fs::read_to_string(&path).expect("text"));
            }
        }
    }

    #[test]
    fn each_step_is_a_crash_point_in_the_code() {
        let mut code = String::new();
        for folder in ["../../crates", "src/matrix"] {
            sources(
                &Path::new(env!("CARGO_MANIFEST_DIR")).join(folder),
                &mut code,
            );
        }
        let names: HashSet<&str> = STEPS.iter().map(|step| step.name).collect();
        assert_eq!(names.len(), STEPS.len());
        for name in names {
            assert!(
                code.contains(&format!("\"{name}\"")),
                "no crash point has the name {name}"
            );
        }
    }

    /// The names of all crash points in the code: the string literals in calls of `point` and
    /// `of_each`.
    fn points(code: &str) -> HashSet<&str> {
        let calls = ["point(", "of_each("]
            .iter()
            .flat_map(|call| code.split(call).skip(1));
        let arguments = calls.map(|rest| rest.split(')').next().unwrap_or_default());
        arguments
            .flat_map(|arguments| arguments.split('"').skip(1).step_by(2))
            .collect()
    }

    #[test]
    fn each_crash_point_in_the_code_is_a_step() {
        let mut code = String::new();
        for folder in ["../../crates", "src/matrix"] {
            sources(
                &Path::new(env!("CARGO_MANIFEST_DIR")).join(folder),
                &mut code,
            );
        }
        let points = points(&code);
        assert!(
            points.contains("claim.before")
                && points.contains("amqp.delay.before")
                && points.contains("drain.closed"),
            "{points:?}"
        );
        let missing: Vec<&str> = points
            .into_iter()
            .filter(|name| CrashStep::named(name).is_none())
            .collect();
        assert!(
            missing.is_empty(),
            "crash points without a step: {missing:?}"
        );
    }

    #[test]
    fn each_step_exists_somewhere_and_each_combination_has_steps_of_its_own_broker() {
        let exists = |step: &CrashStep| {
            crate::matrix::columns()
                .into_iter()
                .any(|combination| step.absent(combination).is_none())
        };
        assert!(STEPS.iter().all(exists));
        let with_store = crate::matrix::columns()
            .into_iter()
            .filter(|combination| !combination.markers.is_inbox());
        for combination in with_store {
            let of = |beginning: &str| {
                STEPS.iter().any(|step| {
                    step.name.starts_with(beginning) && step.absent(combination).is_none()
                })
            };
            assert_eq!(
                (of("kafka."), of("amqp.")),
                (
                    combination.broker == Broker::Kafka,
                    combination.broker == Broker::Rabbitmq
                )
            );
        }
    }
}
