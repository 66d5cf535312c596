//! The steps of the road at which a process is ended.

use super::consumer::Markers;
use super::group::Made;
use crate::check::Promise;
use crate::worker::Broker;

/// A point in oncegate, or in the handler, at which a process ends as a crash ends it.
#[derive(Debug)]
pub struct Step {
    /// As oncegate calls it.
    pub name: &'static str,
    /// Where on the road that is.
    pub text: &'static str,
    /// In which of the three runs the process ends at which pass.
    pub(crate) passes: [u32; 3],
    /// What leads there.
    pub(crate) way: Way,
    /// Where it does not exist.
    only: Only,
}

/// What leads to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Messages.
    Work,
    /// Being told to drain while handlers run.
    Drain,
    /// Being told to drain while what has failed waits to be tried again.
    DrainWhileSomethingWaits,
    /// The same, where nothing can wait outside of the process.
    DrainWhileSomethingIsHeld,
    /// All is done, and the topic is deleted and made anew.
    TopicMadeAnew,
    /// Messages that the queue itself sets aside.
    RejectedByTheQueue,
}

/// Where a step exists.
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
    way: Way,
    only: Only,
) -> Step {
    Step {
        name,
        text,
        passes,
        way,
        only,
    }
}

/// All of them, in the order of the road.
pub const STEPS: [Step; 56] = [
    step(
        "delivery",
        "a delivery has come in, and nothing was asked",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "claim.before",
        "before a claim is sent",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "claim.after",
        "a claim was carried out, its reply unread",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "handler.before",
        "claimed, before the handler",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "effect.before",
        "inside the handler, before its effect",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "effect.after",
        "inside the handler, after its effect",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "handler.after",
        "after the handler",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "renew.before",
        "before a renewal is sent",
        SELDOM,
        Way::Work,
        Only::NotBare,
    ),
    step(
        "renew.after",
        "a renewal was carried out, its reply unread",
        SELDOM,
        Way::Work,
        Only::NotBare,
    ),
    step(
        "complete.before",
        "before a completion is sent",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "complete.after",
        "a completion was carried out, its reply unread",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "clear.before",
        "before an id is freed for another attempt",
        SELDOM,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "clear.after",
        "it was freed, the reply unread",
        SELDOM,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "reject.before",
        "before an id is kept from running",
        SELDOM,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "reject.after",
        "it was, the reply unread",
        SELDOM,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "doubt.before",
        "before an id is put in doubt",
        SELDOM,
        Way::Work,
        Only::AtMostOnce,
    ),
    step(
        "doubt.after",
        "it is in doubt, the reply unread",
        SELDOM,
        Way::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.before",
        "before `reconcile`",
        SELDOM,
        Way::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.found",
        "inside `reconcile`, when it has found out",
        SELDOM,
        Way::Work,
        Only::AtMostOnce,
    ),
    step(
        "reconcile.after",
        "after `reconcile`",
        SELDOM,
        Way::Work,
        Only::AtMostOnce,
    ),
    step(
        "resolve.before",
        "before what was found is written",
        SELDOM,
        Way::Work,
        Only::AtMostOnce,
    ),
    step(
        "resolve.after",
        "it was written, the reply unread",
        SELDOM,
        Way::Work,
        Only::AtMostOnce,
    ),
    step(
        "sqlite.commit.before",
        "inside SQLite's transaction",
        OFTEN,
        Way::Work,
        Only::Sqlite,
    ),
    step(
        "sqlite.commit.after",
        "SQLite has committed, nobody was told",
        OFTEN,
        Way::Work,
        Only::Sqlite,
    ),
    step(
        "settle.before",
        "before a verdict goes to the source",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "settle.after",
        "the source has it",
        OFTEN,
        Way::Work,
        Only::Everywhere,
    ),
    step(
        "kafka.assign.before",
        "the group gives it partitions, before it takes them over",
        SELDOM,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.assign.after",
        "it has taken them over, nothing of them was read",
        SELDOM,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.before",
        "before an offset is stored for the commit",
        OFTEN,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.stored",
        "stored, not committed",
        OFTEN,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.sent",
        "the first of an assignment is on its way, not confirmed",
        SELDOM,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.commit.confirmed",
        "Kafka has committed it, nobody was told",
        SELDOM,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.letter.before",
        "before a dead letter is published",
        SELDOM,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.letter.confirmed",
        "it stands, its message is not settled",
        SELDOM,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.letter.settled",
        "its message is settled, not committed",
        SELDOM,
        Way::Work,
        Only::Kafka,
    ),
    step(
        "kafka.seek.before",
        "a topic was made anew, before its beginning is sought",
        SELDOM,
        Way::TopicMadeAnew,
        Only::Kafka,
    ),
    step(
        "kafka.seek.after",
        "it was sought, nothing of it was read",
        SELDOM,
        Way::TopicMadeAnew,
        Only::Kafka,
    ),
    step(
        "kafka.unassign.before",
        "drained, before it gives its partitions back",
        SELDOM,
        Way::Drain,
        Only::Kafka,
    ),
    step(
        "kafka.unassign.after",
        "it has given them back, and not left the group",
        SELDOM,
        Way::Drain,
        Only::Kafka,
    ),
    step(
        "amqp.consume.before",
        "the queues are there, before it asks to consume",
        SELDOM,
        Way::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.consume.after",
        "the broker sends, nothing of it was read",
        SELDOM,
        Way::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.before",
        "before acknowledgements are written",
        OFTEN,
        Way::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.rejected",
        "a delivery was rejected, the acknowledgements beside it are not written",
        SELDOM,
        Way::RejectedByTheQueue,
        Only::RabbitMq,
    ),
    step(
        "amqp.ack.after",
        "they were handed to the connection",
        OFTEN,
        Way::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.letter.before",
        "before a dead letter is published",
        SELDOM,
        Way::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.letter.confirmed",
        "it stands, its message is not acknowledged",
        SELDOM,
        Way::Work,
        Only::RabbitMq,
    ),
    step(
        "amqp.cancel.before",
        "told to drain, before it cancels its consumer",
        SELDOM,
        Way::Drain,
        Only::RabbitMq,
    ),
    step(
        "amqp.cancel.after",
        "the broker sends no more, what it sent is not settled",
        SELDOM,
        Way::Drain,
        Only::RabbitMq,
    ),
    step(
        "amqp.delay.before",
        "before a copy is published to wait",
        SELDOM,
        Way::DrainWhileSomethingWaits,
        Only::RabbitMq,
    ),
    step(
        "amqp.delay.confirmed",
        "the copy stands, its message is not acknowledged",
        SELDOM,
        Way::DrainWhileSomethingWaits,
        Only::RabbitMq,
    ),
    step(
        "amqp.back.before",
        "before what was not settled is handed back",
        SELDOM,
        Way::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "amqp.back.rejected",
        "what has failed is handed back, the rest is not",
        SELDOM,
        Way::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "amqp.back.after",
        "all is handed back, the channel is open",
        SELDOM,
        Way::DrainWhileSomethingIsHeld,
        Only::RabbitMq,
    ),
    step(
        "drain.begun",
        "told to drain, handlers run",
        SELDOM,
        Way::Drain,
        Only::Everywhere,
    ),
    step(
        "drain.closing",
        "drained, before the source is closed",
        SELDOM,
        Way::Drain,
        Only::Everywhere,
    ),
    step(
        "drain.closed",
        "the source is closed, the process has not ended",
        SELDOM,
        Way::Drain,
        Only::Everywhere,
    ),
];

impl Step {
    /// Why it does not exist here; none if it does.
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

    /// Every line of Rust below a folder.
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

    /// The names of all points in the code: what stands in quotes in a call of `point` or
    /// `of_each`, but for the harness's own.
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
