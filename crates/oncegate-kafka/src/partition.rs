//! What is told of one partition.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// One partition that is assigned to this member.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionStatus {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: i32,
    /// The commit watermark: all below it is settled. `None` while it is not known where the group
    /// stands.
    pub committable: Option<i64>,
    /// Where the log ends for those who read what is committed, asked of the broker every few
    /// seconds.
    pub log_end: Option<i64>,
    /// How many offsets lie between the two.
    pub lag: Option<u64>,
    /// Deliveries that the consumer has and has not settled.
    pub handed_out: usize,
    /// Deliveries that were released and wait for their delay.
    pub delayed: usize,
    /// What the watermark waits for; `None` where all that was read is settled.
    pub lowest: Option<Stuck>,
}

/// The lowest message of a partition that is not settled: no offset above it is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stuck {
    /// Its offset. `kcat -C -t <topic> -p <partition> -o <offset> -c 1 -J` shows the message with
    /// its id.
    pub offset: i64,
    /// For how long the watermark has waited for it.
    pub since: Duration,
    /// Where it is.
    pub holder: Holder,
}

/// Where an unsettled message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holder {
    /// It was read, and waits until the consumer takes it.
    Queue,
    /// The consumer has it: it waits for its key, its claim or its handler; or its dead letter does
    /// not stand yet.
    Consumer,
    /// It was released, and waits for its delay.
    Delay {
        /// How many attempts have failed.
        failures: u32,
    },
}

/// One line for a person: `payments/3 at 1042, 17 behind, waiting for 1042 since 12s (Consumer)`.
impl fmt::Display for PartitionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.partition)?;
        match self.committable {
            Some(offset) => write!(f, " at {offset}")?,
            None => f.write_str(" at no offset yet")?,
        }
        if let Some(lag) = self.lag {
            write!(f, ", {lag} behind")?;
        }
        match self.lowest {
            Some(Stuck {
                offset,
                since,
                holder,
            }) => write!(
                f,
                ", waiting for {offset} since {}s ({holder:?})",
                since.as_secs()
            ),
            None => Ok(()),
        }
    }
}
