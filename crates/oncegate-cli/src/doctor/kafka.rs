//! Kafka: are the topics there, may they be read, and do they keep what nobody has looked at?

mod rights;

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode;

use self::rights::Says;
use super::{Findings, Level};
use crate::config::Config;
use crate::failure::Failure;
use crate::letters::{Shelf, kafka};
use crate::say::span;

/// How long one question may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is told of a topic that is there.
#[derive(Clone, Copy)]
struct Seen {
    /// In the cluster.
    brokers: usize,
    replicas: usize,
    /// One of its partitions.
    partition: i32,
}

/// A topic that is there, with how it is configured.
struct Topic {
    brokers: usize,
    replicas: usize,
    config: BTreeMap<String, String>,
}

impl Topic {
    fn number(&self, key: &str) -> Option<i64> {
        self.config.get(key)?.parse().ok()
    }
}

pub(super) async fn look(config: &Config, findings: &mut Findings) -> Result<(), Failure> {
    let name = kafka::topic(config)?;
    let letters = [
        (
            "dead-letter-topic-missing",
            kafka::destination(config, Shelf::DeadLetters)?,
        ),
        (
            "in-doubt-topic-missing",
            kafka::destination(config, Shelf::InDoubt)?,
        ),
    ];
    let brokers = config.text("kafka.brokers").unwrap_or_default().to_owned();
    let consumer = kafka::consumer(config)?;
    let names: Vec<String> = std::iter::once(&name)
        .chain(letters.iter().map(|(_, name)| name))
        .cloned()
        .collect();
    let asked = tokio::task::spawn_blocking(move || {
        let mut found = Vec::new();
        for name in &names {
            found.push(seen(&consumer, name));
            // Who does not answer is asked no more.
            if matches!(found.last(), Some(Err(Unseen::Away(_)))) {
                break;
            }
        }
        found
    });
    let found = asked
        .await
        .map_err(|error| Failure::server(error.to_string()))?;
    let mut found = found.into_iter();
    let mut there = Vec::new();
    for (code, name) in std::iter::once(("topic-missing", name.clone())).chain(letters) {
        match found.next() {
            Some(Ok(Found::There(seen))) => there.push((name, seen)),
            Some(Ok(Found::Missing { brokers: count })) => {
                let replicas = replicas(count);
                let what = if code == "topic-missing" {
                    "it does not exist"
                } else {
                    "it does not exist, so that nothing can be set aside"
                };
                let (lets, keeps) = match code {
                    "topic-missing" => (String::new(), ""),
                    _ => (
                        format!(
                            "let the consumer create it: kafka.create-partitions = 1 and kafka.create-replicas = {replicas}; or "
                        ),
                        " --config retention.ms=-1 --config retention.bytes=-1",
                    ),
                };
                let remedy = format!(
                    "{lets}create it: kafka-topics.sh --bootstrap-server {brokers} --create --topic {name} --replication-factor {replicas}{keeps} \
                     (`kafka-topics` in some packages; in the Docker image it stands in /opt/kafka/bin)"
                );
                findings.error(code, format!("Kafka topic {name}"), what, remedy);
            }
            Some(Err(Unseen::Forbidden(remedy, said))) => {
                findings.error(
                    "kafka-lacks-a-right",
                    format!("Kafka topic {name}"),
                    said,
                    remedy,
                );
            }
            Some(Err(Unseen::Away(error))) => {
                let remedy = "start it, or correct kafka.brokers, and kafka.properties if it wants TLS or a login";
                findings.error("kafka-away", format!("Kafka at {brokers}"), error, remedy);
                return Ok(());
            }
            None => {}
        }
    }
    let source = there
        .iter()
        .find(|(it, _)| *it == name)
        .map(|(_, seen)| seen.partition);
    let admin: AdminClient<DefaultClientContext> = kafka::client(config, &[])?;
    let topics = describe(&admin, there, findings).await;
    judge(&brokers, &name, config, &topics, findings);
    match source {
        Some(partition) => look_at_rights(config, &name, partition, findings).await,
        None => Ok(()),
    }
}

/// What is wrong with how the topics are configured.
fn judge(
    brokers: &str,
    name: &str,
    config: &Config,
    topics: &BTreeMap<String, Topic>,
    findings: &mut Findings,
) {
    let source = topics.get(name);
    if let Some(source) = source {
        window(config, name, source, findings);
    }
    for (name, letters) in topics.iter().filter(|(it, _)| *it != name) {
        keeps(brokers, name, letters, findings);
        if let (Some(theirs), Some(ours)) = (
            source.and_then(|it| it.number("max.message.bytes")),
            letters.number("max.message.bytes"),
        ) && ours < theirs
        {
            let what = format!(
                "it takes messages of {ours} bytes, and those that are consumed may have {theirs}: such a one is set aside without its body"
            );
            findings.warning(
                "letters-too-small",
                format!("Kafka topic {name}"),
                what,
                format!("set max.message.bytes={theirs} there"),
            );
        }
    }
}

/// Whether the user may read what is consumed, and see the group, where one is configured.
///
/// # Errors
/// A broker that told of the topic says nothing of one of them.
async fn look_at_rights(
    config: &Config,
    topic: &str,
    partition: i32,
    findings: &mut Findings,
) -> Result<(), Failure> {
    let group = config.text("kafka.group").map(str::to_owned);
    let reader = kafka::consumer(config)?;
    let member: Option<BaseConsumer> = match &group {
        Some(group) => Some(kafka::client(
            config,
            &[("group.id", group), ("enable.auto.commit", "false")],
        )?),
        None => None,
    };
    let name = topic.to_owned();
    let asked = tokio::task::spawn_blocking(move || {
        (
            rights::read(&reader, &name, partition),
            member.map(|member| rights::see_group(&member, &name, partition)),
        )
    });
    let (read, seen) = asked
        .await
        .map_err(|error| Failure::server(error.to_string()))?;
    let mut untold = Vec::new();
    let mut note = |says: Says, at: String, what: &str, remedy: String| match says {
        Says::Yes => {}
        Says::No(code) => {
            findings.error("kafka-lacks-a-right", at, format!("{what}: {code}"), remedy)
        }
        Says::Nothing(why) => untold.push(format!(
            "{at}: what the user may do with it is not told ({why})"
        )),
    };
    let (what, remedy) = (
        "the user may see it and not read it",
        format!("grant Read on the topic {topic} to the user (kafka-acls.sh)"),
    );
    note(read, format!("Kafka topic {topic}"), what, remedy);
    if let (Some(group), Some(seen)) = (group, seen) {
        let (what, remedy) = (
            "the user may not use it",
            format!("grant Read on the group {group} to the user (kafka-acls.sh)"),
        );
        note(seen, format!("Kafka group {group}"), what, remedy);
    }
    if untold.is_empty() {
        Ok(())
    } else {
        Err(Failure::server(untold.join("; ")))
    }
}

/// Why a topic was not seen.
enum Unseen {
    /// The user lacks a right: what to do about it, and what the broker said.
    Forbidden(String, String),
    /// No broker answered, or with another error.
    Away(String),
}

/// What is told of a topic.
enum Found {
    There(Seen),
    /// In a cluster of so many brokers.
    Missing {
        brokers: usize,
    },
}

/// As many copies as a cluster of this size can hold, and three at most.
fn replicas(brokers: usize) -> usize {
    brokers.clamp(1, 3)
}

fn seen(consumer: &impl Consumer, name: &str) -> Result<Found, Unseen> {
    let metadata = consumer
        .fetch_metadata(Some(name), PATIENCE)
        .map_err(|error| match error.rdkafka_error_code() {
            Some(code) if grant(name, code).is_some() => unseen(name, code),
            _ => Unseen::Away(format!("it cannot be asked: {error}")),
        })?;
    let brokers = metadata.brokers().len();
    let missing = Found::Missing { brokers };
    let Some(topic) = metadata.topics().first() else {
        return Ok(missing);
    };
    match topic.error().map(RDKafkaErrorCode::from) {
        None => Ok(topic.partitions().first().map_or(missing, |first| {
            let replicas = topic
                .partitions()
                .iter()
                .map(|partition| partition.replicas().len())
                .min()
                .unwrap_or(0);
            Found::There(Seen {
                brokers,
                replicas,
                partition: first.id(),
            })
        })),
        Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic) => {
            Ok(missing)
        }
        Some(code) => Err(unseen(name, code)),
    }
}

fn unseen(name: &str, code: RDKafkaErrorCode) -> Unseen {
    let said = format!("the topic {name}: {code}");
    match grant(name, code) {
        Some(remedy) => Unseen::Forbidden(
            remedy,
            format!(
                "the user may not look at it: a broker shows a topic to who may Describe it ({said})"
            ),
        ),
        None => Unseen::Away(said),
    }
}

/// The right to give where this is what a broker says of a topic; `None` where no right is missing.
fn grant(name: &str, code: RDKafkaErrorCode) -> Option<String> {
    match code {
        RDKafkaErrorCode::TopicAuthorizationFailed => Some(format!(
            "grant Describe on the topic {name} to the user (kafka-acls.sh)"
        )),
        RDKafkaErrorCode::ClusterAuthorizationFailed => {
            Some("grant Describe on the cluster to the user (kafka-acls.sh)".to_owned())
        }
        _ => None,
    }
}

async fn describe(
    admin: &AdminClient<DefaultClientContext>,
    there: Vec<(String, Seen)>,
    findings: &mut Findings,
) -> BTreeMap<String, Topic> {
    if there.is_empty() {
        return BTreeMap::new();
    }
    // The broker wants to be asked of each once.
    let there: BTreeMap<String, Seen> = there.into_iter().collect();
    let resources: Vec<_> = there
        .keys()
        .map(|name| ResourceSpecifier::Topic(name))
        .collect();
    let asked = admin
        .describe_configs(
            &resources,
            &AdminOptions::new().request_timeout(Some(PATIENCE)),
        )
        .await;
    // Of each what it says of itself, or why nothing is said of any.
    let answers: Vec<Result<_, String>> = match asked {
        Ok(answers) => answers
            .into_iter()
            .map(|answer| answer.map_err(|code| code.to_string()))
            .collect(),
        Err(error) => there.iter().map(|_| Err(error.to_string())).collect(),
    };
    let mut topics = BTreeMap::new();
    for ((name, seen), described) in there.iter().zip(answers) {
        match described {
            Ok(resource) => {
                let config = resource
                    .entries
                    .iter()
                    .filter_map(|entry| Some((entry.name.clone(), entry.value.clone()?)));
                topics.insert(
                    name.clone(),
                    Topic {
                        brokers: seen.brokers,
                        replicas: seen.replicas,
                        config: config.collect(),
                    },
                );
            }
            Err(why) => findings.warning(
                "topic-not-described",
                format!("Kafka topic {name}"),
                format!("for how long it keeps messages is not told ({why})"),
                "grant DescribeConfigs on it",
            ),
        }
    }
    topics
}

/// What is kept for longer than it is remembered is handled again when the group is set back.
fn window(config: &Config, name: &str, topic: &Topic, findings: &mut Findings) {
    let deletes = topic
        .config
        .get("cleanup.policy")
        .is_none_or(|policy| policy.contains("delete"));
    let kept = topic
        .number("retention.ms")
        .filter(|_| deletes)
        .and_then(|ms| u64::try_from(ms).ok())
        .map(Duration::from_millis);
    if kept.is_none_or(|kept| kept > config.window()) {
        let said = kept.map_or_else(
            || "without limit".to_owned(),
            |kept| format!("for {}", span(kept)),
        );
        findings.warning(
            "window-shorter-than-retention",
            format!("Kafka topic {name}"),
            format!(
                "it keeps messages {said}, and ids are remembered for {}: when the group is set back, what was handled before that is handled \
                 again, or stands in doubt in at most once",
                span(config.window())
            ),
            "lengthen gate.dedup-window and the consumer's `.dedup_window(…)` to how far back the group may be set, or shorten retention.ms",
        );
    }
}

/// Whether a topic of letters keeps them, and takes them.
fn keeps(brokers: &str, name: &str, topic: &Topic, findings: &mut Findings) {
    let at = format!("Kafka topic {name}");
    let alter = |config: &str| {
        format!(
            "kafka-configs.sh --bootstrap-server {brokers} --alter --entity-type topics --entity-name {name} --add-config {config}"
        )
    };
    let wrong = |key: &str| {
        topic
            .config
            .get(key)
            .filter(|value| *value != "-1")
            .map(|value| format!("{key}={value}"))
    };
    let limits: Vec<String> = ["retention.ms", "retention.bytes"]
        .into_iter()
        .filter_map(wrong)
        .collect();
    if !limits.is_empty() {
        let what = format!(
            "it loses messages that nobody has looked at ({})",
            limits.join(", ")
        );
        findings.error(
            "letters-expire",
            &at,
            what,
            alter("retention.ms=-1,retention.bytes=-1"),
        );
    }
    if let Some(policy) = topic
        .config
        .get("cleanup.policy")
        .filter(|policy| policy.contains("compact"))
    {
        let what = format!("it keeps the last message of each key alone (cleanup.policy={policy})");
        findings.error(
            "letters-are-compacted",
            &at,
            what,
            alter("cleanup.policy=delete"),
        );
    }
    let needed = topic
        .number("min.insync.replicas")
        .and_then(|it| usize::try_from(it).ok())
        .unwrap_or(1);
    if needed > topic.replicas {
        let what = format!(
            "it has {} copies and wants {needed} in sync (min.insync.replicas): it takes nothing",
            topic.replicas
        );
        findings.error(
            "letters-are-refused",
            &at,
            what,
            alter(&format!("min.insync.replicas={}", topic.replicas)),
        );
    } else if topic.replicas == 1 {
        let what = "it has one copy: the loss of one disk loses what was set aside";
        findings.add(
            Level::Advice,
            "letters-have-one-copy",
            &at,
            what,
            match replicas(topic.brokers) {
                1 => "the cluster has one broker: add two, then reassign its partitions (kafka-reassign-partitions.sh)".to_owned(),
                copies => format!("reassign its partitions to {copies} brokers (kafka-reassign-partitions.sh), or create it anew with --replication-factor {copies}"),
            },
        );
    }
}
