//! Whether the topics are there, before the group is joined.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::SourceError;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode;

use crate::context::{Context, Log, is_refusal};
use crate::kafka::{Kafka, Retention, TopicCreation};
use crate::open::wrong_setting;
use crate::outage::Outage;

/// How long one question to the broker may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long one look for the client's errors waits meanwhile.
const TURN: Duration = Duration::from_millis(10);
/// The first pause before the broker is asked again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// How often a topic that is missing is asked for again, a pause apart: one that was created a moment ago is not known
/// to every broker yet.
const SECOND_LOOKS: u32 = 3;

/// What a topic needs to keep its messages until somebody takes them out.
const KEEPS: [(&str, &str); 3] = [("retention.ms", "-1"), ("retention.bytes", "-1"), ("cleanup.policy", "delete")];

/// What the broker says about a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    There,
    Missing,
}

/// Waits for a broker, then checks every topic, creating what is to be created.
///
/// The consumer asks, because a producer's question creates a topic on brokers that do so by themselves.
pub(crate) async fn check(
    kafka: &Kafka,
    mut consumer: BaseConsumer<Context>,
    outage: &Arc<Outage>,
) -> Result<BaseConsumer<Context>, SourceError> {
    for topic in &kafka.topics {
        let found;
        (consumer, found) = look(consumer, topic.clone(), outage).await?;
        if found == Found::Missing {
            return Err(SourceError::misconfigured(
                "topic",
                format!("the topic `{topic}` does not exist"),
                format!("create it: kafka-topics.sh --bootstrap-server {} --create --topic {topic}", kafka.brokers),
            ));
        }
    }
    let destinations: BTreeSet<(&str, String)> = kafka
        .topics
        .iter()
        .flat_map(|topic| [("dead_letters", kafka.destinations.dead_letters(topic)), ("in_doubt", kafka.destinations.in_doubt(topic))])
        .collect();
    let mut there = Vec::new();
    for (setting, name) in &destinations {
        let found;
        (consumer, found) = look(consumer, name.clone(), outage).await?;
        match (found, kafka.creation) {
            (Found::There, _) => there.push((*setting, name.as_str())),
            (Found::Missing, TopicCreation::Create { partitions, replication }) => {
                create(&admin(kafka, outage)?, setting, name, partitions, replication).await?
            }
            (Found::Missing, TopicCreation::Never) => {
                return Err(SourceError::misconfigured(
                    *setting,
                    format!("the topic `{name}` does not exist"),
                    format!(
                        "create it: kafka-topics.sh --bootstrap-server {} --create --topic {name} --config retention.ms=-1 \
                         --config retention.bytes=-1 --config cleanup.policy=delete; \
                         or let the source do so: .create_topics(TopicCreation::Create {{ partitions: 1, replication: 3 }})",
                        kafka.brokers
                    ),
                ));
            }
        }
    }
    if kafka.retention == Retention::Unlimited {
        check_retention(kafka, outage, &there).await?;
    }
    Ok(consumer)
}

/// Asks until a broker answers.
async fn look(mut consumer: BaseConsumer<Context>, topic: String, outage: &Outage) -> Result<(BaseConsumer<Context>, Found), SourceError> {
    let (mut pause, longest) = PAUSES;
    let mut second_looks = 0;
    loop {
        let name = topic.clone();
        let asked = tokio::task::spawn_blocking(move || {
            let answer = ask(&consumer, &name);
            (consumer, answer)
        });
        let answer;
        (consumer, answer) = asked.await.map_err(|error| SourceError::Unavailable(error.into()))?;
        match answer {
            Ok(Found::Missing) if second_looks < SECOND_LOOKS => second_looks += 1,
            Ok(found) => return Ok((consumer, found)),
            Err(code) => judge(&consumer, code, &topic, outage)?,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

fn ask(consumer: &BaseConsumer<Context>, topic: &str) -> Result<Found, RDKafkaErrorCode> {
    let metadata = std::thread::scope(|scope| {
        let asking = scope.spawn(|| consumer.fetch_metadata(Some(topic), PATIENCE));
        // Nobody else serves its log and its errors yet, and an outage is told before the question is given up.
        while !asking.is_finished() {
            while consumer.poll(TURN).is_some() {}
        }
        asking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let metadata = metadata.map_err(|error| error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail))?;
    match metadata.topics().first().and_then(|topic| topic.error()).map(RDKafkaErrorCode::from) {
        None => Ok(Found::There),
        Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic) => Ok(Found::Missing),
        Some(code) => Err(code),
    }
}

/// What may heal is waited for; what a person has to change is an error.
fn judge(consumer: &BaseConsumer<Context>, code: RDKafkaErrorCode, topic: &str, outage: &Outage) -> Result<(), SourceError> {
    use RDKafkaErrorCode as E;
    let trouble = consumer.context().take_trouble();
    if let Some((_, reason)) = trouble.as_ref().filter(|(code, _)| is_refusal(*code)) {
        return Err(SourceError::misconfigured(
            "property",
            format!("the broker refuses the credentials: {reason}"),
            "check .login(…), or the sasl.* and ssl.* properties",
        ));
    }
    match code {
        E::TopicAuthorizationFailed => {
            Err(SourceError::misconfigured("topic", format!("not allowed to see the topic `{topic}`"), "grant Describe and Read on it"))
        }
        E::InvalidTopic => {
            Err(SourceError::misconfigured("topic", format!("`{topic}` is no name for a topic"), "name a topic that exists"))
        }
        code if Outage::is(code) => {
            outage.tell(&trouble.map_or_else(|| format!("no answer within {PATIENCE:?}"), |(_, reason)| reason));
            Ok(())
        }
        _ => {
            tracing::warn!(topic, %code, "the broker does not say yet whether the topic exists; asking again");
            Ok(())
        }
    }
}

fn admin(kafka: &Kafka, outage: &Arc<Outage>) -> Result<AdminClient<Log>, SourceError> {
    kafka.producer_config().create_with_context(Log(outage.clone())).map_err(wrong_setting)
}

async fn create(admin: &AdminClient<Log>, setting: &str, name: &str, partitions: u16, replication: u16) -> Result<(), SourceError> {
    let topic = NewTopic::new(name, i32::from(partitions), TopicReplication::Fixed(i32::from(replication)));
    let topic = KEEPS.iter().fold(topic, |topic, (key, value)| topic.set(key, value));
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE * 2));
    let failed = match admin.create_topics([&topic], &options).await {
        Ok(results) => results.into_iter().find_map(Result::err).map(|(_, code)| code.to_string()),
        Err(error) => Some(error.to_string()),
    };
    match failed {
        // Another member was quicker.
        Some(text) if text == RDKafkaErrorCode::TopicAlreadyExists.to_string() => Ok(()),
        Some(text) => {
            Err(SourceError::misconfigured(setting, format!("the topic `{name}` could not be created: {text}"), "create it by hand"))
        }
        None => {
            tracing::info!(topic = name, partitions, replication, "topic created");
            Ok(())
        }
    }
}

/// A dead letter that expires is a lost message: refuses such topics, where the broker lets itself be asked.
async fn check_retention(kafka: &Kafka, outage: &Arc<Outage>, topics: &[(&str, &str)]) -> Result<(), SourceError> {
    if topics.is_empty() {
        return Ok(());
    }
    let asked: Vec<_> = topics.iter().map(|(_, name)| ResourceSpecifier::Topic(name)).collect();
    let described = admin(kafka, outage)?.describe_configs(&asked, &AdminOptions::new().request_timeout(Some(PATIENCE))).await;
    let described = match described {
        Ok(described) => described,
        Err(error) => {
            tracing::warn!(%error, "it is not known whether the dead-letter and in-doubt topics keep their messages without limit");
            return Ok(());
        }
    };
    for ((setting, name), topic) in topics.iter().zip(described) {
        match topic {
            Ok(topic) => {
                let limits = limits(|key| topic.get(key)?.value.as_deref());
                if !limits.is_empty() {
                    return Err(forgetful(kafka, setting, name, &limits));
                }
            }
            Err(error) => tracing::warn!(
                topic = name,
                %error,
                "it is not known whether the topic keeps its messages without limit; grant DescribeConfigs on it"
            ),
        }
    }
    Ok(())
}

/// The settings by which a topic loses messages, as they are and as they have to be.
fn limits<'a>(value: impl Fn(&str) -> Option<&'a str>) -> Vec<(String, String)> {
    let forgets = |key: &str, is: &str, keeps: &str| match key {
        "cleanup.policy" => is.contains("compact"),
        _ => is != keeps,
    };
    let found = KEEPS.iter().filter_map(|(key, keeps)| Some((key, value(key)?, keeps)));
    found
        .filter(|(key, is, keeps)| forgets(key, is, keeps))
        .map(|(key, is, keeps)| (format!("{key}={is}"), format!("{key}={keeps}")))
        .collect()
}

fn forgetful(kafka: &Kafka, setting: &str, name: &str, limits: &[(String, String)]) -> SourceError {
    let (are, keep): (Vec<&str>, Vec<&str>) = limits.iter().map(|(is, keeps)| (is.as_str(), keeps.as_str())).unzip();
    SourceError::misconfigured(
        setting,
        format!("the topic `{name}` loses messages that nobody has looked at ({})", are.join(", ")),
        format!(
            "let it keep them: kafka-configs.sh --bootstrap-server {} --alter --entity-type topics --entity-name {name} \
             --add-config {}; or accept the loss: .accept_limited_retention()",
            kafka.brokers,
            keep.join(",")
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited(config: &[(&str, &str)]) -> Vec<String> {
        let value = |key: &str| config.iter().find(|(it, _)| *it == key).map(|(_, value)| *value);
        limits(value).into_iter().map(|(is, _)| is).collect()
    }

    #[test]
    fn a_topic_that_loses_messages_is_told_from_one_that_keeps_them() {
        assert_eq!(limited(&KEEPS), [""; 0]);
        // What the broker does not tell is not held against it.
        assert_eq!(limited(&[]), [""; 0]);
        assert_eq!(limited(&[("retention.ms", "604800000"), ("retention.bytes", "-1")]), ["retention.ms=604800000"]);
        assert_eq!(
            limited(&[("retention.bytes", "1"), ("cleanup.policy", "compact,delete")]),
            ["retention.bytes=1", "cleanup.policy=compact,delete"]
        );
    }
}
