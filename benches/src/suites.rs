//! What is compared with what.

mod growth;
mod kafka;
mod latency;
mod rabbitmq;
mod scaling;

use clap::ValueEnum;

use crate::Outcome;
use crate::report::Table;
use crate::stage::Stage;

/// A group of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// The bare Kafka client and oncegate with each store; Redis alone.
    Kafka,
    /// The bare RabbitMQ client and oncegate, by prefetch and kind of queue.
    Rabbitmq,
    /// What oncegate adds to the time that a message is under way, at 1,000 messages a second.
    Latency,
    /// 1, 2 and 4 processes in a group. Eight minutes more.
    Scaling,
    /// Rate and memory by markers, partitions and backlog. Needs 6 GB of memory and four minutes
    /// more.
    Growth,
}

impl Suite {
    /// Those of a run that was not told which.
    pub fn usual(extent: Extent) -> Vec<Self> {
        match extent {
            Extent::Quick => vec![Self::Kafka, Self::Rabbitmq],
            Extent::Full => vec![Self::Kafka, Self::Rabbitmq, Self::Latency],
        }
    }

    /// Runs it, and tells of each table as it is ready.
    ///
    /// # Errors
    /// Of the first side that fails.
    pub fn run(
        self,
        stage: &Stage,
        extent: Extent,
        tell: &mut dyn FnMut(Table) -> Outcome<()>,
    ) -> Outcome<()> {
        match self {
            Self::Kafka => kafka::run(stage, extent, tell),
            Self::Rabbitmq => rabbitmq::run(stage, extent, tell),
            Self::Latency => latency::run(stage, extent, tell),
            Self::Scaling => scaling::run(stage, extent, tell),
            Self::Growth => growth::run(stage, extent, tell),
        }
    }
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What is done in two minutes: the ratios that matter most.
    Quick,
    /// All of it.
    Full,
}

impl Extent {
    fn pick<T>(self, quick: T, full: T) -> T {
        match self {
            Self::Quick => quick,
            Self::Full => full,
        }
    }
}

/// How often each side has its turn.
const ROUNDS: usize = 5;
/// So many messages are enough for one who handles them one by one, a millisecond each.
const ONE_BY_ONE: usize = 2_000;

/// What it may be at the most, in milliseconds.
pub const AT_MOST: [(&str, f64); 2] = [
    ("latency_kafka_added_p99_ms", 1.0),
    ("latency_rabbitmq_added_p99_ms", 1.0),
];
/// What is to be reached, by ratio.
pub const REACH: [(&str, f64); 7] = [
    ("kafka_memory", 0.85),
    ("kafka_key_memory", 1.00),
    ("kafka_redis", 0.90),
    ("kafka_sqlite", 0.10),
    ("rabbitmq_classic_redis", 0.90),
    ("rabbitmq_quorum_redis", 0.80),
    ("growth_markers_10m", 0.90),
];
