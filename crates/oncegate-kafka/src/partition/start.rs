//! The start position of an assigned partition.

use super::log_identity::{TopicIdentity, TopicMatch};

/// The first offset of a new log. The log start offset is higher once records were removed.
pub(super) const LOG_START: i64 = 0;

/// The position from which a partition is read, as determined when it was assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum StartPosition {
    /// The offset that the group has committed.
    Committed(i64),
    /// The offset that was committed on another cluster. The topic mirrors the topic there.
    Mirrored(i64),
    /// The offset that was committed for a topic with another id. The current topic mirrors that
    /// topic, or was recreated.
    Ambiguous(i64),
    /// The beginning, because the topic was recreated. The committed offset is ignored.
    Recreated,
    /// The beginning: the partition was added to a topic of which the group has read other
    /// partitions.
    AddedPartition,
    /// The group has no committed offset for the partition.
    NoOffset,
    /// Unknown, because the group coordinator did not reply in time or refused the request.
    /// librdkafka fetches the committed offset itself before it reads.
    Unknown,
}

/// A committed offset.
#[derive(Clone, Debug)]
pub(crate) struct CommittedOffset {
    pub(crate) offset: i64,
    /// The topic that the offset was committed for, if the metadata names it.
    pub(crate) identity: Option<TopicIdentity>,
}

impl CommittedOffset {
    /// Compares the topic of this offset with the current topic of that name. Metadata without a
    /// topic id was written by another program or by an operator, so the offset is used without a
    /// comparison.
    fn compare(&self, current: Option<&TopicIdentity>) -> TopicMatch {
        let both = self.identity.as_ref().zip(current);
        both.map_or(TopicMatch::Same, |(committed, current)| {
            committed.compare(current)
        })
    }
}

impl StartPosition {
    /// The start of a partition with a committed offset.
    pub(crate) fn from_committed(
        committed: &CommittedOffset,
        current: Option<&TopicIdentity>,
    ) -> Self {
        match committed.compare(current) {
            TopicMatch::Same => Self::Committed(committed.offset),
            TopicMatch::Recreated => Self::Recreated,
            TopicMatch::Mirrored => Self::Mirrored(committed.offset),
            TopicMatch::Ambiguous => Self::Ambiguous(committed.offset),
        }
    }

    /// The start of a partition without a committed offset, given the committed offsets of the
    /// other partitions of its topic. If all of these belong to a deleted topic, the group has read
    /// nothing of the current topic, so the partition was not added to a topic that is read.
    pub(crate) fn without_offset(
        others: &[&CommittedOffset],
        current: Option<&TopicIdentity>,
    ) -> Self {
        let is_of_deleted_topic =
            |it: &&CommittedOffset| it.compare(current) == TopicMatch::Recreated;
        if others.is_empty() {
            Self::NoOffset
        } else if others.iter().all(is_of_deleted_topic) {
            Self::Recreated
        } else {
            Self::AddedPartition
        }
    }

    /// The offset to start at; `None` if the partition starts at the log start, or where librdkafka
    /// decides.
    pub(super) fn offset(self) -> Option<i64> {
        match self {
            Self::Committed(offset) | Self::Mirrored(offset) | Self::Ambiguous(offset) => {
                Some(offset)
            }
            Self::Recreated => Some(LOG_START),
            Self::AddedPartition | Self::NoOffset | Self::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed(topic_id: Option<&str>, cluster_id: Option<&str>) -> CommittedOffset {
        let identity = |topic_id: &str| TopicIdentity {
            topic_id: topic_id.into(),
            cluster_id: cluster_id.map(Into::into),
        };
        CommittedOffset {
            offset: 7,
            identity: topic_id.map(identity),
        }
    }

    #[test]
    fn a_committed_offset_is_ignored_only_if_its_topic_was_recreated() {
        let current = committed(Some("now"), Some("here")).identity;
        for (topic_id, cluster_id, start) in [
            (Some("now"), Some("here"), StartPosition::Committed(7)),
            (Some("now"), None, StartPosition::Committed(7)),
            (None, None, StartPosition::Committed(7)),
            (Some("before"), Some("here"), StartPosition::Recreated),
            (Some("before"), Some("there"), StartPosition::Mirrored(7)),
            (Some("before"), None, StartPosition::Ambiguous(7)),
        ] {
            let offset = committed(topic_id, cluster_id);
            assert_eq!(
                StartPosition::from_committed(&offset, current.as_ref()),
                start
            );
            assert_eq!(
                StartPosition::from_committed(&offset, None),
                StartPosition::Committed(7)
            );
        }
    }

    #[test]
    fn a_partition_was_added_if_the_group_has_an_offset_of_the_current_topic() {
        let (now, before) = (
            committed(Some("now"), Some("here")),
            committed(Some("before"), Some("here")),
        );
        let start = |others: &[&CommittedOffset]| {
            StartPosition::without_offset(others, now.identity.as_ref())
        };
        assert_eq!(start(&[]), StartPosition::NoOffset);
        assert_eq!(start(&[&before, &before]), StartPosition::Recreated);
        assert_eq!(start(&[&before, &now]), StartPosition::AddedPartition);
    }
}
