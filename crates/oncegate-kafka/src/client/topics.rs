//! Checks and creates the topics before the group is joined.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use oncegate_core::SourceError;
use oncegate_core::internal::Backoff;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::consumer::Consumer;
use rdkafka::error::RDKafkaErrorCode;

use super::callbacks::GroupConsumer;
use super::connection_errors::ConnectionErrors;
use super::log::LogContext;
use super::{error, retention};
use crate::settings::{Kafka, TopicCreation};

/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one poll for the client's errors and log lines waits while a request runs.
const POLL_TIMEOUT: Duration = Duration::from_millis(10);
/// The first and the longest pause between requests.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// How many times a missing topic is looked up again. Not every broker knows a topic that was just
/// created.
const MISSING_RETRIES: u32 = 3;

/// After this many connection failures the client is replaced, because it may have lost its broker
/// metadata (see `lost_metadata`).
const FAILURES_PER_CLIENT: u32 = 3;

/// Whether a topic exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TopicPresence {
    Exists,
    Missing {
        /// The number of brokers in the cluster.
        brokers: usize,
    },
}

/// The text of the command that creates a topic. `options` are further options of the command.
pub(super) fn create_command(kafka: &Kafka, name: &str, replicas: usize, options: &str) -> String {
    format!(
        "kafka-topics.sh --bootstrap-server {} --create --topic {name} --replication-factor {replicas}{options} (`kafka-topics` in some packages; \
         in the Docker image it is in /opt/kafka/bin)",
        kafka.brokers
    )
}

/// Waits for a broker, then checks every topic, and creates missing dead-letter and in-doubt topics
/// if [`TopicCreation`] says so. Returns the consumer that has sent the last request: `consumer`,
/// or one that `new_consumer` has created because requests failed.
///
/// The requests come from a consumer, because a producer's metadata request would create the topic
/// on brokers with `auto.create.topics.enable`.
///
/// # Errors
/// A topic is missing, has limited retention or cannot be created, or the broker rejects the login.
pub(crate) async fn check(
    kafka: &Kafka,
    mut consumer: GroupConsumer,
    new_consumer: impl Fn() -> Result<GroupConsumer, SourceError>,
    connection_errors: &Arc<ConnectionErrors>,
) -> Result<GroupConsumer, SourceError> {
    for topic in &kafka.topics {
        let presence;
        (consumer, presence) =
            find_topic(consumer, &new_consumer, topic.clone(), connection_errors).await?;
        if let TopicPresence::Missing { brokers } = presence {
            return Err(SourceError::misconfigured(
                "topic",
                format!("the topic `{topic}` does not exist"),
                format!(
                    "create it: {}",
                    create_command(kafka, topic, Kafka::replicas(brokers), "")
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
    let mut existing = Vec::new();
    for (setting, name) in &destinations {
        let presence;
        (consumer, presence) =
            find_topic(consumer, &new_consumer, name.clone(), connection_errors).await?;
        match (presence, kafka.creation) {
            (TopicPresence::Exists, _) => existing.push((*setting, name.as_str())),
            (
                TopicPresence::Missing { .. },
                TopicCreation::Create {
                    partitions,
                    replication,
                },
            ) => {
                create(
                    &admin(kafka, connection_errors)?,
                    setting,
                    name,
                    partitions,
                    replication,
                )
                .await?
            }
            (TopicPresence::Missing { brokers }, TopicCreation::Never) => {
                let (replicas, options) = (
                    Kafka::replicas(brokers),
                    " --config retention.ms=-1 --config retention.bytes=-1 --config cleanup.policy=delete",
                );
                return Err(SourceError::misconfigured(
                    *setting,
                    format!("the topic `{name}` does not exist"),
                    format!(
                        "let the source create it: .create_topics(TopicCreation::Create {{ partitions: 1, replication: {replicas} }}), which is \
                         kafka.create-partitions = 1 and kafka.create-replicas = {replicas} in oncegate.toml; or create it: {}",
                        create_command(kafka, name, replicas, options)
                    ),
                ));
            }
        }
    }
    retention::check(kafka, || admin(kafka, connection_errors), &existing).await?;
    Ok(consumer)
}

/// Looks a topic up. Retries until a broker answers; replaces the consumer if requests fail.
///
/// # Errors
/// The broker rejects the login or the access to the topic, or the name is invalid.
async fn find_topic(
    mut consumer: GroupConsumer,
    new_consumer: impl Fn() -> Result<GroupConsumer, SourceError>,
    topic: String,
    connection_errors: &ConnectionErrors,
) -> Result<(GroupConsumer, TopicPresence), SourceError> {
    let mut backoff = Backoff::between(RETRY_PAUSES.0, RETRY_PAUSES.1);
    let (mut missing_answers, mut failures) = (0, 0);
    loop {
        let name = topic.clone();
        let fetched = tokio::task::spawn_blocking(move || {
            let answer = fetch_presence(&consumer, &name);
            (consumer, answer)
        });
        let answer;
        (consumer, answer) = fetched
            .await
            .map_err(|error| SourceError::Unavailable(error.into()))?;
        match answer {
            Ok(TopicPresence::Missing { .. }) if missing_answers < MISSING_RETRIES => {
                missing_answers += 1
            }
            Ok(presence) => return Ok((consumer, presence)),
            Err(code) => {
                fail_if_permanent(&consumer, code, &topic, connection_errors)?;
                failures += u32::from(error::is_connection(code));
                if failures == FAILURES_PER_CLIENT {
                    failures = 0;
                    let failed = std::mem::replace(&mut consumer, new_consumer()?);
                    failed.context().is_replaced.store(true, Ordering::Relaxed);
                    tokio::task::spawn_blocking(move || drop(failed));
                }
            }
        }
        tokio::time::sleep(backoff.advance()).await;
    }
}

/// Requests the metadata of a topic, and serves the client's errors and log lines meanwhile.
///
/// # Errors
/// The code of the failed request, or the topic's error code, unless that says that the topic is
/// missing.
fn fetch_presence(
    consumer: &GroupConsumer,
    topic: &str,
) -> Result<TopicPresence, RDKafkaErrorCode> {
    let metadata = std::thread::scope(|scope| {
        let request = scope.spawn(|| consumer.fetch_metadata(Some(topic), REQUEST_TIMEOUT));
        // The polling thread does not run yet, so this loop serves errors and log lines. A
        // connection error is then logged before the request times out.
        while !request.is_finished() {
            while consumer.poll(POLL_TIMEOUT).is_some() {}
        }
        request
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
        None => Ok(TopicPresence::Exists),
        Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic) => {
            Ok(TopicPresence::Missing {
                brokers: metadata.brokers().len(),
            })
        }
        Some(code) => Err(code),
    }
}

/// Logs a transient error.
///
/// # Errors
/// A permanent error.
fn fail_if_permanent(
    consumer: &GroupConsumer,
    code: RDKafkaErrorCode,
    topic: &str,
    connection_errors: &ConnectionErrors,
) -> Result<(), SourceError> {
    use RDKafkaErrorCode as E;
    let last_error = consumer.context().take_last_error();
    if let Some((_, reason)) = last_error
        .as_ref()
        .filter(|(code, _)| error::is_authentication(*code))
    {
        return Err(SourceError::misconfigured(
            "property",
            format!("the broker rejects the credentials: {reason}"),
            "check .login(…), or the sasl.* and ssl.* properties",
        ));
    }
    match code {
        E::TopicAuthorizationFailed => Err(SourceError::misconfigured(
            "topic",
            format!("not allowed to describe the topic `{topic}`"),
            "grant Describe and Read on the topic",
        )),
        E::InvalidTopic => Err(SourceError::misconfigured(
            "topic",
            format!("`{topic}` is not a valid topic name"),
            "name a topic that exists",
        )),
        code if error::is_connection(code) => {
            connection_errors.log(&last_error.map_or_else(
                || format!("no answer within {REQUEST_TIMEOUT:?}"),
                |(_, reason)| reason,
            ));
            Ok(())
        }
        _ => {
            tracing::warn!(topic, %code, "cannot look up the topic, retrying; nothing is read until it is found; check the brokers' logs");
            Ok(())
        }
    }
}

fn admin(
    kafka: &Kafka,
    connection_errors: &Arc<ConnectionErrors>,
) -> Result<AdminClient<LogContext>, SourceError> {
    kafka
        .producer_config()
        .create_with_context(LogContext(connection_errors.clone()))
        .map_err(error::from_config)
}

/// Creates a dead-letter or in-doubt topic with unlimited retention. Does nothing if it exists.
async fn create(
    admin: &AdminClient<LogContext>,
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
    let topic = retention::UNLIMITED_RETENTION
        .iter()
        .fold(topic, |topic, (key, value)| topic.set(key, value));
    let options = AdminOptions::new().operation_timeout(Some(REQUEST_TIMEOUT * 2));
    let failed = match admin.create_topics([&topic], &options).await {
        Ok(results) => results
            .into_iter()
            .find_map(Result::err)
            .map(|(_, code)| code.to_string()),
        Err(error) => Some(error.to_string()),
    };
    match failed {
        // Another member has created it.
        Some(text) if text == RDKafkaErrorCode::TopicAlreadyExists.to_string() => Ok(()),
        Some(text) => Err(SourceError::misconfigured(
            setting,
            format!("the topic `{name}` could not be created: {text}"),
            "create it with kafka-topics.sh, with retention.ms=-1, retention.bytes=-1 and cleanup.policy=delete",
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
    use crate::client::callbacks::CallbackContext;

    #[tokio::test]
    async fn a_client_whose_requests_fail_is_replaced() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let client = |brokers: &str| {
            let kafka = Kafka::topic("t").brokers(brokers).group("g");
            CallbackContext::with_new_state(&kafka).consumer(&kafka)
        };
        // Requests of this client fail, as after a loss of its broker metadata.
        let (first, connection_errors) = (
            client("127.0.0.1:1").expect("a client"),
            ConnectionErrors::new("127.0.0.1:1"),
        );
        let finding = tokio::time::timeout(
            Duration::from_secs(60),
            find_topic(first, || client(&brokers), "t".into(), &connection_errors),
        );
        let (_, presence) = finding
            .await
            .expect("the client is replaced in time")
            .expect("connection errors are not permanent");
        assert_eq!(presence, TopicPresence::Exists);
    }
}
