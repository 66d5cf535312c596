//! The suites: which sides are compared.

mod growth;
mod kafka;
mod latency;
mod rabbitmq;
mod scaling;

use clap::ValueEnum;

use crate::BenchResult;
use crate::report::BenchTable;
use crate::stage::BenchServers;

/// A group of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// The plain Kafka client and oncegate with each store; Redis without a broker.
    Kafka,
    /// The plain RabbitMQ client and oncegate, by prefetch and queue type.
    Rabbitmq,
    /// The latency that oncegate adds at 1,000 messages per second.
    Latency,
    /// 1, 2 and 4 processes in a group. Takes another eight minutes.
    Scaling,
    /// Rate and memory by markers, partitions and backlog. Needs 6 GB of memory and another four
    /// minutes.
    Growth,
}

impl Suite {
    /// The default suites.
    pub fn usual(extent: Extent) -> Vec<Self> {
        match extent {
            Extent::Quick => vec![Self::Kafka, Self::Rabbitmq],
            Extent::Full => vec![Self::Kafka, Self::Rabbitmq, Self::Latency],
        }
    }

    /// Runs the suite, and calls back with each table.
    ///
    /// # Errors
    /// The error of the first side that fails.
    pub fn run(
        self,
        stage: &BenchServers,
        extent: Extent,
        tell: &mut dyn FnMut(BenchTable) -> BenchResult<()>,
    ) -> BenchResult<()> {
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
    /// The most important ratios, in two minutes.
    Quick,
    /// Everything.
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

/// The number of rounds.
const ROUNDS: usize = 5;
/// The number of messages for a side that handles them sequentially in a millisecond each.
const ONE_BY_ONE: usize = 2_000;

/// What it may be at the most, in milliseconds.
pub const AT_MOST: [(&str, f64); 2] = [
    ("latency_kafka_added_p99_ms", 1.0),
    ("latency_rabbitmq_added_p99_ms", 1.0),
];
/// The targets, by ratio.
pub const REACH: [(&str, f64); 7] = [
    ("kafka_memory", 0.85),
    ("kafka_key_memory", 1.00),
    ("kafka_redis", 0.90),
    ("kafka_sqlite", 0.10),
    ("rabbitmq_classic_redis", 0.90),
    ("rabbitmq_quorum_redis", 0.80),
    ("growth_markers_10m", 0.90),
];
