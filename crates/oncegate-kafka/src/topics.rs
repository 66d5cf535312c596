//! Whether the topics are there, before the group is joined.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use oncegate_core::SourceError;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode;

use crate::context::Context;
use crate::kafka::{Kafka, TopicCreation};
use crate::log::Log;
use crate::outage::Outage;
use crate::refusal;
use crate::retention;

/// How long one question to the broker may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long one look for the client's errors waits meanwhile.
const TURN: Duration = Duration::from_millis(10);
/// The first pause before the broker is asked again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// How often a topic that is missing is asked for again, a pause apart: one that was created a
/// moment ago is not known to every broker yet.
const SECOND_LOOKS: u32 = 3;

/// How often a client may ask in vain until another one asks: it may have forgotten its brokers.
const IN_VAIN: u32 = 3;

/// What the broker says about a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    There,
    /// In a cluster of so many brokers.
    Missing(usize),
}

/// How to create a topic of this name, as the broker's own tool does.
fn command(kafka: &Kafka, name: &str, replicas: usize, keeps: &str) -> String {
    format!(
        "kafka-topics.sh --bootstrap-server {} --create --topic {name} --replication-factor {replicas}{keeps} (`kafka-topics` in some packages; \
         in the Docker image it stands in /opt/kafka/bin)",
        kafka.brokers
    )
}

/// As many copies as a cluster of this size can hold, and three at most.
fn replicas(brokers: usize) -> usize {
    brokers.clamp(1, 3)
}

/// Waits for a broker, then checks every topic, creating what is to be created. Answers the
/// consumer that has asked.
///
/// A consumer asks, because a producer's question creates a topic on brokers that do so by
/// themselves.
pub(crate) async fn check(
    kafka: &Kafka,
    mut consumer: BaseConsumer<Context>,
    another: impl Fn() -> Result<BaseConsumer<Context>, SourceError>,
    outage: &Arc<Outage>,
) -> Result<BaseConsumer<Context>, SourceError> {
    for topic in &kafka.topics {
        let found;
        (consumer, found) = look(consumer, &another, topic.clone(), outage).await?;
        if let Found::Missing(brokers) = found {
            return Err(SourceError::misconfigured(
                "topic",
                format!("the topic `{topic}` does not exist"),
                format!(
                    "create it: {}",
                    command(kafka, topic, replicas(brokers), "")
                ),
            ));
        }
    }
    let destinations: BTreeSet<(&str, String)> = kafka
        .topics
        .iter()
        .flat_map(|topic| {
            [
                ("dead_letters", kafka.destinations.dead_letters(topic)),
                ("in_doubt", kafka.destinations.in_doubt(topic)),
            ]
        })
        .collect();
    let mut there = Vec::new();
    for (setting, name) in &destinations {
        let found;
        (consumer, found) = look(consumer, &another, name.clone(), outage).await?;
        match (found, kafka.creation) {
            (Found::There, _) => there.push((*setting, name.as_str())),
            (
                Found::Missing(_),
                TopicCreation::Create {
                    partitions,
                    replication,
                },
            ) => {
                create(
                    &admin(kafka, outage)?,
                    setting,
                    name,
                    partitions,
                    replication,
                )
                .await?
            }
            (Found::Missing(brokers), TopicCreation::Never) => {
                let (replicas, keeps) = (
                    replicas(brokers),
                    " --config retention.ms=-1 --config retention.bytes=-1 --config cleanup.policy=delete",
                );
                return Err(SourceError::misconfigured(
                    *setting,
                    format!("the topic `{name}` does not exist"),
                    format!(
                        "let the source create it: .create_topics(TopicCreation::Create {{ partitions: 1, replication: {replicas} }}), which is \
                         kafka.create-partitions = 1 and kafka.create-replicas = {replicas} in oncegate.toml; or create it: {}",
                        command(kafka, name, replicas, keeps)
                    ),
                ));
            }
        }
    }
    retention::check(kafka, || admin(kafka, outage), &there).await?;
    Ok(consumer)
}

/// Asks until a broker answers.
async fn look(
    mut consumer: BaseConsumer<Context>,
    another: impl Fn() -> Result<BaseConsumer<Context>, SourceError>,
    topic: String,
    outage: &Outage,
) -> Result<(BaseConsumer<Context>, Found), SourceError> {
    let (mut pause, longest) = PAUSES;
    let (mut second_looks, mut in_vain) = (0, 0);
    loop {
        let name = topic.clone();
        let asked = tokio::task::spawn_blocking(move || {
            let answer = ask(&consumer, &name);
            (consumer, answer)
        });
        let answer;
        (consumer, answer) = asked
            .await
            .map_err(|error| SourceError::Unavailable(error.into()))?;
        match answer {
            Ok(Found::Missing(_)) if second_looks < SECOND_LOOKS => second_looks += 1,
            Ok(found) => return Ok((consumer, found)),
            Err(code) => {
                judge(&consumer, code, &topic, outage)?;
                in_vain += u32::from(Outage::is(code));
                if in_vain == IN_VAIN {
                    in_vain = 0;
                    let before = std::mem::replace(&mut consumer, another()?);
                    before.context().is_replaced.store(true, Ordering::Relaxed);
                    tokio::task::spawn_blocking(move || drop(before));
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

fn ask(consumer: &BaseConsumer<Context>, topic: &str) -> Result<Found, RDKafkaErrorCode> {
    let metadata = std::thread::scope(|scope| {
        let asking = scope.spawn(|| consumer.fetch_metadata(Some(topic), PATIENCE));
        // Nobody else serves its log and its errors yet, and an outage is told before the question
        // is given up.
        while !asking.is_finished() {
            while consumer.poll(TURN).is_some() {}
        }
        asking
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let metadata =
        metadata.map_err(|error| error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail))?;
    match metadata
        .topics()
        .first()
        .and_then(|topic| topic.error())
        .map(RDKafkaErrorCode::from)
    {
        None => Ok(Found::There),
        Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic) => {
            Ok(Found::Missing(metadata.brokers().len()))
        }
        Some(code) => Err(code),
    }
}

/// What may heal is waited for; what a person has to change is an error.
fn judge(
    consumer: &BaseConsumer<Context>,
    code: RDKafkaErrorCode,
    topic: &str,
    outage: &Outage,
) -> Result<(), SourceError> {
    use RDKafkaErrorCode as E;
    let trouble = consumer.context().take_trouble();
    if let Some((_, reason)) = trouble
        .as_ref()
        .filter(|(code, _)| refusal::is_of_the_broker(*code))
    {
        return Err(SourceError::misconfigured(
            "property",
            format!("the broker refuses the credentials: {reason}"),
            "check .login(…), or the sasl.* and ssl.* properties",
        ));
    }
    match code {
        E::TopicAuthorizationFailed => Err(SourceError::misconfigured(
            "topic",
            format!("not allowed to see the topic `{topic}`"),
            "grant Describe and Read on it",
        )),
        E::InvalidTopic => Err(SourceError::misconfigured(
            "topic",
            format!("`{topic}` is no name for a topic"),
            "name a topic that exists",
        )),
        code if Outage::is(code) => {
            outage.tell(&trouble.map_or_else(
                || format!("no answer within {PATIENCE:?}"),
                |(_, reason)| reason,
            ));
            Ok(())
        }
        _ => {
            tracing::warn!(topic, %code, "the broker does not say yet whether the topic exists; asking again");
            Ok(())
        }
    }
}

fn admin(kafka: &Kafka, outage: &Arc<Outage>) -> Result<AdminClient<Log>, SourceError> {
    kafka
        .producer_config()
        .create_with_context(Log(outage.clone()))
        .map_err(refusal::of_setting)
}

async fn create(
    admin: &AdminClient<Log>,
    setting: &str,
    name: &str,
    partitions: u16,
    replication: u16,
) -> Result<(), SourceError> {
    let topic = NewTopic::new(
        name,
        i32::from(partitions),
        TopicReplication::Fixed(i32::from(replication)),
    );
    let topic = retention::KEEPS
        .iter()
        .fold(topic, |topic, (key, value)| topic.set(key, value));
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE * 2));
    let failed = match admin.create_topics([&topic], &options).await {
        Ok(results) => results
            .into_iter()
            .find_map(Result::err)
            .map(|(_, code)| code.to_string()),
        Err(error) => Some(error.to_string()),
    };
    match failed {
        // Another member was quicker.
        Some(text) if text == RDKafkaErrorCode::TopicAlreadyExists.to_string() => Ok(()),
        Some(text) => Err(SourceError::misconfigured(
            setting,
            format!("the topic `{name}` could not be created: {text}"),
            "create it by hand",
        )),
        None => {
            tracing::info!(topic = name, partitions, replication, "topic created");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::mocking::MockCluster;

    use super::*;
    use crate::shared::Shared;

    #[tokio::test]
    async fn a_client_that_asks_in_vain_gives_way_to_another_one() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let client = |brokers: &str| {
            let (kafka, outage) = (
                Kafka::topic("t").brokers(brokers).group("g"),
                Arc::new(Outage::of(brokers)),
            );
            let context = Context::new(Arc::<Shared>::default(), &kafka, outage);
            kafka
                .consumer_config()
                .create_with_context(context)
                .map_err(refusal::of_setting)
        };
        // As one that has forgotten where the brokers are.
        let (first, outage) = (
            client("127.0.0.1:1").expect("a client"),
            Outage::of("127.0.0.1:1"),
        );
        let looked = tokio::time::timeout(
            Duration::from_secs(60),
            look(first, || client(&brokers), "t".into(), &outage),
        );
        let (_, found) = looked
            .await
            .expect("another one asks")
            .expect("nothing that a person has to change");
        assert_eq!(found, Found::There);
    }
}
