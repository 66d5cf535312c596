//! What is done to a run, and when: a sequence of faults that a seed determines.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::check::{FAIL_OVER, FREEZE, FREEZE_KAFKA};

/// The lease of the consumers of a run, unless they were given another.
pub const LEASE: Duration = Duration::from_secs(2);

/// How often a rolling restart tells the next consumer to drain.
const ROLLING: Duration = Duration::from_secs(5);

/// What may be done to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// SIGKILL to a consumer; another takes its place.
    KillConsumer,
    /// SIGSTOP to a consumer for 1, 2 or 5 leases.
    FreezeConsumer,
    /// SIGTERM to a consumer; another takes its place.
    TerminateConsumer,
    /// SIGTERM to the next consumer every five seconds, until each had it; another takes its place.
    RollingRestart,
    /// SIGKILL to Redis, which has an append-only file, and a start.
    KillRedis,
    /// SIGKILL to Redis, and a start in which it has much to read before it serves anybody.
    LoadRedis,
    /// Redis is killed when its replicas have not heard of it for a while, and one of them takes
    /// over.
    FailOverRedis,
    /// SIGSTOP to Redis.
    FreezeRedis,
    /// The proxy before Redis loses 1, 5 or 20 of 100 replies.
    DropReplies,
    /// Nothing arrives at Redis or from it; connections stay open.
    DarkRedis,
    /// Every connection to Redis is closed.
    ResetRedis,
    /// Redis has no memory left for writes.
    FillRedis,
    /// Nothing that Redis writes to disk fits there.
    FillDisk,
    /// Redis is made a replica of nobody, so that it takes no writes, and a primary again.
    DemoteRedis,
    /// Redis takes no writes because it has too few replicas.
    StrandRedis,
    /// Redis forgets its scripts.
    FlushScripts,
    /// The broker takes nothing that is to be set aside.
    RefuseLetters,
    /// RabbitMQ is stopped in good order, and started.
    RestartRabbit,
    /// SIGKILL to RabbitMQ, and a start.
    KillRabbit,
    /// RabbitMQ closes all connections.
    CloseConnections,
    /// RabbitMQ closes the channels that consume.
    CloseChannels,
    /// RabbitMQ cancels the consumers.
    CancelConsumers,
    /// Nothing arrives at RabbitMQ from the consumers or back; connections stay open.
    DarkRabbit,
    /// The consumers' connections to RabbitMQ are closed.
    ResetRabbit,
    /// SIGKILL to Kafka, and a start.
    KillKafka,
    /// SIGSTOP to Kafka.
    FreezeKafka,
    /// A consumer leaves the group or comes back every three seconds.
    Rebalance,
}

/// What is done to consumers and to their store, whatever the broker.
pub const ANYWHERE: [Kind; 16] = [
    Kind::KillConsumer,
    Kind::FreezeConsumer,
    Kind::TerminateConsumer,
    Kind::RollingRestart,
    Kind::KillRedis,
    Kind::LoadRedis,
    Kind::FreezeRedis,
    Kind::DropReplies,
    Kind::DarkRedis,
    Kind::ResetRedis,
    Kind::FillRedis,
    Kind::FillDisk,
    Kind::DemoteRedis,
    Kind::StrandRedis,
    Kind::FlushScripts,
    Kind::RefuseLetters,
];
/// What is done to Redis where Sentinels watch it.
pub const WATCHED: [Kind; 1] = [Kind::FailOverRedis];
/// What is done to RabbitMQ.
pub const RABBITMQ: [Kind; 7] = [
    Kind::RestartRabbit,
    Kind::KillRabbit,
    Kind::CloseConnections,
    Kind::CloseChannels,
    Kind::CancelConsumers,
    Kind::DarkRabbit,
    Kind::ResetRabbit,
];
/// What is done to Kafka.
pub const KAFKA: [Kind; 3] = [Kind::KillKafka, Kind::FreezeKafka, Kind::Rebalance];

/// One fault, ready to be played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// How long after the last one was over it begins.
    pub pause: Duration,
    /// What is done.
    pub kind: Kind,
    /// How long it lasts, where that can be chosen; a killed process is started again after this.
    pub lasts: Duration,
    /// Which consumer, if it is done to one: any number, to be taken modulo their count.
    pub consumer: usize,
    /// How many in 100, where that can be chosen.
    pub percent: u8,
}

/// How long faults last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Lengths {
    /// As long as the table of faults has it.
    Full,
    /// Short ones, for a run that must be over in minutes.
    Short,
}

/// A sequence of faults without end. The same seed makes the same.
#[derive(Clone, Debug)]
pub struct Schedule {
    random: fastrand::Rng,
    kinds: Vec<Kind>,
    lengths: Lengths,
    /// What is left of the present round: each kind comes once in each.
    round: Vec<Kind>,
    /// What was drawn, and could not be played beside another.
    put_off: VecDeque<Planned>,
}

/// What a fault needs for itself.
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
    /// A broker that takes settings.
    Settings,
    /// Nothing: what lies between them.
    Nothing,
}

impl Schedule {
    /// Faults of these kinds; each round has each of them once, in an order of its own.
    pub fn new(kinds: &[Kind], lengths: Lengths, seed: u64) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed),
            kinds: kinds.to_vec(),
            lengths,
            round: Vec::new(),
            put_off: VecDeque::new(),
        }
    }

    /// The next one that can be played while this one lasts, on so many consumers; what cannot
    /// comes later. None if there is none in the next rounds.
    pub fn next_beside(&mut self, first: &Planned, consumers: usize) -> Option<Planned> {
        let mut passed = VecDeque::new();
        let mut found = None;
        for _ in 0..3 * self.kinds.len() {
            let Some(next) = self.next() else { break };
            if first.goes_with(&next, consumers) {
                found = Some(next);
                break;
            }
            passed.push_back(next);
        }
        passed.append(&mut self.put_off);
        self.put_off = passed;
        found
    }

    fn lasts(&mut self, kind: Kind) -> Duration {
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
            (Kind::FreezeConsumer, Lengths::Full) => {
                LEASE * random.choice([1, 2, 5]).unwrap_or(1)
                    + Duration::from_millis(random.u64(0..500))
            }
            (Kind::FreezeConsumer, Lengths::Short) => {
                LEASE * 2 + Duration::from_millis(random.u64(0..500))
            }
            (Kind::FreezeRedis, lengths) => seconds(random, 5_000..=30_000, 2_500..=3_500, lengths),
            (Kind::DarkRedis | Kind::DarkRabbit, lengths) => {
                seconds(random, 3_000..=15_000, 2_500..=3_500, lengths)
            }
            (
                Kind::FillRedis
                | Kind::FillDisk
                | Kind::DemoteRedis
                | Kind::StrandRedis
                | Kind::RefuseLetters,
                lengths,
            ) => seconds(random, 3_000..=10_000, 2_000..=2_500, lengths),
            (Kind::LoadRedis, lengths) => seconds(random, 2_000..=10_000, 2_000..=2_500, lengths),
            // For so long the replicas hear nothing.
            (Kind::FailOverRedis, lengths) => {
                seconds(random, 1_000..=5_000, 1_000..=1_500, lengths)
            }
            // Twice away and back.
            (Kind::Rebalance, Lengths::Full) => Duration::from_secs(12),
            (Kind::Rebalance, Lengths::Short) => Duration::from_secs(6),
            (Kind::DropReplies, lengths) => seconds(random, 5_000..=15_000, 4_000..=5_000, lengths),
            // Between one consumer and the next.
            (Kind::RollingRestart, _) => ROLLING,
            (Kind::FreezeKafka, lengths) => {
                seconds(random, 20_000..=20_000, 8_000..=8_000, lengths)
            }
            (
                Kind::KillConsumer | Kind::TerminateConsumer | Kind::KillRedis | Kind::KillKafka,
                _,
            ) => Duration::from_millis(random.u64(0..1_000)),
            _ => Duration::ZERO,
        }
    }
}

impl Iterator for Schedule {
    type Item = Planned;

    /// None only if there are no kinds.
    fn next(&mut self) -> Option<Planned> {
        if let Some(planned) = self.put_off.pop_front() {
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
    /// As it stands in the fault log: the kind, and how many in 100 where that was chosen.
    pub fn name(&self) -> String {
        match self.kind {
            Kind::DropReplies => format!("{}-{}%", self.kind, self.percent),
            kind => kind.to_string(),
        }
    }

    /// Whether both can last at the same time: neither has to wait for what the other needs for
    /// itself, and neither's end is the end of the other.
    pub fn goes_with(&self, other: &Self, consumers: usize) -> bool {
        use Needs::*;
        let same_consumer = || self.consumer % consumers == other.consumer % consumers;
        // These hold a consumer for seconds, for which a rolling restart would wait.
        let holds = |kind: Kind| matches!(kind, Kind::FreezeConsumer | Kind::Rebalance);
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

impl Kind {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        ANYWHERE
            .into_iter()
            .chain(WATCHED)
            .chain(RABBITMQ)
            .chain(KAFKA)
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

    /// How long it may take at the most, after the fault, until effects come again.
    pub fn recovery_bound(self) -> Duration {
        Duration::from_secs(match self {
            // Kafka's session, a lease, and two seconds: for whatever takes a consumer away, and
            // where some wait in vain.
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

    /// As it stands in the fault log and on the command line.
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

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No fault has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no fault is called {0:?}; there are {all}", all = Kind::all().map(Kind::name).collect::<Vec<_>>().join(", "))]
pub struct NoSuchFault(String);

impl FromStr for Kind {
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
    fn a_seed_makes_the_same_schedule_and_another_one_another() {
        let first = |seed| {
            Schedule::new(&ANYWHERE, Lengths::Full, seed)
                .take(50)
                .collect::<Vec<_>>()
        };
        assert_eq!(first(7), first(7));
        assert_ne!(first(7), first(8));
    }

    #[test]
    fn each_round_has_each_kind_once() {
        for seed in 0..20 {
            let schedule: Vec<Kind> = Schedule::new(&RABBITMQ, Lengths::Short, seed)
                .take(3 * RABBITMQ.len())
                .map(|it| it.kind)
                .collect();
            for round in schedule.chunks(RABBITMQ.len()) {
                assert_eq!(
                    round.iter().collect::<HashSet<_>>(),
                    RABBITMQ.iter().collect()
                );
            }
        }
        assert_eq!(Schedule::new(&[], Lengths::Short, 1).next(), None);
    }

    fn planned(kind: Kind, consumer: usize) -> Planned {
        Planned {
            pause: LEASE,
            kind,
            lasts: LEASE,
            consumer,
            percent: 5,
        }
    }

    #[test]
    fn two_faults_last_at_once_unless_one_would_wait_for_the_other_or_end_it() {
        let go = |one: Kind, other: Kind| {
            let both = [
                planned(one, 1).goes_with(&planned(other, 5), 3),
                planned(other, 5).goes_with(&planned(one, 1), 3),
            ];
            assert_eq!(both[0], both[1], "{one}, {other}");
            both[0]
        };
        use Kind::*;
        for (one, other) in [
            (DarkRedis, DropReplies),
            (DarkRedis, FreezeRedis),
            (KillRedis, KillKafka),
            (LoadRedis, FreezeKafka),
            (KillConsumer, FreezeConsumer),
            (RollingRestart, KillConsumer),
            (RefuseLetters, DarkRabbit),
        ] {
            assert!(go(one, other), "{one}, {other}");
        }
        for (one, other) in [
            (DarkRedis, DarkRedis),
            (FillRedis, FreezeRedis),
            (KillRabbit, CancelConsumers),
            (RefuseLetters, FreezeKafka),
            (RollingRestart, FreezeConsumer),
        ] {
            assert!(!go(one, other), "{one}, {other}");
        }
        assert!(
            !planned(KillConsumer, 1).goes_with(&planned(FreezeConsumer, 4), 3),
            "the same consumer"
        );
    }

    #[test]
    fn what_cannot_be_played_beside_another_comes_later() {
        let mut schedule = Schedule::new(&ANYWHERE, Lengths::Short, 3);
        let mut seen = Vec::new();
        for _ in 0..ANYWHERE.len() * 4 {
            let first = schedule.next().unwrap();
            let second = schedule.next_beside(&first, 3).unwrap();
            assert!(first.goes_with(&second, 3), "{first:?}, {second:?}");
            seen.extend([first.kind, second.kind]);
        }
        // Each has its turn, though it may have to wait for it.
        for kind in ANYWHERE {
            assert!(seen.iter().filter(|it| **it == kind).count() >= 6, "{kind}");
        }
        let mut alone = Schedule::new(&[Kind::DarkRedis], Lengths::Short, 3);
        let first = alone.next().unwrap();
        assert_eq!(alone.next_beside(&first, 3), None);
    }

    #[test]
    fn consumers_are_frozen_for_one_two_and_five_leases() {
        let leases = |planned: Planned| planned.lasts.as_millis() / LEASE.as_millis();
        let seen: HashSet<u128> = Schedule::new(&[Kind::FreezeConsumer], Lengths::Full, 1)
            .take(50)
            .map(leases)
            .collect();
        assert_eq!(seen, HashSet::from([1, 2, 5]));
        let percents: HashSet<u8> = Schedule::new(&[Kind::DropReplies], Lengths::Full, 1)
            .take(50)
            .map(|it| it.percent)
            .collect();
        assert_eq!(percents, HashSet::from([1, 5, 20]));
    }

    #[test]
    fn a_kind_has_one_name_everywhere() {
        for kind in Kind::all() {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            assert_eq!(Kind::of(&planned(kind, 0).name()), Some(kind));
        }
        assert!(
            "kill-9"
                .parse::<Kind>()
                .unwrap_err()
                .to_string()
                .contains("kill-redis, load-redis, freeze-redis")
        );
    }
}
