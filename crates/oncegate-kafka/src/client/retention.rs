//! Compares the retention of the topics with the required one and with the consumer's deduplication
//! window.

use std::time::Duration;

use oncegate_core::SourceError;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};

use super::log::LogContext;
use crate::settings::{Kafka, Retention};

/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The configuration of a topic with unlimited retention.
pub(crate) const UNLIMITED_RETENTION: [(&str, &str); 3] = [
    ("retention.ms", "-1"),
    ("retention.bytes", "-1"),
    ("cleanup.policy", "delete"),
];

/// Rejects dead-letter and in-doubt topics with limited retention, unless the settings accept it.
/// Warns if the deduplication window is longer than the retention of a dead-letter or in-doubt
/// topic, or shorter than the retention of a topic that is read. `destinations` are the dead-letter
/// and in-doubt topics, each as setting and name.
///
/// If the broker does not return a topic's configuration, this is logged, and the topic is
/// accepted.
///
/// # Errors
/// One of `destinations` has limited retention, and the settings do not accept it.
pub(crate) async fn check(
    kafka: &Kafka,
    client: impl FnOnce() -> Result<AdminClient<LogContext>, SourceError>,
    destinations: &[(&str, &str)],
) -> Result<(), SourceError> {
    // A source that is opened without a consumer has no window.
    let read = kafka
        .topics
        .iter()
        .map(|name| ("topic", name.as_str()))
        .filter(|_| kafka.window.is_some());
    let queried: Vec<(&str, &str)> = destinations.iter().copied().chain(read).collect();
    if queried.is_empty() {
        return Ok(());
    }
    let admin = client()?;
    let described = describe(&admin, &queried).await;
    for topic in described.iter().filter(|it| it.setting != "topic") {
        match kafka.window {
            _ if kafka.retention == Retention::Unlimited && !topic.limiting_settings.is_empty() => {
                return Err(limited_retention(kafka, topic));
            }
            Some(window) => topic.warn_if_shorter_than(window),
            None => {}
        }
    }
    if let Some(window) = kafka.window
        && let Some(long_retention) =
            retained_longer_than(window, described.iter().filter(|it| it.setting == "topic"))
    {
        let offsets = offsets_retention(admin, kafka.topics[0].clone()).await;
        let or_expire = offsets.map_or_else(String::new, |retention| {
            format!(
                " or expire, after {} without a member",
                format_duration(retention)
            )
        });
        tracing::warn!(
            window = format_duration(window),
            topics = long_retention.topics.join(", "),
            "deduplication window shorter than the topic retention: if the group's offsets are reset{or_expire}, messages that were handled \
             longer ago than the window are handled again, or become in doubt in at most once; {}",
            long_retention.remedy()
        );
    }
    Ok(())
}

/// The retention settings of a topic.
struct TopicConfig<'a> {
    /// The setting that names the topic: `topic`, `dead_letters` or `in_doubt`.
    setting: &'a str,
    name: &'a str,
    /// For how long messages are retained; `None` without a time limit.
    retention: Option<Duration>,
    /// The topic settings that limit retention, by time, size or compaction: each as `key=value`
    /// with its value, and with the value that removes the limit.
    limiting_settings: Vec<(String, String)>,
    /// The topic setting that determines `retention`, as `key=value`.
    retention_setting: String,
}

impl<'a> TopicConfig<'a> {
    fn of(setting: &'a str, name: &'a str, config: impl Fn(&str) -> Option<String>) -> Self {
        let limiting_settings = UNLIMITED_RETENTION
            .iter()
            .filter_map(|(key, unlimited)| Some((*key, config(key)?, *unlimited)))
            .filter(|(key, value, unlimited)| limits_retention(key, value, unlimited))
            .map(|(key, value, unlimited)| (format!("{key}={value}"), format!("{key}={unlimited}")))
            .collect();
        // A topic that is only compacted retains the last message of each key without a time limit.
        let deletes = config("cleanup.policy").is_none_or(|policy| policy.contains("delete"));
        let milliseconds = config("retention.ms")
            .and_then(|value| value.parse().ok())
            .filter(|_| deletes);
        let retention = milliseconds.map(Duration::from_millis);
        let retention_setting = match milliseconds {
            Some(milliseconds) => format!("retention.ms={milliseconds}"),
            None if deletes => "retention.ms=-1".to_owned(),
            None => "cleanup.policy=compact".to_owned(),
        };
        Self {
            setting,
            name,
            retention,
            limiting_settings,
            retention_setting,
        }
    }

    /// Warns if dead letters expire before the ids of their messages.
    fn warn_if_shorter_than(&self, window: Duration) {
        let Self {
            setting,
            name,
            retention_setting,
            ..
        } = self;
        if self.retention.is_some_and(|retention| retention < window) {
            tracing::warn!(
                setting,
                topic = name,
                retention = retention_setting,
                window = format_duration(window),
                "topic retention shorter than the deduplication window: the id of a dead letter is rejected until the window ends, also after the dead \
                 letter has expired; set retention.ms=-1 on the topic, or at least {}",
                window.as_millis()
            );
        }
    }
}

/// Topics that retain messages for longer than the window.
#[derive(Debug, PartialEq, Eq)]
struct LongRetention {
    /// A description of each topic and its retention.
    topics: Vec<String>,
    /// The longest retention; `None` without a limit.
    longest: Option<Duration>,
}

impl LongRetention {
    fn remedy(&self) -> String {
        match self.longest {
            Some(longest) => format!("set .dedup_window(…) to at least {}, or reduce the retention of the topic (retention.ms)", format_duration(longest)),
            None => "set .dedup_window(…) to how far back the group's offsets may ever be reset, or reduce the retention of the topic (retention.ms)".to_owned(),
        }
    }
}

/// The topics that retain messages for longer than the window; `None` if there are none.
fn retained_longer_than<'a>(
    window: Duration,
    topics: impl Iterator<Item = &'a TopicConfig<'a>>,
) -> Option<LongRetention> {
    let longer: Vec<&TopicConfig<'_>> = topics
        .filter(|it| it.retention.is_none_or(|retention| retention > window))
        .collect();
    let describe = |it: &&TopicConfig<'_>| {
        let time = it
            .retention
            .map_or_else(|| "without limit".to_owned(), format_duration);
        format!(
            "`{}` retains messages {}{time}, {}",
            it.name,
            if it.retention.is_some() { "for " } else { "" },
            it.retention_setting
        )
    };
    let topics: Vec<String> = longer.iter().map(describe).collect();
    let longest = longer
        .iter()
        .map(|it| it.retention)
        .collect::<Option<Vec<_>>>()
        .map(|all| all.into_iter().max().unwrap_or_default());
    (!topics.is_empty()).then_some(LongRetention { topics, longest })
}

/// Fetches the configurations of topics, given as setting and name. Logs the topics whose
/// configuration the broker did not return.
async fn describe<'a>(
    admin: &AdminClient<LogContext>,
    topics: &[(&'a str, &'a str)],
) -> Vec<TopicConfig<'a>> {
    let resources: Vec<_> = topics
        .iter()
        .map(|(_, name)| ResourceSpecifier::Topic(name))
        .collect();
    let answer = admin
        .describe_configs(
            &resources,
            &AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT)),
        )
        .await;
    let (mut described, mut unreadable, mut error) = (Vec::new(), Vec::new(), None);
    let answer = answer
        .map_err(|failed| error = Some(failed.to_string()))
        .unwrap_or_default();
    let mut answer = answer.into_iter();
    for (setting, name) in topics {
        match answer.next() {
            Some(Ok(topic)) => {
                described.push(TopicConfig::of(setting, name, |key| value(&topic, key)))
            }
            Some(Err(code)) => {
                error = Some(code.to_string());
                unreadable.push(*name);
            }
            None => unreadable.push(*name),
        }
    }
    if !unreadable.is_empty() {
        tracing::warn!(
            topics = unreadable.join(", "),
            error = error.unwrap_or_default(),
            "cannot read the configuration of topics, so their retention is not checked; grant DescribeConfigs on them"
        );
    }
    described
}

fn value(resource: &ConfigResource, key: &str) -> Option<String> {
    resource.get(key)?.value.clone()
}

/// For how long the broker retains the offsets of a group without members; `None` if it does not
/// return its configuration.
async fn offsets_retention(admin: AdminClient<LogContext>, topic: String) -> Option<Duration> {
    let queried = tokio::task::spawn_blocking(move || {
        let node = admin
            .inner()
            .fetch_metadata(Some(&topic), REQUEST_TIMEOUT)
            .ok()?
            .brokers()
            .first()?
            .id();
        Some((admin, node))
    });
    let (admin, node) = queried.await.ok().flatten()?;
    let options = AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT));
    let described = admin
        .describe_configs(&[ResourceSpecifier::Broker(node)], &options)
        .await
        .ok()?;
    let minutes: u64 = value(
        &described.into_iter().next()?.ok()?,
        "offsets.retention.minutes",
    )?
    .parse()
    .ok()?;
    Some(Duration::from_secs(minutes.saturating_mul(60)))
}

/// Formats a time in its largest whole unit.
fn format_duration(time: Duration) -> String {
    let seconds = time.as_secs();
    let whole = [
        (86_400, "day"),
        (3_600, "hour"),
        (60, "minute"),
        (1, "second"),
    ]
    .into_iter()
    .find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit));
    match whole {
        Some((unit, name)) if time.subsec_nanos() == 0 => format!(
            "{} {name}{}",
            seconds / unit,
            if seconds == unit { "" } else { "s" }
        ),
        _ => format!("{time:?}"),
    }
}

/// Whether this value of a topic setting limits retention. `unlimited` is the value that does not.
fn limits_retention(key: &str, value: &str, unlimited: &str) -> bool {
    match key {
        "cleanup.policy" => value.contains("compact"),
        _ => value != unlimited,
    }
}

/// The error for a dead-letter or in-doubt topic with limited retention.
fn limited_retention(kafka: &Kafka, topic: &TopicConfig<'_>) -> SourceError {
    let TopicConfig {
        setting,
        name,
        limiting_settings,
        ..
    } = topic;
    let (actual, unlimited): (Vec<&str>, Vec<&str>) = limiting_settings
        .iter()
        .map(|(actual, unlimited)| (actual.as_str(), unlimited.as_str()))
        .unzip();
    SourceError::misconfigured(
        *setting,
        format!(
            "the topic `{name}` has limited retention ({}), so messages may expire before they are inspected",
            actual.join(", ")
        ),
        format!(
            "set unlimited retention: kafka-configs.sh --bootstrap-server {} --alter --entity-type topics --entity-name {name} \
             --add-config {}; or accept the loss: .accept_limited_retention()",
            kafka.brokers,
            unlimited.join(",")
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn described<'a>(name: &'a str, config: &[(&str, &str)]) -> TopicConfig<'a> {
        TopicConfig::of("topic", name, |key| {
            config
                .iter()
                .find(|(it, _)| *it == key)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    fn limited(config: &[(&str, &str)]) -> Vec<String> {
        described("t", config)
            .limiting_settings
            .into_iter()
            .map(|(actual, _)| actual)
            .collect()
    }

    #[test]
    fn limited_retention_is_detected() {
        assert_eq!(limited(&UNLIMITED_RETENTION), [""; 0]);
        // A setting that the broker does not return does not count.
        assert_eq!(limited(&[]), [""; 0]);
        assert_eq!(
            limited(&[("retention.ms", "604800000"), ("retention.bytes", "-1")]),
            ["retention.ms=604800000"]
        );
        assert_eq!(
            limited(&[
                ("retention.bytes", "1"),
                ("cleanup.policy", "compact,delete")
            ]),
            ["retention.bytes=1", "cleanup.policy=compact,delete"]
        );
    }

    #[test]
    fn only_retention_longer_than_the_window_is_reported() {
        let week = described(
            "week",
            &[("retention.ms", "604800000"), ("cleanup.policy", "delete")],
        );
        let hour = described(
            "hour",
            &[
                ("retention.ms", "3600000"),
                ("cleanup.policy", "compact,delete"),
            ],
        );
        let ever = described(
            "ever",
            &[("retention.ms", "-1"), ("cleanup.policy", "delete")],
        );
        let last = described(
            "last",
            &[("retention.ms", "3600000"), ("cleanup.policy", "compact")],
        );
        let longer = |window, topics: &[&TopicConfig<'_>]| {
            retained_longer_than(window, topics.iter().copied()).map(|it| (it.topics, it.longest))
        };
        assert_eq!(
            longer(DAY * 7, &[&week, &hour]),
            None,
            "a window equal to the longest retention is sufficient"
        );
        let kept = vec!["`week` retains messages for 7 days, retention.ms=604800000".to_owned()];
        assert_eq!(longer(DAY, &[&week, &hour]), Some((kept, Some(DAY * 7))));
        let kept = [
            "`ever` retains messages without limit, retention.ms=-1",
            "`last` retains messages without limit, cleanup.policy=compact",
        ];
        assert_eq!(
            longer(DAY * 3_650, &[&week, &ever, &last]),
            Some((kept.map(str::to_owned).to_vec(), None))
        );
    }

    #[test]
    fn durations_are_formatted_in_their_largest_whole_unit() {
        let source = [
            (86_400 * 7, "7 days"),
            (86_400, "1 day"),
            (129_600, "36 hours"),
            (90, "90 seconds"),
            (0, "0ns"),
        ];
        for (seconds, text) in source {
            assert_eq!(format_duration(Duration::from_secs(seconds)), text);
        }
        assert_eq!(format_duration(Duration::from_millis(1_500)), "1.5s");
    }
}
