//! One assignment of a partition: how far it was read, settled and committed.

use std::sync::Arc;
use std::time::Instant;

use super::expired::ExpiryLog;
use crate::topic_identity::TopicIdentity;
use crate::watermark::Watermark;

/// The first offset of every log.
pub(super) const LOG_START: i64 = 0;

/// One assignment of a partition.
pub(super) struct AssignedPartition {
    pub(super) topic: Arc<str>,
    pub(super) partition: i32,
    pub(super) log: LogIdentity,
    pub(super) watermark: Watermark,
    pub(super) start: StartPosition,
    pub(super) position_trust: PositionTrust,
    /// The log end that the broker returned last.
    pub(super) log_end: Option<i64>,
    /// The lowest unsettled offset at the last commit, and since when it has been the lowest.
    pub(super) lowest_since: (Option<i64>, Instant),
    /// Whether the line about repeated ids was logged for this assignment.
    pub(super) repetition_logged: bool,
    /// Deliveries that were handed out and are not settled or released.
    pub(super) handed_out: usize,
    pub(super) state: AssignmentState,
    /// From when on the next commit is sent as [`SendMode::Immediate`], once. librdkafka commits a
    /// stored offset only if it is above the committed one; if the log was truncated below that, it
    /// would commit no offset of this assignment. So the first commit of each assignment is
    /// immediate, and the repetition of a failed one.
    pub(super) commit_immediately_from: Option<Instant>,
    pub(super) expiry: ExpiryLog,
}

impl AssignedPartition {
    /// Handles the offset of a record. Logs a truncated log if it is below the committed offset
    /// that the assignment started at. Returns the gap if it is above the expected offset.
    pub(super) fn record_arrived(&mut self, offset: i64) -> Option<OffsetGap> {
        let expected = self.start.offset();
        if self.watermark.end().is_none() && expected.is_some_and(|expected| offset < expected) {
            self.on_truncation(expected, offset);
        }
        let from = self
            .watermark
            .end()
            .or(expected)
            .filter(|from| *from < offset)?;
        Some(OffsetGap {
            topic: self.topic.clone(),
            partition: self.partition,
            from,
            to: offset,
        })
    }

    /// Counts and logs that the log continues at `offset`, below the `expected` one.
    pub(super) fn on_truncation(&mut self, expected: Option<i64>, offset: i64) {
        metrics::counter!(crate::metric::LOGS_TRUNCATED).increment(1);
        tracing::error!(
            topic = &*self.topic,
            partition = self.partition,
            expected,
            offset,
            "log truncated: it ends below the expected offset, because the topic was recreated or the log lost its end; reading again from this offset, or from the first unsettled message below it; check the brokers' logs for an unclean leader election, and with IdSource::position(), give the consumer another .scope(…)"
        );
        self.log.ids = self
            .log
            .ids
            .after_truncation(offset, expected.unwrap_or(offset));
    }

    /// The log was read up to this offset: every message below it was delivered, and the remaining
    /// offsets are gaps, such as transaction markers. Returns the gap if nothing was delivered yet and
    /// the offset is above the expected one.
    pub(super) fn advance_to(&mut self, offset: i64) -> Option<OffsetGap> {
        let mut gap = None;
        if self.watermark.end().is_none() {
            let expected = self.start.offset().unwrap_or(offset);
            if offset < expected {
                return None;
            }
            gap = (expected < offset).then(|| OffsetGap {
                topic: self.topic.clone(),
                partition: self.partition,
                from: expected,
                to: offset,
            });
            self.watermark.start_at(expected);
        }
        self.watermark.advance_to(offset);
        gap
    }

    /// Takes the offset to commit; `None` if it was taken before.
    pub(super) fn commit(&mut self, now: Instant) -> Option<OffsetCommit> {
        let mode = if self.commit_immediately_from.is_some_and(|from| from <= now) {
            SendMode::Immediate
        } else {
            SendMode::Stored
        };
        let offset = match mode {
            SendMode::Immediate => self.watermark.take_position()?,
            SendMode::Stored => self.watermark.take_commit()?,
        };
        self.commit_immediately_from = self
            .commit_immediately_from
            .filter(|_| mode == SendMode::Stored);
        Some(OffsetCommit {
            topic: self.topic.clone(),
            partition: self.partition,
            offset,
            mode,
            identity: self.log.identity.clone(),
        })
    }
}

/// The topic that is read, and whether its positions repeat those of an earlier topic of this name.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogIdentity {
    /// The ids of the topic and its cluster, if they are known.
    pub(crate) identity: Option<TopicIdentity>,
    pub(crate) ids: PositionIds,
}

/// Whether message ids made from positions are unique.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PositionIds {
    /// Each position belongs to one message.
    #[default]
    Unique,
    /// The positions from `from` to below `to` may also belong to other messages: the topic was
    /// recreated or is a replica, or its log was truncated.
    MayRepeat { from: i64, to: i64 },
}

impl PositionIds {
    /// The ids of a recreated topic, or of a replica on another cluster.
    pub(crate) const RECREATED: Self = Self::MayRepeat {
        from: LOG_START,
        to: i64::MAX,
    };

    /// The ids of a log that was truncated at `from` after it was read to `to`.
    fn after_truncation(self, from: i64, to: i64) -> Self {
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

    pub(super) fn may_repeat(self, offset: i64) -> bool {
        matches!(self, Self::MayRepeat { from, to } if (from..to).contains(&offset))
    }
}

/// Where a partition is read from, as determined when it was assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartPosition {
    /// The offset that the group has committed.
    Committed(i64),
    /// The offset that was committed on another cluster. The topic is a replica of the topic there.
    Replica(i64),
    /// The offset that was committed for a topic with another id. The topic is a replica of it, or was
    /// recreated.
    Ambiguous(i64),
    /// The beginning, because the topic was recreated. The committed offset is ignored.
    Recreated,
    /// The beginning: the partition was added to a topic of which the group has read other
    /// partitions.
    AddedPartition,
    /// The group has no offset for it.
    NoOffset,
    /// Unknown, because the group coordinator returned no offset in time. librdkafka fetches it.
    Unknown,
}

impl StartPosition {
    /// The offset to start at; `None` if librdkafka or the log start decides it.
    pub(super) fn offset(self) -> Option<i64> {
        match self {
            Self::Committed(offset) | Self::Replica(offset) | Self::Ambiguous(offset) => {
                Some(offset)
            }
            Self::Recreated => Some(LOG_START),
            Self::AddedPartition | Self::NoOffset | Self::Unknown => None,
        }
    }
}

/// Whether librdkafka's position in a partition can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PositionTrust {
    /// Not yet: it may be left from an earlier assignment, until librdkafka reports that it has no
    /// position, or a message arrives.
    Unconfirmed,
    /// Yes.
    Trusted,
    /// No: it is too high. librdkafka has counted an error as a message, or the log was truncated,
    /// which does not lower the position.
    Wrong,
}

/// What the caller has to handle after records were added.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct IntakeResult {
    /// The gaps before the records.
    pub(crate) gaps: Vec<OffsetGap>,
    /// The partitions that continue at a lower offset, so that librdkafka's position is wrong.
    pub(crate) restarted: Vec<(Arc<str>, i32)>,
}

/// Offsets that were skipped because the next message is above the expected offset: compacted
/// records, transaction markers, or messages that expired before they were read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OffsetGap {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    /// The expected offset.
    pub(crate) from: i64,
    /// The offset of the next message.
    pub(crate) to: i64,
}

impl OffsetGap {
    /// How many offsets of the gap count as expired if the log now starts at `log_start`: those below
    /// it. If it is above the next message, all of them, so that no loss is unreported.
    pub(crate) fn expired(&self, log_start: i64) -> u64 {
        u64::try_from(log_start.min(self.to) - self.from).unwrap_or(0)
    }
}

/// The state of an assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AssignmentState {
    /// Messages are read and handed out.
    Active,
    /// The partition is being revoked: settlements count, nothing is handed out.
    Revoking,
    /// No more messages are read; those read before are handed out.
    Halted,
    /// No records are added until librdkafka has sought to the start of the assignment, because the
    /// topic was recreated or its log truncated.
    Seeking,
}

/// An offset to commit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OffsetCommit {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) mode: SendMode,
    /// The topic that the offset belongs to, if it is known: the metadata of the commit.
    pub(crate) identity: Option<TopicIdentity>,
}

/// How an offset is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendMode {
    /// librdkafka commits it within `auto.commit.interval.ms`, if it is above the committed one.
    Stored,
    /// A commit request is sent at once, also for an offset below the committed one.
    Immediate,
}
