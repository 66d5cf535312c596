//! One partition under one assignment: how far it was read, settled and committed.

use std::sync::Arc;
use std::time::Instant;

use super::missing::Missing;
use crate::topic_identity::TopicIdentity;
use crate::watermark::Watermark;

/// Where each log begins.
pub(super) const BEGINNING: i64 = 0;

/// One partition under one assignment.
pub(super) struct Assigned {
    pub(super) topic: Arc<str>,
    pub(super) partition: i32,
    pub(super) log: Log,
    pub(super) watermark: Watermark,
    pub(super) begins: Begins,
    pub(super) read_to: ReadTo,
    /// Where the log ends, as the broker said last.
    pub(super) log_end: Option<i64>,
    /// What the lowest unsettled offset was when it was looked at last, and since when.
    pub(super) stood: (Option<i64>, Instant),
    /// Whether it was said that ids come again in another topic of this name.
    pub(super) has_repeated: bool,
    /// Handed out and not back yet.
    pub(super) out: usize,
    pub(super) backlog: Backlog,
    pub(super) keeps: Keeps,
    /// From when on its position is sent by itself, once. librdkafka sends a stored offset only if
    /// it is above the committed one: where the log was cut below that, the first position would
    /// never be sent, nor would any after it. So each assignment begins with such a commit, and so
    /// does whatever follows on a commit that failed.
    pub(super) send_from: Option<Instant>,
    pub(super) missing: Missing,
}

/// What was released and waits for its delay, or is on its way to the dead letters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Backlog {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl Backlog {
    pub(super) fn add(&mut self, bytes: usize) {
        (self.count, self.bytes) = (self.count + 1, self.bytes + bytes);
    }

    pub(super) fn remove(&mut self, bytes: usize) {
        (self.count, self.bytes) = (
            self.count.saturating_sub(1),
            self.bytes.saturating_sub(bytes),
        );
    }
}

impl Assigned {
    /// The log was read to this offset: says so if it is below the one that the group stood at when
    /// the partition was assigned, and answers if it is above the one that was expected.
    pub(super) fn arrive(&mut self, offset: i64) -> Option<Jump> {
        let stood = self.begins.at();
        if self.watermark.end().is_none() && stood.is_some_and(|stood| offset < stood) {
            self.is_shorter(stood, offset);
        }
        let from = self
            .watermark
            .end()
            .or(stood)
            .filter(|from| *from < offset)?;
        Some(Jump {
            topic: self.topic.clone(),
            partition: self.partition,
            from,
            to: offset,
        })
    }

    /// The log came again at this offset, below where it `stood`. Says so by its name.
    pub(super) fn is_shorter(&mut self, stood: Option<i64>, offset: i64) {
        metrics::counter!(crate::metric::LOGS_CUT).increment(1);
        tracing::error!(
            topic = &*self.topic,
            partition = self.partition,
            stood,
            offset,
            "log cut: it ends before the group's offset, since the topic was made anew or its log lost its end; reading it again from there, or from the first message before it that is not settled"
        );
        self.log.ids = self.log.ids.after_a_cut(offset, stood.unwrap_or(offset));
    }

    /// The log was read up to this offset, and all that is to be handed over below it has come. Of
    /// a log that ends in what nobody is handed, this alone says so. Answers if it lies above the
    /// offset that was expected.
    pub(super) fn pass(&mut self, offset: i64) -> Option<Jump> {
        let mut jump = None;
        if self.watermark.end().is_none() {
            let stood = self.begins.at().unwrap_or(offset);
            if offset < stood {
                return None;
            }
            jump = (stood < offset).then(|| Jump {
                topic: self.topic.clone(),
                partition: self.partition,
                from: stood,
                to: offset,
            });
            self.watermark.begin(stood);
        }
        self.watermark.pass(offset);
        jump
    }

    pub(super) fn commit(&mut self, now: Instant) -> Option<Commit> {
        let way = if self.send_from.is_some_and(|from| from <= now) {
            Way::Sent
        } else {
            Way::Stored
        };
        let offset = match way {
            Way::Sent => self.watermark.take_position()?,
            Way::Stored => self.watermark.take_commit()?,
        };
        self.send_from = self.send_from.filter(|_| way == Way::Stored);
        Some(Commit {
            topic: self.topic.clone(),
            partition: self.partition,
            offset,
            way,
            identity: self.log.identity.clone(),
        })
    }
}

/// Which topic is read under a name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    /// Its id and that of its cluster, where they are known.
    pub(crate) identity: Option<TopicIdentity>,
    pub(crate) ids: Ids,
}

/// What is known of ids that come from positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ids {
    /// Each is that of one message.
    #[default]
    Unique,
    /// Between these offsets they may be those of other messages: the topic was made anew or is a
    /// replica, or its log lost its end.
    MayRepeat { from: i64, to: i64 },
}

impl Ids {
    /// Those of a topic that was made anew, or is a replica on another cluster.
    pub(crate) const ANEW: Self = Self::MayRepeat {
        from: BEGINNING,
        to: i64::MAX,
    };

    /// Those of a log that lost its end at `from`, once that was at `to`.
    fn after_a_cut(self, from: i64, to: i64) -> Self {
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

/// Where a partition is to be read on, as the broker said when it was assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begins {
    /// At the offset that the group has committed.
    At(i64),
    /// At the offset that was committed for a topic on another cluster, of which this one is a
    /// replica.
    Replica(i64),
    /// At the offset that was committed for a topic with another id: this one is a replica of that
    /// one, or was created again.
    Ambiguous(i64),
    /// At its beginning, whatever was committed: its topic was made anew.
    Anew,
    /// At its beginning: it was added to a topic of which the group has read other partitions.
    Added,
    /// The group has no offset for it.
    Nowhere,
    /// The broker did not say.
    Unknown,
}

impl Begins {
    pub(super) fn at(self) -> Option<i64> {
        match self {
            Self::At(offset) | Self::Replica(offset) | Self::Ambiguous(offset) => Some(offset),
            Self::Anew => Some(BEGINNING),
            Self::Added | Self::Nowhere | Self::Unknown => None,
        }
    }
}

/// Whether librdkafka knows how far a partition was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadTo {
    /// What it says may be of an earlier assignment, until it has said that nothing was read yet or
    /// a message has come.
    Unproven,
    Known,
    /// It takes an error for a message, and never goes back: after either it would read on too far
    /// up.
    Unknown,
}

/// What is to be done about a batch.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Where something is missing.
    pub(crate) jumps: Vec<Jump>,
    /// The partitions that begin anew at an earlier offset.
    pub(crate) restarted: Vec<(Arc<str>, i32)>,
}

/// The next message of a partition was not the one that the group stood at: what lies between may
/// be a gap, or may have been removed before it was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Jump {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    /// Where the group stood.
    pub(crate) from: i64,
    /// What came instead.
    pub(crate) to: i64,
}

impl Jump {
    /// How many offsets were removed before they were read, of a log that by now begins at `first`.
    /// Where that lies behind what came, any of them may have been: no offset is passed without a
    /// word.
    pub(crate) fn missed(&self, first: i64) -> u64 {
        u64::try_from(first.min(self.to) - self.from).unwrap_or(0)
    }
}

/// Whether a partition stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeps {
    /// Its messages are handed out.
    Assigned,
    /// It is being given back: settlements count, nothing is handed out.
    Revoking,
    /// Its log cannot be read on: what was read before is handed out, and nothing that comes after.
    Barred,
    /// Its topic was made anew or its log lost its end, and librdkafka is still to go back to where
    /// it begins here: nothing is taken in before that.
    GoingBack,
}

/// An offset to commit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) way: Way,
    /// The topic that it is an offset of, where it is known: committed beside it as metadata.
    pub(crate) identity: Option<TopicIdentity>,
}

/// How an offset reaches the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// librdkafka sends it within its interval, if it is above what was committed before.
    Stored,
    /// It is sent now, whatever was committed before.
    Sent,
}
