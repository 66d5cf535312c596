//! The faults of a run and their times, determined by a seed.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::check::{FAIL_OVER, FREEZE, FREEZE_KAFKA};

/// The lease of the consumers of a run.
pub const LEASE: Duration = Duration::from_secs(2);

/// The interval between consumers in a rolling restart.
const ROLLING: Duration = Duration::from_secs(5);

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// SIGKILL to a consumer, which is then replaced.
    KillConsumer,
    /// SIGSTOP to a consumer for 1, 2 or 5 leases.
    FreezeConsumer,
    /// SIGTERM to a consumer, which is then replaced.
    TerminateConsumer,
    /// SIGTERM to each consumer, one every five seconds; each is replaced.
    RollingRestart,
    /// SIGKILL to Redis, which has an append-only file, and a restart.
    KillRedis,
    /// SIGKILL to Redis, and a restart that takes long to load the append-only file.
    LoadRedis,
    /// Replication is interrupted, the Redis primary is killed, and a replica is promoted.
    FailOverRedis,
    /// SIGSTOP to Redis.
    FreezeRedis,
    /// The proxy loses 1, 5 or 20 % of the replies of Redis.
    DropReplies,
    /// The proxy forwards nothing to or from Redis; connections stay open.
    DarkRedis,
    /// Every connection to Redis is closed.
    ResetRedis,
    /// Redis reaches `maxmemory` and refuses writes.
    FillRedis,
    /// The disk of Redis is full.
    FillDisk,
    /// Redis becomes a read-only replica of a server that does not exist, and then a primary again.
    DemoteRedis,
    /// Redis refuses writes because of `min-replicas-to-write`.
    StrandRedis,
    /// `SCRIPT FLUSH` on Redis.
    FlushScripts,
    /// The broker refuses writes to the dead-letter and in-doubt destinations.
    RefuseLetters,
    /// RabbitMQ is stopped by SIGTERM and restarted.
    RestartRabbit,
    /// SIGKILL to RabbitMQ, and a restart.
    KillRabbit,
    /// RabbitMQ closes all connections.
    CloseConnections,
    /// RabbitMQ closes the channels of the consumers.
    CloseChannels,
    /// RabbitMQ cancels the consumers.
    CancelConsumers,
    /// The proxy forwards nothing between consumers and RabbitMQ; connections stay open.
    DarkRabbit,
    /// The consumers' connections to RabbitMQ are closed.
    ResetRabbit,
    /// SIGKILL to Kafka, and a restart.
    KillKafka,
    /// SIGSTOP to Kafka.
    FreezeKafka,
    /// A consumer leaves or joins the group every three seconds.
    Rebalance,
}

/// Faults of consumers and store, with any broker.
pub const COMMON_FAULTS: [FaultKind; 16] = [
    FaultKind::KillConsumer,
    FaultKind::FreezeConsumer,
    FaultKind::TerminateConsumer,
    FaultKind::RollingRestart,
    FaultKind::KillRedis,
    FaultKind::LoadRedis,
    FaultKind::FreezeRedis,
    FaultKind::DropReplies,
    FaultKind::DarkRedis,
    FaultKind::ResetRedis,
    FaultKind::FillRedis,
    FaultKind::FillDisk,
    FaultKind::DemoteRedis,
    FaultKind::StrandRedis,
    FaultKind::FlushScripts,
    FaultKind::RefuseLetters,
];
/// Faults of Redis with Sentinels.
pub const SENTINEL_FAULTS: [FaultKind; 1] = [FaultKind::FailOverRedis];
/// Faults of RabbitMQ.
pub const RABBITMQ_FAULTS: [FaultKind; 7] = [
    FaultKind::RestartRabbit,
    FaultKind::KillRabbit,
    FaultKind::CloseConnections,
    FaultKind::CloseChannels,
    FaultKind::CancelConsumers,
    FaultKind::DarkRabbit,
    FaultKind::ResetRabbit,
];
/// Faults of Kafka.
pub const KAFKA_FAULTS: [FaultKind; 3] = [
    FaultKind::KillKafka,
    FaultKind::FreezeKafka,
    FaultKind::Rebalance,
];

/// One planned fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// The pause between the end of the previous fault and its start.
    pub pause: Duration,
    /// The kind.
    pub kind: FaultKind,
    /// The duration, for kinds that have one; a killed process is restarted after it.
    pub lasts: Duration,
    /// The number of the affected consumer, modulo the number of consumers.
    pub consumer: usize,
    /// The percentage, for kinds that have one.
    pub percent: u8,
}

/// The durations of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Lengths {
    /// Those of [`Schedule`] for long runs.
    Full,
    /// Short ones, for runs of a few minutes.
    Short,
}

/// An infinite sequence of faults. The same seed gives the same sequence.
#[derive(Clone, Debug)]
pub struct Schedule {
    random: fastrand::Rng,
    kinds: Vec<FaultKind>,
    lengths: Lengths,
    /// The remaining kinds of the current round; each round has every kind once.
    round: Vec<FaultKind>,
    /// Faults that were generated but could not overlap the previous one.
    postponed: VecDeque<Planned>,
}

/// What a fault needs exclusively.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// One consumer.
    Consumer,
    /// Each consumer in turn.
    EachConsumer,
    /// The process of Redis.
    Redis,
    /// The process of the broker.
    Broker,
    /// The settings of a running broker.
    Settings,
    /// Nothing: only a proxy.
    Nothing,
}

impl Schedule {
    /// A sequence of these kinds; each round has every kind once, in random order.
    pub fn new(kinds: &[FaultKind], lengths: Lengths, seed: u64) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed),
            kinds: kinds.to_vec(),
            lengths,
            round: Vec::new(),
            postponed: VecDeque::new(),
        }
    }

    /// The next fault that can overlap this one with this number of consumers; postpones the
    /// others. None if the next three rounds have none.
    pub fn next_beside(&mut self, first: &Planned, consumers: usize) -> Option<Planned> {
        let mut passed = VecDeque::new();
        let mut found = None;
        for _ in 0..3 * self.kinds.len() {
            let Some(next) = self.next() else { break };
            if first.can_overlap(&next, consumers) {
                found = Some(next);
                break;
            }
            passed.push_back(next);
        }
        passed.append(&mut self.postponed);
        self.postponed = passed;
        found
    }

    fn lasts(&mut self, kind: FaultKind) -> Duration {
        let random = &mut self.random;
        let seconds = |random: &mut fastrand::Rng,
                       full: std::ops::RangeInclusive<u64>,
                       short: std::ops::RangeInclusive<u64>,
                       lengths| {
            Duration::from_millis(random.u64(if lengths == Lengths::Full {
                full
            } else {
                short
            }))
        };
        match (kind, self.lengths) {
            (FaultKind::FreezeConsumer, Lengths::Full) => {
                LEASE * random.choice([1, 2, 5]).unwrap_or(1)
                    + Duration::from_millis(random.u64(0..500))
            }
            (FaultKind::FreezeConsumer, Lengths::Short) => {
                LEASE * 2 + Duration::from_millis(random.u64(0..500))
            }
            (FaultKind::FreezeRedis, lengths) => {
                seconds(random, 5_000..=30_000, 2_500..=3_500, lengths)
            }
            (FaultKind::DarkRedis | FaultKind::DarkRabbit, lengths) => {
                seconds(random, 3_000..=15_000, 2_500..=3_500, lengths)
            }
            (
                FaultKind::FillRedis
                | FaultKind::FillDisk
                | FaultKind::DemoteRedis
                | FaultKind::StrandRedis
                | FaultKind::RefuseLetters,
                lengths,
            ) => seconds(random, 3_000..=10_000, 2_000..=2_500, lengths),
            (FaultKind::LoadRedis, lengths) => {
                seconds(random, 2_000..=10_000, 2_000..=2_500, lengths)
            }
            // The time without replication.
            (FaultKind::FailOverRedis, lengths) => {
                seconds(random, 1_000..=5_000, 1_000..=1_500, lengths)
            }
            // The consumer leaves and joins twice.
            (FaultKind::Rebalance, Lengths::Full) => Duration::from_secs(12),
            (FaultKind::Rebalance, Lengths::Short) => Duration::from_secs(6),
            (FaultKind::DropReplies, lengths) => {
                seconds(random, 5_000..=15_000, 4_000..=5_000, lengths)
            }
            // The interval between consumers.
            (FaultKind::RollingRestart, _) => ROLLING,
            (FaultKind::FreezeKafka, lengths) => {
                seconds(random, 20_000..=20_000, 8_000..=8_000, lengths)
            }
            (
                FaultKind::KillConsumer
                | FaultKind::TerminateConsumer
                | FaultKind::KillRedis
                | FaultKind::KillKafka,
                _,
            ) => Duration::from_millis(random.u64(0..1_000)),
            _ => Duration::ZERO,
        }
    }
}

impl Iterator for Schedule {
    type Item = Planned;

    /// None only if the schedule has no kinds.
    fn next(&mut self) -> Option<Planned> {
        if let Some(planned) = self.postponed.pop_front() {
            return Some(planned);
        }
        if self.round.is_empty() {
            self.round = self.kinds.clone();
            self.random.shuffle(&mut self.round);
        }
        let kind = self.round.pop()?;
        let lasts = self.lasts(kind);
        let random = &mut self.random;
        let pause = match self.lengths {
            Lengths::Full => random.u64(500..4_000),
            Lengths::Short => random.u64(200..1_000),
        };
        let percent = random.choice([1, 5, 20]).unwrap_or(5);
        Some(Planned {
            pause: Duration::from_millis(pause),
            kind,
            lasts,
            consumer: random.usize(0..1_000),
            percent,
        })
    }
}

impl Planned {
    /// The name in the fault log: the kind and, if it has one, the percentage.
    pub fn name(&self) -> String {
        match self.kind {
            FaultKind::DropReplies => format!("{}-{}%", self.kind, self.percent),
            kind => kind.to_string(),
        }
    }

    /// Whether both can be active at the same time: neither waits for the other, and the end of one
    /// does not end the other.
    pub fn can_overlap(&self, other: &Self, consumers: usize) -> bool {
        use Needs::*;
        let same_consumer = || self.consumer % consumers == other.consumer % consumers;
        // These lock a consumer for seconds, so a rolling restart would wait for them.
        let holds =
            |kind: FaultKind| matches!(kind, FaultKind::FreezeConsumer | FaultKind::Rebalance);
        self.kind != other.kind
            && match (self.kind.needs(), other.kind.needs()) {
                (Consumer, Consumer) => !same_consumer(),
                (EachConsumer, Consumer) => !holds(other.kind),
                (Consumer, EachConsumer) => !holds(self.kind),
                (Redis, Redis) | (Broker | Settings, Broker | Settings) => false,
                _ => true,
            }
    }
}

impl FaultKind {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        COMMON_FAULTS
            .into_iter()
            .chain(SENTINEL_FAULTS)
            .chain(RABBITMQ_FAULTS)
            .chain(KAFKA_FAULTS)
    }

    /// The kind of a fault in the fault log.
    pub fn of(logged: &str) -> Option<Self> {
        Self::all().find(|kind| logged.starts_with(kind.name()))
    }

    fn needs(self) -> Needs {
        match self {
            Self::KillConsumer
            | Self::FreezeConsumer
            | Self::TerminateConsumer
            | Self::Rebalance => Needs::Consumer,
            Self::RollingRestart => Needs::EachConsumer,
            Self::KillRedis
            | Self::LoadRedis
            | Self::FailOverRedis
            | Self::FreezeRedis
            | Self::FillRedis
            | Self::FillDisk
            | Self::DemoteRedis
            | Self::StrandRedis
            | Self::FlushScripts => Needs::Redis,
            Self::RestartRabbit
            | Self::KillRabbit
            | Self::CloseConnections
            | Self::CloseChannels
            | Self::CancelConsumers
            | Self::KillKafka
            | Self::FreezeKafka => Needs::Broker,
            Self::RefuseLetters => Needs::Settings,
            Self::DropReplies
            | Self::DarkRedis
            | Self::ResetRedis
            | Self::DarkRabbit
            | Self::ResetRabbit => Needs::Nothing,
        }
    }

    /// The maximum time from the end of the fault until effects resume.
    pub fn recovery_bound(self) -> Duration {
        Duration::from_secs(match self {
            // Kafka's session timeout, a lease, and two seconds: for faults that remove a consumer
            // or block some messages.
            Self::KillConsumer
            | Self::FreezeConsumer
            | Self::TerminateConsumer
            | Self::RollingRestart
            | Self::Rebalance
            | Self::RefuseLetters
            | Self::FailOverRedis => 10,
            Self::KillKafka | Self::FreezeKafka => 30,
            _ => 5,
        })
    }

    /// The name in the fault log and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::KillConsumer => "kill-consumer",
            Self::FreezeConsumer => FREEZE,
            Self::TerminateConsumer => "terminate-consumer",
            Self::RollingRestart => "rolling-restart",
            Self::KillRedis => "kill-redis",
            Self::LoadRedis => "load-redis",
            Self::FailOverRedis => FAIL_OVER,
            Self::FreezeRedis => "freeze-redis",
            Self::DropReplies => "drop-replies",
            Self::DarkRedis => "dark-redis",
            Self::ResetRedis => "reset-redis",
            Self::FillRedis => "fill-redis",
            Self::FillDisk => "fill-disk",
            Self::DemoteRedis => "demote-redis",
            Self::StrandRedis => "strand-redis",
            Self::FlushScripts => "flush-scripts",
            Self::RefuseLetters => "refuse-letters",
            Self::RestartRabbit => "restart-rabbit",
            Self::KillRabbit => "kill-rabbit",
            Self::CloseConnections => "close-connections",
            Self::CloseChannels => "close-channels",
            Self::CancelConsumers => "cancel-consumers",
            Self::DarkRabbit => "dark-rabbit",
            Self::ResetRabbit => "reset-rabbit",
            Self::KillKafka => "kill-kafka",
            Self::FreezeKafka => FREEZE_KAFKA,
            Self::Rebalance => "rebalance",
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No fault has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no fault is called {0:?}; the faults are {all}", all = FaultKind::all().map(FaultKind::name).collect::<Vec<_>>().join(", "))]
pub struct NoSuchFault(String);

impl FromStr for FaultKind {
    type Err = NoSuchFault;

    fn from_str(name: &str) -> Result<Self, NoSuchFault> {
        Self::all()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| NoSuchFault(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_seed_determines_the_schedule() {
        let first = |seed| {
            Schedule::new(&COMMON_FAULTS, Lengths::Full, seed)
                .take(50)
                .collect::<Vec<_>>()
        };
        assert_eq!(first(7), first(7));
        assert_ne!(first(7), first(8));
    }

    #[test]
    fn each_round_has_each_kind_once() {
        for seed in 0..20 {
            let schedule: Vec<FaultKind> = Schedule::new(&RABBITMQ_FAULTS, Lengths::Short, seed)
                .take(3 * RABBITMQ_FAULTS.len())
                .map(|it| it.kind)
                .collect();
            for round in schedule.chunks(RABBITMQ_FAULTS.len()) {
                assert_eq!(
                    round.iter().collect::<HashSet<_>>(),
                    RABBITMQ_FAULTS.iter().collect()
                );
            }
        }
        assert_eq!(Schedule::new(&[], Lengths::Short, 1).next(), None);
    }

    fn planned(kind: FaultKind, consumer: usize) -> Planned {
        Planned {
            pause: LEASE,
            kind,
            lasts: LEASE,
            consumer,
            percent: 5,
        }
    }

    #[test]
    fn two_faults_overlap_unless_one_waits_for_or_ends_the_other() {
        let overlaps = |one: FaultKind, other: FaultKind| {
            let both = [
                planned(one, 1).can_overlap(&planned(other, 5), 3),
                planned(other, 5).can_overlap(&planned(one, 1), 3),
            ];
            assert_eq!(both[0], both[1], "{one}, {other}");
            both[0]
        };
        use FaultKind::*;
        for (one, other) in [
            (DarkRedis, DropReplies),
            (DarkRedis, FreezeRedis),
            (KillRedis, KillKafka),
            (LoadRedis, FreezeKafka),
            (KillConsumer, FreezeConsumer),
            (RollingRestart, KillConsumer),
            (RefuseLetters, DarkRabbit),
        ] {
            assert!(overlaps(one, other), "{one}, {other}");
        }
        for (one, other) in [
            (DarkRedis, DarkRedis),
            (FillRedis, FreezeRedis),
            (KillRabbit, CancelConsumers),
            (RefuseLetters, FreezeKafka),
            (RollingRestart, FreezeConsumer),
        ] {
            assert!(!overlaps(one, other), "{one}, {other}");
        }
        assert!(
            !planned(KillConsumer, 1).can_overlap(&planned(FreezeConsumer, 4), 3),
            "the same consumer"
        );
    }

    #[test]
    fn a_fault_that_cannot_overlap_is_postponed() {
        let mut schedule = Schedule::new(&COMMON_FAULTS, Lengths::Short, 3);
        let mut seen = Vec::new();
        for _ in 0..COMMON_FAULTS.len() * 4 {
            let first = schedule.next().unwrap();
            let second = schedule.next_beside(&first, 3).unwrap();
            assert!(first.can_overlap(&second, 3), "{first:?}, {second:?}");
            seen.extend([first.kind, second.kind]);
        }
        // Postponed kinds are scheduled later.
        for kind in COMMON_FAULTS {
            assert!(seen.iter().filter(|it| **it == kind).count() >= 6, "{kind}");
        }
        let mut alone = Schedule::new(&[FaultKind::DarkRedis], Lengths::Short, 3);
        let first = alone.next().unwrap();
        assert_eq!(alone.next_beside(&first, 3), None);
    }

    #[test]
    fn consumers_are_frozen_for_one_two_and_five_leases() {
        let leases = |planned: Planned| planned.lasts.as_millis() / LEASE.as_millis();
        let seen: HashSet<u128> = Schedule::new(&[FaultKind::FreezeConsumer], Lengths::Full, 1)
            .take(50)
            .map(leases)
            .collect();
        assert_eq!(seen, HashSet::from([1, 2, 5]));
        let percents: HashSet<u8> = Schedule::new(&[FaultKind::DropReplies], Lengths::Full, 1)
            .take(50)
            .map(|it| it.percent)
            .collect();
        assert_eq!(percents, HashSet::from([1, 5, 20]));
    }

    #[test]
    fn a_kind_has_one_name_everywhere() {
        for kind in FaultKind::all() {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            assert_eq!(FaultKind::of(&planned(kind, 0).name()), Some(kind));
        }
        assert!(
            "kill-9"
                .parse::<FaultKind>()
                .unwrap_err()
                .to_string()
                .contains("kill-redis, load-redis, freeze-redis")
        );
    }
}
