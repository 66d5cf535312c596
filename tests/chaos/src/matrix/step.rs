//! The steps of the delivery lifecycle at which a process aborts.

use super::consumer::Markers;
use super::group::Made;
use crate::check::Promise;
use crate::worker::Broker;

/// A crash point in oncegate or in the handler.
#[derive(Debug)]
pub struct Step {
    /// The name of the crash point.
    pub name: &'static str,
    /// The description in the table.
    pub text: &'static str,
    /// For each of the three runs, at which pass of the point the process aborts.
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
    /// SIGTERM while failed messages wait in delay queues.
    DrainWhileSomethingWaits,
    /// SIGTERM while failed messages wait in the consumer, since there are no delay queues.
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
    AtMostOnce,
    NotBare,
    Kafka,
    RabbitMq,
    Sqlite,
}

const OFTEN: [u32; 3] = [1, 2, 4];
const SELDOM: [u32; 3] = [1, 1, 1];

const fn step(
    name: &'static str,
    text: &'static str,
    passes: [u32; 3],
    trigger: Trigger,
    only: Only,
) -> Step {
    Step {
        name,
        text,
        passes,
        trigger,
        only,
    }
}

/// All steps, in the order of the delivery lifecycle.
pub const STEPS: [Step; 56] = [
    step(
        "delivery",
        "a delivery has come in, and nothing was asked",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "claim.before",
        "before a claim is sent",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "claim.after",
        "a claim was carried out, its reply unread",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "handler.before",
        "claimed, before the handler",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "effect.before",
        "inside the handler, before its effect",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "effect.after",
        "inside the handler, after its effect",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "handler.after",
        "after the handler",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "renew.before",
        "before a renewal is sent",
        SELDOM,
        Trigger::Work,
        Only::NotBare,
    ),
    step(
        "renew.after",
        "a renewal was carried out, its reply unread",
        SELDOM,
        Trigger::Work,
        Only::NotBare,
    ),
    step(
        "complete.before",
        "before a completion is sent",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "complete.after",
        "a completion was carried out, its reply unread",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "clear.before",
        "before an id is freed for another attempt",
        SELDOM,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "clear.after",
        "it was freed, the reply unread",
        SELDOM,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "reject.before",
        "before an id is kept from running",
        SELDOM,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "reject.after",
        "it was, the reply unread",
        SELDOM,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "doubt.before",
        "before an id is put in doubt",
        SELDOM,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "doubt.after",
        "it is in doubt, the reply unread",
        SELDOM,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.before",
        "before `reconcile`",
        SELDOM,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.found",
        "inside `reconcile`, when it has found out",
        SELDOM,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.after",
        "after `reconcile`",
        SELDOM,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "resolve.before",
        "before what was found is written",
        SELDOM,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "resolve.after",
        "it was written, the reply unread",
        SELDOM,
        Trigger::Work,
        Only::AtMostOnce,
    ),
    step(
        "sqlite.commit.before",
        "inside SQLite's transaction",
        OFTEN,
        Trigger::Work,
        Only::Sqlite,
    ),
    step(
        "sqlite.commit.after",
        "SQLite has committed, nobody was told",
        OFTEN,
        Trigger::Work,
        Only::Sqlite,
    ),
    step(
        "settle.before",
        "before a verdict goes to the source",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "settle.after",
        "the source has it",
        OFTEN,
        Trigger::Work,
        Only::Everywhere,
    ),
    step(
        "kafka.assign.before",
        "the group gives it partitions, before it takes them over",
        SELDOM,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.assign.after",
        "it has taken them over, nothing of them was read",
        SELDOM,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.before",
        "before an offset is stored for the commit",
        OFTEN,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.stored",
        "stored, not committed",
        OFTEN,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.sent",
        "the first of an assignment is on its way, not confirmed",
        SELDOM,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.confirmed",
        "Kafka has committed it, nobody was told",
        SELDOM,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.dead-letter.before",
        "before a dead letter is published",
        SELDOM,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.dead-letter.confirmed",
        "it stands, its message is not settled",
        SELDOM,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.dead-letter.settled",
        "its message is settled, not committed",
        SELDOM,
        Trigger::Work,
        Only::Kafka,
    ),
    step(
        "kafka.seek.before",
        "a topic was made anew, before its beginning is sought",
        SELDOM,
        Trigger::TopicRecreated,
        Only::Kafka,
    ),
    step(
        "kafka.seek.after",
        "it was sought, nothing of it was read",
        SELDOM,
        Trigger::TopicRecreated,
        Only::Kafka,
    ),
    step(
        "kafka.unassign.before",
        "drained, before it gives its partitions back",
        SELDOM,
        Trigger::Drain,
        Only::Kafka,
    ),
    step(
        "kafka.unassign.after",
        "it has given them back, and not left the group",
        SELDOM,
        Trigger::Drain,
        Only::Kafka,
    ),
    step(
        "amqp.consume.before",
        "the queues are there, before it asks to consume",
        SELDOM,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.consume.after",
        "the broker sends, nothing of it was read",
        SELDOM,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.before",
        "before acknowledgements are written",
        OFTEN,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.rejected",
        "a delivery was rejected, the acknowledgements beside it are not written",
        SELDOM,
        Trigger::RejectedByTheQueue,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.after",
        "they were handed to the connection",
        OFTEN,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.letter.before",
        "before a dead letter is published",
        SELDOM,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.letter.confirmed",
        "it stands, its message is not acknowledged",
        SELDOM,
        Trigger::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.cancel.before",
        "told to drain, before it cancels its consumer",
        SELDOM,
        Trigger::Drain,
        Only::RabbitMq,
    ),
    step(
        "amqp.cancel.after",
        "the broker sends no more, what it sent is not settled",
        SELDOM,
        Trigger::Drain,
        Only::RabbitMq,
    ),
    step(
        "amqp.delay.before",
        "before a copy is published to wait",
        SELDOM,
        Trigger::DrainWhileSomethingWaits,
        Only::RabbitMq,
    ),
    step(
        "amqp.delay.confirmed",
        "the copy stands, its message is not acknowledged",
        SELDOM,
        Trigger::DrainWhileSomethingWaits,
        Only::RabbitMq,
    ),
    step(
        "amqp.back.before",
        "before what was not settled is handed back",
        SELDOM,
        Trigger::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "amqp.back.rejected",
        "what has failed is handed back, the rest is not",
        SELDOM,
        Trigger::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "amqp.back.after",
        "all is handed back, the channel is open",
        SELDOM,
        Trigger::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "drain.begun",
        "told to drain, handlers run",
        SELDOM,
        Trigger::Drain,
        Only::Everywhere,
    ),
    step(
        "drain.closing",
        "drained, before the source is closed",
        SELDOM,
        Trigger::Drain,
        Only::Everywhere,
    ),
    step(
        "drain.closed",
        "the source is closed, the process has not ended",
        SELDOM,
        Trigger::Drain,
        Only::Everywhere,
    ),
];

impl Step {
    /// Why the step does not exist in this combination; none if it does.
    pub fn absent(&self, made: Made) -> Option<&'static str> {
        match self.only {
            Only::NotBare if made.promise == Promise::Bare => Some("bare holds nothing"),
            Only::AtMostOnce if made.promise != Promise::AtMostOnce => {
                Some("it is not put in doubt: it runs again")
            }
            Only::Kafka if made.broker != Broker::Kafka => Some("it is a step of Kafka's"),
            Only::RabbitMq if made.broker != Broker::Rabbitmq => Some("it is a step of RabbitMQ's"),
            Only::Sqlite if made.markers != Markers::Sqlite => {
                Some("Redis has no commit: before and after each command are steps of their own")
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
    fn each_step_has_a_name_of_its_own_which_stands_in_the_code_it_is_about() {
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
                "no point is called {name}"
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
    fn each_point_in_the_code_is_a_step() {
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
        let forgotten: Vec<&str> = points
            .into_iter()
            .filter(|name| Step::named(name).is_none())
            .collect();
        assert!(forgotten.is_empty(), "no process is ended at {forgotten:?}");
    }

    #[test]
    fn each_step_exists_somewhere_and_each_combination_has_steps_of_its_own_broker() {
        let exists = |step: &Step| {
            crate::matrix::columns()
                .into_iter()
                .any(|made| step.absent(made).is_none())
        };
        assert!(STEPS.iter().all(exists));
        for made in crate::matrix::columns() {
            let of = |beginning: &str| {
                STEPS
                    .iter()
                    .any(|step| step.name.starts_with(beginning) && step.absent(made).is_none())
            };
            assert_eq!(
                (of("kafka."), of("amqp.")),
                (
                    made.broker == Broker::Kafka,
                    made.broker == Broker::Rabbitmq
                )
            );
        }
    }
}
