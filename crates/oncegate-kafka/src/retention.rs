//! For how long topics keep their messages, held against what they have to keep and against the
//! consumer's window.

use std::time::Duration;

use oncegate_core::SourceError;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};

use crate::kafka::{Kafka, Retention};
use crate::log::Log;

/// How long one question to the broker may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a topic needs to keep its messages until somebody takes them out.
pub(crate) const KEEPS: [(&str, &str); 3] = [
    ("retention.ms", "-1"),
    ("retention.bytes", "-1"),
    ("cleanup.policy", "delete"),
];

/// Refuses dead-letter and in-doubt topics that forget, unless that is accepted, and warns where
/// something is kept for longer than it is remembered, or forgotten sooner. `letters` are those
/// topics, each with its setting.
///
/// What a broker does not let itself be asked is said once, and is no error.
///
/// # Errors
/// A topic of `letters` loses messages, and nobody has accepted that.
pub(crate) async fn check(
    kafka: &Kafka,
    client: impl FnOnce() -> Result<AdminClient<Log>, SourceError>,
    letters: &[(&str, &str)],
) -> Result<(), SourceError> {
    // Nobody is told of a window by who opens the source without a consumer.
    let read = kafka
        .topics
        .iter()
        .map(|name| ("topic", name.as_str()))
        .filter(|_| kafka.window.is_some());
    let asked: Vec<(&str, &str)> = letters.iter().copied().chain(read).collect();
    if asked.is_empty() {
        return Ok(());
    }
    let admin = client()?;
    let described = describe(&admin, &asked).await;
    for topic in described.iter().filter(|it| it.setting != "topic") {
        match kafka.window {
            _ if kafka.retention == Retention::Unlimited && !topic.limits.is_empty() => {
                return Err(forgetful(kafka, topic));
            }
            Some(window) => topic.tell_if_forgotten_within(window),
            None => {}
        }
    }
    if let Some(window) = kafka.window
        && let Some(kept) = longer_than(window, described.iter().filter(|it| it.setting == "topic"))
    {
        let offsets = offsets_are_kept(admin, kafka.topics[0].clone()).await;
        let forgotten = offsets.map_or_else(String::new, |kept| {
            format!(", or after {} without a member", spoken(kept))
        });
        tracing::warn!(
            "window: {} is shorter than messages may come again ({}): when the group is set back{forgotten}, what was handled \
             longer ago than the window is handled again, or stands in doubt in at most once; {}",
            spoken(window),
            kept.topics.join(", "),
            kept.remedy()
        );
    }
    Ok(())
}

/// A topic as the broker describes it.
struct Described<'a> {
    setting: &'a str,
    name: &'a str,
    /// For how long a message can be read at the most; `None` without a limit of time.
    keeps: Option<Duration>,
    /// Where it may lose messages that nobody has looked at: the configuration as it is and as it
    /// has to be.
    limits: Vec<(String, String)>,
    /// What `keeps` was read from.
    said: String,
}

impl<'a> Described<'a> {
    fn of(setting: &'a str, name: &'a str, config: impl Fn(&str) -> Option<String>) -> Self {
        let found: Vec<(&str, String, &str)> = KEEPS
            .iter()
            .filter_map(|(key, keeps)| Some((*key, config(key)?, *keeps)))
            .filter(|(key, is, keeps)| forgets(key, is, keeps))
            .collect();
        let limits = found
            .iter()
            .map(|(key, is, keeps)| (format!("{key}={is}"), format!("{key}={keeps}")))
            .collect();
        // A topic that is compacted and nothing else keeps the last message of each key for ever.
        let deletes = config("cleanup.policy").is_none_or(|policy| policy.contains("delete"));
        let milliseconds = config("retention.ms")
            .and_then(|value| value.parse().ok())
            .filter(|_| deletes);
        let keeps = milliseconds.map(Duration::from_millis);
        let said = match milliseconds {
            Some(milliseconds) => format!("retention.ms={milliseconds}"),
            None if deletes => "retention.ms=-1".to_owned(),
            None => "cleanup.policy=compact".to_owned(),
        };
        Self {
            setting,
            name,
            keeps,
            limits,
            said,
        }
    }

    /// Says that a dead letter goes before the id of its message is free again.
    fn tell_if_forgotten_within(&self, window: Duration) {
        let Self {
            setting,
            name,
            said,
            ..
        } = self;
        if self.keeps.is_some_and(|keeps| keeps < window) {
            tracing::warn!(
                "{setting}: the topic `{name}` forgets messages ({said}) sooner than the window ({}) forgets their ids: until then an id \
                 is refused, and nobody can see why any more; set retention.ms=-1 there, or at least {}",
                spoken(window),
                window.as_millis()
            );
        }
    }
}

/// Topics that keep messages for longer than the window.
#[derive(Debug, PartialEq, Eq)]
struct Longer {
    /// Each with how long it keeps them.
    topics: Vec<String>,
    /// The longest; `None` without a limit.
    longest: Option<Duration>,
}

impl Longer {
    fn remedy(&self) -> String {
        match self.longest {
            Some(longest) => format!("set .window(…) to at least {}, or let the topic keep less (retention.ms)", spoken(longest)),
            None => "set .window(…) to how far back the group may ever be set, or let the topic keep less (retention.ms)".to_owned(),
        }
    }
}

fn longer_than<'a>(
    window: Duration,
    topics: impl Iterator<Item = &'a Described<'a>>,
) -> Option<Longer> {
    let longer: Vec<&Described<'_>> = topics
        .filter(|it| it.keeps.is_none_or(|keeps| keeps > window))
        .collect();
    let kept = |it: &&Described<'_>| {
        let time = it.keeps.map_or_else(|| "without limit".to_owned(), spoken);
        format!(
            "`{}` keeps them {}{time}, {}",
            it.name,
            if it.keeps.is_some() { "for " } else { "" },
            it.said
        )
    };
    let topics: Vec<String> = longer.iter().map(kept).collect();
    let longest = longer
        .iter()
        .map(|it| it.keeps)
        .collect::<Option<Vec<_>>>()
        .map(|all| all.into_iter().max().unwrap_or_default());
    (!topics.is_empty()).then_some(Longer { topics, longest })
}

/// Asks the broker; says once of which topics it does not tell.
async fn describe<'a>(
    admin: &AdminClient<Log>,
    topics: &[(&'a str, &'a str)],
) -> Vec<Described<'a>> {
    let resources: Vec<_> = topics
        .iter()
        .map(|(_, name)| ResourceSpecifier::Topic(name))
        .collect();
    let answer = admin
        .describe_configs(
            &resources,
            &AdminOptions::new().request_timeout(Some(PATIENCE)),
        )
        .await;
    let (mut described, mut untold, mut why) = (Vec::new(), Vec::new(), None);
    let answer = answer
        .map_err(|error| why = Some(error.to_string()))
        .unwrap_or_default();
    let mut answer = answer.into_iter();
    for (setting, name) in topics {
        match answer.next() {
            Some(Ok(topic)) => {
                described.push(Described::of(setting, name, |key| value(&topic, key)))
            }
            Some(Err(code)) => {
                why = Some(code.to_string());
                untold.push(*name);
            }
            None => untold.push(*name),
        }
    }
    if !untold.is_empty() {
        tracing::warn!(
            "it is not known for how long these topics keep their messages: {} ({}); grant DescribeConfigs on them",
            untold.join(", "),
            why.unwrap_or_default()
        );
    }
    described
}

fn value(resource: &ConfigResource, key: &str) -> Option<String> {
    resource.get(key)?.value.clone()
}

/// For how long the broker remembers the offsets of a group without members, where it says so.
async fn offsets_are_kept(admin: AdminClient<Log>, topic: String) -> Option<Duration> {
    let asked = tokio::task::spawn_blocking(move || {
        let node = admin
            .inner()
            .fetch_metadata(Some(&topic), PATIENCE)
            .ok()?
            .brokers()
            .first()?
            .id();
        Some((admin, node))
    });
    let (admin, node) = asked.await.ok().flatten()?;
    let options = AdminOptions::new().request_timeout(Some(PATIENCE));
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

/// A time as a person says it.
fn spoken(time: Duration) -> String {
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

fn forgets(key: &str, is: &str, keeps: &str) -> bool {
    match key {
        "cleanup.policy" => is.contains("compact"),
        _ => is != keeps,
    }
}

fn forgetful(kafka: &Kafka, topic: &Described<'_>) -> SourceError {
    let Described {
        setting,
        name,
        limits,
        ..
    } = topic;
    let (are, keep): (Vec<&str>, Vec<&str>) = limits
        .iter()
        .map(|(is, keeps)| (is.as_str(), keeps.as_str()))
        .unzip();
    SourceError::misconfigured(
        *setting,
        format!(
            "the topic `{name}` loses messages that nobody has looked at ({})",
            are.join(", ")
        ),
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

    const DAY: Duration = Duration::from_secs(86_400);

    fn described<'a>(name: &'a str, config: &[(&str, &str)]) -> Described<'a> {
        Described::of("topic", name, |key| {
            config
                .iter()
                .find(|(it, _)| *it == key)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    fn limited(config: &[(&str, &str)]) -> Vec<String> {
        described("t", config)
            .limits
            .into_iter()
            .map(|(is, _)| is)
            .collect()
    }

    #[test]
    fn a_topic_that_loses_messages_is_told_from_one_that_keeps_them() {
        assert_eq!(limited(&KEEPS), [""; 0]);
        // What the broker does not tell is not held against it.
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
    fn only_what_is_kept_for_longer_than_the_window_is_told() {
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
        let longer = |window, topics: &[&Described<'_>]| {
            longer_than(window, topics.iter().copied()).map(|it| (it.topics, it.longest))
        };
        assert_eq!(
            longer(DAY * 7, &[&week, &hour]),
            None,
            "a window of just as long is long enough"
        );
        let kept = vec!["`week` keeps them for 7 days, retention.ms=604800000".to_owned()];
        assert_eq!(longer(DAY, &[&week, &hour]), Some((kept, Some(DAY * 7))));
        let kept = [
            "`ever` keeps them without limit, retention.ms=-1",
            "`last` keeps them without limit, cleanup.policy=compact",
        ];
        assert_eq!(
            longer(DAY * 3_650, &[&week, &ever, &last]),
            Some((kept.map(str::to_owned).to_vec(), None))
        );
    }

    #[test]
    fn times_are_said_in_their_largest_whole_unit() {
        let said = [
            (86_400 * 7, "7 days"),
            (86_400, "1 day"),
            (129_600, "36 hours"),
            (90, "90 seconds"),
            (0, "0ns"),
        ];
        for (seconds, text) in said {
            assert_eq!(spoken(Duration::from_secs(seconds)), text);
        }
        assert_eq!(spoken(Duration::from_millis(1_500)), "1.5s");
    }
}
