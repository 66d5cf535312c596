//! Which topic a log belongs to, and whether its offsets repeat those of an earlier topic.

use std::fmt;
use std::sync::Arc;

/// The topic that is read, and whether its offsets repeat those of an earlier topic of this name.
#[derive(Clone, Debug, Default)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
pub(crate) struct LogIdentity {
    /// The ids of the topic and its cluster, if they are known.
    pub(crate) identity: Option<TopicIdentity>,
    /// Whether `IdSource::position()` makes unique message ids of this log.
    pub(crate) position_ids: PositionIds,
}

/// Whether the message ids that `IdSource::position()` makes from topic, partition and offset are
/// unique.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum PositionIds {
    /// Each offset belongs to one message.
    #[default]
    Unique,
    /// The offsets from `from` to below `to` may also belong to earlier messages of a topic of this
    /// name: the topic was recreated or is mirrored, or its log was truncated.
    MayRepeat { from: i64, to: i64 },
}

impl PositionIds {
    /// The message ids of a recreated topic, or of a mirrored topic on another cluster: any may
    /// repeat.
    pub(crate) const RECREATED: Self = Self::MayRepeat {
        from: super::start::LOG_START,
        to: i64::MAX,
    };

    /// The message ids of a log that was truncated at `from` after it was read to `to`: those of
    /// the offsets in between may repeat, and those that could repeat before the truncation still
    /// may.
    pub(super) fn after_truncation(self, from: i64, to: i64) -> Self {
        match self {
            Self::Unique => Self::MayRepeat { from, to },
            Self::MayRepeat {
                from: before,
                to: after,
            } => Self::MayRepeat {
                from: before.min(from),
                to: after.max(to),
            },
        }
    }

    pub(crate) fn may_repeat(self, offset: i64) -> bool {
        matches!(self, Self::MayRepeat { from, to } if (from..to).contains(&offset))
    }
}

/// The identity of a topic, which is committed as the metadata of each offset. Kafka assigns each
/// topic an id when it is created; a mirrored topic on another cluster has another id.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct TopicIdentity {
    pub(crate) topic_id: Arc<str>,
    /// `None` if the broker reports no cluster id.
    pub(crate) cluster_id: Option<Arc<str>>,
}

/// How the current topic of a name relates to the topic that an offset was committed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TopicMatch {
    /// The same topic.
    Same,
    /// The topic was deleted and created again, so the offset belongs to the deleted topic.
    Recreated,
    /// A mirrored topic on another cluster, whose mirror translated the offset.
    Mirrored,
    /// Recreated or mirrored; without a cluster id the two cannot be distinguished.
    Ambiguous,
}

impl TopicIdentity {
    /// Compares the topic that an offset was committed for with the current topic of that name.
    ///
    /// Topic ids are unique across clusters, so the same id means the same topic.
    pub(crate) fn compare(&self, current: &Self) -> TopicMatch {
        match (&self.cluster_id, &current.cluster_id) {
            _ if self.topic_id == current.topic_id => TopicMatch::Same,
            (Some(committed), Some(current)) if committed == current => TopicMatch::Recreated,
            (Some(_), Some(_)) => TopicMatch::Mirrored,
            (None, _) | (_, None) => TopicMatch::Ambiguous,
        }
    }

    /// Parses the output of [`fmt::Display`]; `None` for any other text, such as metadata that
    /// another program committed.
    pub(crate) fn parse(metadata: &str) -> Option<Self> {
        let ids = metadata.strip_prefix(TOPIC_ID)?;
        let (topic_id, cluster_id) = match ids.split_once(CLUSTER_ID) {
            // The cluster id comes last, because it may be any text.
            Some((topic_id, cluster_id)) => {
                (topic_id, Some(cluster_id).filter(|it| !it.is_empty()))
            }
            None => (ids, None),
        };
        is_topic_id(topic_id).then(|| Self {
            topic_id: Arc::from(topic_id),
            cluster_id: cluster_id.map(Arc::from),
        })
    }
}

const TOPIC_ID: &str = "topic-id=";
const CLUSTER_ID: &str = " cluster-id=";

/// The format of a committed offset's metadata: `topic-id=… cluster-id=…`.
impl fmt::Display for TopicIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{TOPIC_ID}{}", self.topic_id)?;
        self.cluster_id
            .iter()
            .try_for_each(|cluster_id| write!(f, "{CLUSTER_ID}{cluster_id}"))
    }
}

/// Whether this is 16 bytes in base64 without padding, as Kafka and librdkafka print topic ids.
fn is_topic_id(text: &str) -> bool {
    text.len() == 22
        && text
            .bytes()
            .all(|it| it.is_ascii_alphanumeric() || b"-_+/".contains(&it))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOPIC: &str = "F2xUbUAeQcSPGv0PhIKTZg";
    const OTHER_TOPIC: &str = "q5BZ55PYTTyxda8B1C5Amg";
    const CLUSTER: &str = "b25jZWdhdGUta2Fma2EtMQ";
    const OTHER_CLUSTER: &str = "b25jZWdhdGUta2Fma2EtMg";

    fn identity(topic_id: &str, cluster_id: Option<&str>) -> TopicIdentity {
        TopicIdentity {
            topic_id: topic_id.into(),
            cluster_id: cluster_id.map(Arc::from),
        }
    }

    #[test]
    fn the_same_topic_id_is_the_same_topic_on_any_cluster() {
        for committed in [Some(CLUSTER), Some(OTHER_CLUSTER), None] {
            for current in [Some(CLUSTER), Some(OTHER_CLUSTER), None] {
                assert_eq!(
                    identity(TOPIC, committed).compare(&identity(TOPIC, current)),
                    TopicMatch::Same
                );
            }
        }
    }

    #[test]
    fn another_topic_id_on_the_same_cluster_is_a_recreated_topic() {
        assert_eq!(
            identity(TOPIC, Some(CLUSTER)).compare(&identity(OTHER_TOPIC, Some(CLUSTER))),
            TopicMatch::Recreated
        );
    }

    #[test]
    fn another_topic_id_on_another_cluster_is_a_mirrored_topic() {
        assert_eq!(
            identity(TOPIC, Some(CLUSTER)).compare(&identity(OTHER_TOPIC, Some(OTHER_CLUSTER))),
            TopicMatch::Mirrored
        );
    }

    #[test]
    fn another_topic_id_without_a_cluster_id_on_either_side_is_ambiguous() {
        for (committed, current) in [(Some(CLUSTER), None), (None, Some(CLUSTER)), (None, None)] {
            assert_eq!(
                identity(TOPIC, committed).compare(&identity(OTHER_TOPIC, current)),
                TopicMatch::Ambiguous
            );
        }
    }

    #[test]
    fn metadata_is_parsed_as_it_was_written() {
        for written in [
            identity(TOPIC, Some(CLUSTER)),
            identity(TOPIC, Some("any text, cluster-id=x too")),
            identity(TOPIC, None),
        ] {
            assert_eq!(TopicIdentity::parse(&written.to_string()), Some(written));
        }
        assert_eq!(
            TopicIdentity::parse(&format!("topic-id={TOPIC} cluster-id=")),
            Some(identity(TOPIC, None))
        );
    }

    #[test]
    fn metadata_of_another_program_names_no_topic() {
        let longer = format!("topic-id={TOPIC} by hand");
        for metadata in [
            "",
            "set by hand",
            "topic-id=",
            "topic-id=orders",
            "topic-id=orders cluster-id=x",
            &longer,
            "cluster-id=x",
        ] {
            assert_eq!(TopicIdentity::parse(metadata), None, "{metadata}");
        }
    }
}
