//! Kafka: checks that the topics exist, are readable, and keep dead letters.

mod permissions;

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode;

use self::permissions::Permission;
use super::{DoctorFindings, Severity};
use crate::config::Config;
use crate::destination::{Destination, kafka};
use crate::error::CliError;
use crate::output::duration_text;

/// The time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Metadata of an existing topic.
#[derive(Clone, Copy)]
struct TopicMetadata {
    /// The number of brokers in the cluster.
    brokers: usize,
    /// The lowest number of replicas of a partition.
    replicas: usize,
    /// The id of one partition.
    partition: i32,
}

/// An existing topic with its configuration.
struct TopicSettings {
    brokers: usize,
    replicas: usize,
    config: BTreeMap<String, String>,
}

impl TopicSettings {
    fn number(&self, key: &str) -> Option<i64> {
        self.config.get(key)?.parse().ok()
    }
}

/// Checks the settings as a consumer does, but for a missing `kafka.group`: the commands of this
/// tool also work without it.
///
/// # Errors
/// A consumer does not start with these settings.
pub(super) fn check_settings(config: &Config) -> Result<(), oncegate_config::Error> {
    let mut kafka = config.kafka()?;
    if !config.has("kafka.group") {
        kafka = kafka.group("oncegate-cli");
    }
    let checked = kafka.check_settings();
    checked
        .map_err(|error| oncegate_config::Error::of_source(oncegate_config::Broker::Kafka, error))
}

pub(super) async fn check(config: &Config, findings: &mut DoctorFindings) -> Result<(), CliError> {
    let name = kafka::topic(config)?;
    let destinations = [
        (
            "dead-letter-topic-missing",
            kafka::destination_topic(config, Destination::DeadLetters)?,
        ),
        (
            "in-doubt-topic-missing",
            kafka::destination_topic(config, Destination::InDoubt)?,
        ),
    ];
    let brokers = config.text("kafka.brokers").unwrap_or_default().to_owned();
    let consumer = kafka::consumer(config)?;
    let names: Vec<String> = std::iter::once(&name)
        .chain(destinations.iter().map(|(_, name)| name))
        .cloned()
        .collect();
    let task = tokio::task::spawn_blocking(move || {
        let mut lookups = Vec::new();
        for name in &names {
            lookups.push(look_up_topic(&consumer, name));
            // An unreachable broker would let each further request wait for its timeout.
            if matches!(lookups.last(), Some(Err(MetadataError::Unavailable(_)))) {
                break;
            }
        }
        lookups
    });
    let lookups = task
        .await
        .map_err(|error| CliError::server(error.to_string()))?;
    let mut lookups = lookups.into_iter();
    let mut existing = Vec::new();
    for (code, name) in std::iter::once(("topic-missing", name.clone())).chain(destinations) {
        match lookups.next() {
            Some(Ok(TopicLookup::Exists(metadata))) => existing.push((name, metadata)),
            Some(Ok(TopicLookup::Missing { .. }))
                if code != "topic-missing" && config.has("kafka.create-partitions") =>
            {
                findings.warning(
                    code,
                    format!("Kafka topic {name}"),
                    "it does not exist; a consumer creates it only when it starts (kafka.create-partitions), so one that runs cannot send to it",
                    "start the consumer, or restart it; if it has created its topics, check that the names under [kafka] are those of the consumer",
                );
            }
            Some(Ok(TopicLookup::Missing { brokers: count })) => {
                let replicas = oncegate::Kafka::replicas(count);
                let what = if code == "topic-missing" {
                    "it does not exist"
                } else {
                    "it does not exist, so messages cannot be dead-lettered or put in doubt"
                };
                let (create_by_consumer, retention) = match code {
                    "topic-missing" => (String::new(), ""),
                    _ => (
                        format!(
                            "let the consumer create it: kafka.create-partitions = 1 and kafka.create-replicas = {replicas}; or "
                        ),
                        " --config retention.ms=-1 --config retention.bytes=-1",
                    ),
                };
                let remedy = format!(
                    "{create_by_consumer}create it: kafka-topics.sh --bootstrap-server {brokers} --create --topic {name} --replication-factor {replicas}{retention} \
                     (`kafka-topics` in some packages; in /opt/kafka/bin in the Docker image)"
                );
                findings.error(code, format!("Kafka topic {name}"), what, remedy);
            }
            Some(Err(MetadataError::Forbidden(remedy, reply))) => {
                findings.error(
                    "kafka-permission-missing",
                    format!("Kafka topic {name}"),
                    reply,
                    remedy,
                );
            }
            Some(Err(MetadataError::Unavailable(error))) => {
                let remedy = "start it, or correct kafka.brokers, and kafka.properties if it requires TLS or SASL";
                findings.error(
                    "kafka-unreachable",
                    format!("Kafka at {brokers}"),
                    error,
                    remedy,
                );
                return Ok(());
            }
            None => {}
        }
    }
    let source = existing
        .iter()
        .find(|(it, _)| *it == name)
        .map(|(_, metadata)| metadata.partition);
    let admin: AdminClient<DefaultClientContext> = kafka::client(config, &[])?;
    let topics = describe(&admin, existing, findings).await;
    check_topics(&brokers, &name, config, &topics, findings);
    match source {
        Some(partition) => check_permissions(config, &name, partition, findings).await,
        None => Ok(()),
    }
}

/// Adds findings about the configuration of the topics.
fn check_topics(
    brokers: &str,
    name: &str,
    config: &Config,
    topics: &BTreeMap<String, TopicSettings>,
    findings: &mut DoctorFindings,
) {
    let source = topics.get(name);
    if let Some(source) = source {
        check_retention(config, name, source, findings);
    }
    for (name, destination) in topics.iter().filter(|(it, _)| *it != name) {
        check_destination_topic(brokers, name, destination, findings);
        if let (Some(consumed_limit), Some(limit)) = (
            source.and_then(|it| it.number("max.message.bytes")),
            destination.number("max.message.bytes"),
        ) && limit < consumed_limit
        {
            let what = format!(
                "it accepts messages of {limit} bytes, and the consumed topic accepts {consumed_limit}: larger messages are dead-lettered without their body"
            );
            findings.warning(
                "dead-letter-topic-max-message-bytes",
                format!("Kafka topic {name}"),
                what,
                format!("set max.message.bytes={consumed_limit} for it"),
            );
        }
    }
}

/// Checks that the user may read the topic and use the group, if one is configured.
///
/// # Errors
/// A permission cannot be determined, because the broker does not answer or returns another error.
async fn check_permissions(
    config: &Config,
    topic: &str,
    partition: i32,
    findings: &mut DoctorFindings,
) -> Result<(), CliError> {
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
    let task = tokio::task::spawn_blocking(move || {
        (
            permissions::check_topic_read(&reader, &name, partition),
            member.map(|member| permissions::check_group_access(&member, &name, partition)),
        )
    });
    let (topic_permission, group_permission) = task
        .await
        .map_err(|error| CliError::server(error.to_string()))?;
    let mut unknown = Vec::new();
    let mut note = |permission: Permission, at: String, what: &str, remedy: String| match permission
    {
        Permission::Granted => {}
        Permission::Denied(code) => findings.error(
            "kafka-permission-missing",
            at,
            format!("{what}: {code}"),
            remedy,
        ),
        Permission::Unknown(why) => unknown.push(format!(
            "{at}: the permissions of the user cannot be determined ({why})"
        )),
    };
    let (what, remedy) = (
        "the user may describe it but not read it",
        format!("grant Read on the topic {topic} to the user (kafka-acls.sh)"),
    );
    note(
        topic_permission,
        format!("Kafka topic {topic}"),
        what,
        remedy,
    );
    if let (Some(group), Some(permission)) = (group, group_permission) {
        let (what, remedy) = (
            "the user may not read it",
            format!("grant Read on the group {group} to the user (kafka-acls.sh)"),
        );
        note(permission, format!("Kafka group {group}"), what, remedy);
    }
    if unknown.is_empty() {
        Ok(())
    } else {
        Err(CliError::server(unknown.join("; ")))
    }
}

/// Why a metadata request failed.
enum MetadataError {
    /// The user lacks permission: the remedy, and the reply of the broker.
    Forbidden(String, String),
    /// No broker answered, or it returned another error.
    Unavailable(String),
}

/// The result of a metadata request.
enum TopicLookup {
    Exists(TopicMetadata),
    /// The number of brokers in the cluster.
    Missing {
        brokers: usize,
    },
}

fn look_up_topic(consumer: &impl Consumer, name: &str) -> Result<TopicLookup, MetadataError> {
    let metadata = consumer
        .fetch_metadata(Some(name), REQUEST_TIMEOUT)
        .map_err(|error| match error.rdkafka_error_code() {
            Some(code) if missing_grant(name, code).is_some() => metadata_error(name, code),
            _ => MetadataError::Unavailable(format!("metadata request failed: {error}")),
        })?;
    let brokers = metadata.brokers().len();
    let missing = TopicLookup::Missing { brokers };
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
            TopicLookup::Exists(TopicMetadata {
                brokers,
                replicas,
                partition: first.id(),
            })
        })),
        Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic) => {
            Ok(missing)
        }
        Some(code) => Err(metadata_error(name, code)),
    }
}

fn metadata_error(name: &str, code: RDKafkaErrorCode) -> MetadataError {
    let reply = format!("the topic {name}: {code}");
    match missing_grant(name, code) {
        Some(remedy) => {
            MetadataError::Forbidden(remedy, format!("the user may not describe it ({reply})"))
        }
        None => MetadataError::Unavailable(reply),
    }
}

/// The ACL to grant for this error; `None` if no permission is missing.
fn missing_grant(name: &str, code: RDKafkaErrorCode) -> Option<String> {
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

/// Reads the configuration of the topics. Adds a finding for each one that cannot be read.
async fn describe(
    admin: &AdminClient<DefaultClientContext>,
    existing: Vec<(String, TopicMetadata)>,
    findings: &mut DoctorFindings,
) -> BTreeMap<String, TopicSettings> {
    if existing.is_empty() {
        return BTreeMap::new();
    }
    // Each topic may occur only once in a request.
    let existing: BTreeMap<String, TopicMetadata> = existing.into_iter().collect();
    let resources: Vec<_> = existing
        .keys()
        .map(|name| ResourceSpecifier::Topic(name))
        .collect();
    let task = admin
        .describe_configs(
            &resources,
            &AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT)),
        )
        .await;
    // The configuration of each topic, or the error.
    let answers: Vec<Result<_, String>> = match task {
        Ok(answers) => answers
            .into_iter()
            .map(|answer| answer.map_err(|code| code.to_string()))
            .collect(),
        Err(error) => existing.iter().map(|_| Err(error.to_string())).collect(),
    };
    let mut topics = BTreeMap::new();
    for ((name, metadata), described) in existing.iter().zip(answers) {
        match described {
            Ok(resource) => {
                let config = resource
                    .entries
                    .iter()
                    .filter_map(|entry| Some((entry.name.clone(), entry.value.clone()?)));
                topics.insert(
                    name.clone(),
                    TopicSettings {
                        brokers: metadata.brokers,
                        replicas: metadata.replicas,
                        config: config.collect(),
                    },
                );
            }
            Err(why) => findings.warning(
                "topic-config-not-readable",
                format!("Kafka topic {name}"),
                format!("its configuration cannot be read ({why})"),
                "grant DescribeConfigs on it",
            ),
        }
    }
    topics
}

/// Warns if the topic keeps messages for longer than the dedup window: after an offset reset such
/// messages are handled again.
fn check_retention(
    config: &Config,
    name: &str,
    topic: &TopicSettings,
    findings: &mut DoctorFindings,
) {
    let deletes = topic
        .config
        .get("cleanup.policy")
        .is_none_or(|policy| policy.contains("delete"));
    let retention = topic
        .number("retention.ms")
        .filter(|_| deletes)
        .and_then(|ms| u64::try_from(ms).ok())
        .map(Duration::from_millis);
    if retention.is_none_or(|retention| retention > config.dedup_window()) {
        let how_long = retention.map_or_else(
            || "without limit".to_owned(),
            |retention| format!("for {}", duration_text(retention)),
        );
        findings.warning(
            "window-shorter-than-retention",
            format!("Kafka topic {name}"),
            format!(
                "it keeps messages {how_long}, and ids are remembered for {}: after an offset reset, older messages are handled \
                 again, or are in doubt in at most once",
                duration_text(config.dedup_window())
            ),
            "lengthen gate.dedup-window (`.dedup_window(…)`) to how far back offsets may be reset, or shorten retention.ms",
        );
    }
}

/// Checks that a dead-letter or in-doubt topic keeps messages and accepts them.
fn check_destination_topic(
    brokers: &str,
    name: &str,
    topic: &TopicSettings,
    findings: &mut DoctorFindings,
) {
    let at = format!("Kafka topic {name}");
    let alter = |config: &str| {
        format!(
            "kafka-configs.sh --bootstrap-server {brokers} --alter --entity-type topics --entity-name {name} --add-config {config}"
        )
    };
    let limit_of = |key: &str| {
        topic
            .config
            .get(key)
            .filter(|value| *value != "-1")
            .map(|value| format!("{key}={value}"))
    };
    let limits: Vec<String> = ["retention.ms", "retention.bytes"]
        .into_iter()
        .filter_map(limit_of)
        .collect();
    if !limits.is_empty() {
        let what = format!("it deletes unprocessed messages ({})", limits.join(", "));
        findings.error(
            "dead-letter-topic-limited-retention",
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
        let what = format!("it keeps only the last message of each key (cleanup.policy={policy})");
        findings.error(
            "dead-letter-topic-compacted",
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
            "it has {} replicas and requires {needed} in sync (min.insync.replicas): it rejects every message",
            topic.replicas
        );
        findings.error(
            "dead-letter-topic-min-insync-replicas",
            &at,
            what,
            alter(&format!("min.insync.replicas={}", topic.replicas)),
        );
    } else if topic.replicas == 1 {
        let what = "it has one replica: the loss of one disk loses its messages";
        findings.add(
            Severity::Advice,
            "dead-letter-topic-one-replica",
            &at,
            what,
            match oncegate::Kafka::replicas(topic.brokers) {
                1 => "the cluster has one broker: add two, then reassign its partitions (kafka-reassign-partitions.sh)".to_owned(),
                copies => format!("reassign its partitions to {copies} brokers (kafka-reassign-partitions.sh), or recreate it with --replication-factor {copies}"),
            },
        );
    }
}
