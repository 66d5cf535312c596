//! Measures ten million done markers: their memory, and the rate of claims of new ids compared with
//! that at ten thousand.
//!
//! `cargo run --release -p oncegate-redis --example ten_million`. Starts two Redis servers; needs
//! about 4 GB of memory and an idle machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate_core::marker::{
    Effect, Fingerprint, Guarantee, Marker, Operation, OperationKind, Terms, Token, Verdict,
};
use oncegate_core::{
    Consumer, Context, Execution, Failure, Handler, IdSource, Key, MemoryBroker, Message,
    MessageId, Raw, RawBytes, Store,
};
use oncegate_redis::Redis;
use oncegate_testkit::servers::{RedisOptions, RedisServer};
use redis::aio::MultiplexedConnection;
use tokio::sync::Notify;

const FEW: u64 = 10_000;
const MANY: u64 = 10_000_000;
const ROUNDS: usize = 5;
const BATCH: u64 = 256;
/// The number of claims before they are cleared.
const STRIDE: u64 = 8 * BATCH;
/// The number of claims of a round, by pattern.
const PATTERNS: [(Concurrency, u64); 4] = [
    (Concurrency::OneAtATime, 10 * STRIDE),
    (Concurrency::SixtyFourAtOnce, 50 * STRIDE),
    (Concurrency::TwoBatchesAtOnce, 100 * STRIDE),
    (Concurrency::TwoBareBatchesAtOnce, 100 * STRIDE),
];

/// The concurrency of claims.
#[derive(Clone, Copy, Debug)]
enum Concurrency {
    /// Sequential single claims: a gate without concurrency.
    OneAtATime,
    /// 64 concurrent single claims: a gate of a busy service.
    SixtyFourAtOnce,
    /// Batches of 256, two in flight: a Kafka consumer with a backlog. Limited by the server's single
    /// thread.
    TwoBatchesAtOnce,
    /// The same without oncegate: pipelined `SET … 1 EX … NX`, as the baseline of Redis itself.
    TwoBareBatchesAtOnce,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = || RedisOptions::new().setting("enable-debug-command", "local");
    let (few, many) = (
        RedisServer::start(options())?,
        RedisServer::start(options())?,
    );
    println!(
        "{FEW} done markers: {} bytes each",
        fill(&few, FEW, None).await?
    );
    println!(
        "{MANY} done markers: {} bytes each",
        fill(&many, MANY, None).await?
    );
    let (at_few, at_many) = (Claims::on(&few).await?, Claims::on(&many).await?);
    for (concurrency, claims) in PATTERNS {
        claim_in_turn(&at_few, &at_many, concurrency, claims).await;
        finish_rehashing(&few, &at_few, FEW).await?;
        finish_rehashing(&many, &at_many, MANY).await?;
        let mut rates = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            let [few, many] = claim_in_turn(&at_few, &at_many, concurrency, claims).await;
            println!("{concurrency:?}, round {round}: {few} claims/s at {FEW}, {many} at {MANY}");
            rates[0].push(few);
            rates[1].push(many);
        }
        print_medians(&format!("{concurrency:?}"), rates);
    }
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        let [few, many] = consume_in_turn(&at_few, &at_many).await?;
        // The first round is a warm-up.
        if round > 0 {
            println!(
                "consumer, round {}: {few} messages/s at {FEW}, {many} at {MANY}",
                round - 1
            );
            rates[0].push(few);
            rates[1].push(many);
        }
    }
    print_medians("consumer", rates);
    drop(many);
    let many = RedisServer::start(options())?;
    println!(
        "{MANY} done markers with a fingerprint: {} bytes each",
        fill(&many, MANY, Some(Fingerprint::of(b"a body"))).await?
    );
    Ok(())
}

fn print_medians(what: &str, rates: [Vec<u64>; 2]) {
    let [few, many] = rates.map(median);
    println!(
        "{what}, median: {few} and {many} a second, {:.3} of the rate at {FEW}",
        many as f64 / few as f64
    );
}

/// As long as a UUID.
fn id(series: u64, number: u64) -> String {
    format!(
        "{series:08x}-{:04x}-4000-8000-{number:012x}",
        number % 65_536
    )
}

fn operation(
    series: u64,
    number: u64,
    kind: OperationKind,
    fingerprint: Option<Fingerprint>,
) -> Operation {
    let key = Key::new(&MessageId::new(id(series, number)).expect("it is not empty"));
    let [lease, window] = [30, 86_400].map(Duration::from_secs);
    let terms = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        lease,
        window,
        fingerprint,
    };
    Operation {
        key,
        kind,
        token: Token(u128::from(number)),
        attempt: u32::from(kind == OperationKind::Complete),
        terms,
    }
}

/// Writes done markers with completions. Returns the bytes of each.
async fn fill(
    server: &RedisServer,
    markers: u64,
    fingerprint: Option<Fingerprint>,
) -> Result<u64, Box<dyn std::error::Error>> {
    let before = used(server)?;
    let store = Redis::at(server.url()).timeout(Duration::from_secs(10));
    let share = markers.div_ceil(4);
    let fillers = (0..4).map(|which| {
        let (store, end) = (store.clone(), markers.min((which + 1) * share));
        tokio::spawn(async move {
            let mut next = which * share;
            while next < end {
                let batch: Vec<Operation> = (next..end.min(next + BATCH))
                    .map(|it| operation(0, it, OperationKind::Complete, fingerprint))
                    .collect();
                next += BATCH;
                for answer in store.apply(&batch).await {
                    answer.expect("Redis takes it");
                }
            }
        })
    });
    for filled in join_all(fillers).await {
        filled?;
    }
    Ok((used(server)? - before) / markers)
}

/// Claims on both servers in turns, so that other load affects both. Returns claims a second on each.
async fn claim_in_turn(
    few: &Claims,
    many: &Claims,
    concurrency: Concurrency,
    count: u64,
) -> [u64; 2] {
    let mut times = [Duration::ZERO; 2];
    for first in (0..count).step_by(STRIDE as usize) {
        for (claims, time) in [few, many].into_iter().zip(&mut times) {
            *time += claims.stride(concurrency, first).await;
        }
    }
    times.map(|time| (count as f64 / time.as_secs_f64()) as u64)
}

/// Claims of new ids, with oncegate and with plain commands.
struct Claims(Redis, MultiplexedConnection);

impl Claims {
    async fn on(server: &RedisServer) -> Result<Self, Box<dyn std::error::Error>> {
        let store = Redis::at(server.url()).timeout(Duration::from_secs(10));
        store
            .read_marker(&operation(0, 0, OperationKind::Claim, None).key)
            .await?;
        let bare = redis::Client::open(server.url())?
            .get_multiplexed_async_connection()
            .await?;
        Ok(Self(store, bare))
    }

    /// Claims ids and clears them again, which is not timed, so that the number of markers stays.
    async fn stride(&self, concurrency: Concurrency, first: u64) -> Duration {
        let (at_once, each) = match concurrency {
            Concurrency::OneAtATime => (1, 1),
            Concurrency::SixtyFourAtOnce => (64, 1),
            Concurrency::TwoBatchesAtOnce | Concurrency::TwoBareBatchesAtOnce => (2, BATCH),
        };
        let claims: Vec<Operation> = (first..first + STRIDE)
            .map(|it| operation(1, it, OperationKind::Claim, None))
            .collect();
        let batches: Vec<Vec<Operation>> =
            claims.chunks(each as usize).map(<[_]>::to_vec).collect();
        let started = Instant::now();
        let shares = batches.chunks(batches.len().div_ceil(at_once));
        if let Concurrency::TwoBareBatchesAtOnce = concurrency {
            join_all(shares.map(|share| self.set_bare(share))).await;
        } else {
            join_all(shares.map(|share| self.claim(share))).await;
        }
        let claiming = started.elapsed();
        if let Concurrency::TwoBareBatchesAtOnce = concurrency {
            self.delete_bare(&claims).await;
            return claiming;
        }
        for batch in claims.chunks(BATCH as usize) {
            let clears = batch.iter().map(|claim| Operation {
                kind: OperationKind::Clear(Effect::Nothing),
                attempt: 1,
                ..claim.clone()
            });
            self.0.apply(&clears.collect::<Vec<_>>()).await;
        }
        claiming
    }

    async fn claim(&self, batches: &[Vec<Operation>]) {
        for batch in batches {
            for answer in self.0.apply(batch).await {
                assert!(matches!(answer, Ok(Verdict::Granted { .. })), "{answer:?}");
            }
        }
    }
}

impl Claims {
    async fn set_bare(&self, batches: &[Vec<Operation>]) {
        for batch in batches {
            let mut pipeline = redis::pipe();
            for claim in batch {
                pipeline
                    .cmd("SET")
                    .arg(claim.key.as_bytes())
                    .arg("1")
                    .arg("EX")
                    .arg(86_400)
                    .arg("NX");
            }
            let set: Vec<bool> = pipeline
                .query_async(&mut self.1.clone())
                .await
                .expect("Redis takes it");
            assert!(set.iter().all(|it| *it), "these ids are new");
        }
    }

    async fn delete_bare(&self, claims: &[Operation]) {
        let keys: Vec<_> = claims.iter().map(|claim| claim.key.as_bytes()).collect();
        let deleted: usize = redis::cmd("DEL")
            .arg(keys)
            .query_async(&mut self.1.clone())
            .await
            .expect("Redis takes it");
        assert_eq!(deleted, claims.len());
    }
}

/// The messages of one consumer run, and the runs of a round.
const MESSAGES: u64 = 10_000;
const TURNS: u32 = 10;

/// Consumes messages with new ids, on both servers in turns. Returns messages a second on each.
async fn consume_in_turn(
    few: &Claims,
    many: &Claims,
) -> Result<[u64; 2], Box<dyn std::error::Error>> {
    let mut times = [Duration::ZERO; 2];
    for _ in 0..TURNS {
        for (claims, time) in [few, many].into_iter().zip(&mut times) {
            *time += claims.consume().await?;
        }
    }
    Ok(times.map(|time| (MESSAGES as f64 * f64::from(TURNS) / time.as_secs_f64()) as u64))
}

/// Counts down and notifies when all messages are handled.
struct CountDown(AtomicU64, Arc<Notify>);

impl Handler for CountDown {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        if self.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.1.notify_one();
        }
        Ok(())
    }
}

impl Claims {
    /// The time from the first message to the last completion. Deletes the markers afterwards, which
    /// is not timed.
    async fn consume(&self) -> Result<Duration, Box<dyn std::error::Error>> {
        let broker = MemoryBroker::new("many");
        for it in 0..MESSAGES {
            broker.publish(Message::new("x").with_message_id(id(1, it)));
        }
        let handled = Arc::new(Notify::new());
        let (over, source) = (handled.clone(), broker.source());
        let consumer = Consumer::builder()
            .source(source)
            .store(self.0.clone())
            .id(IdSource::message_id())
            .decode(RawBytes)
            .execution(Execution::Inline)
            .handler(CountDown(AtomicU64::new(MESSAGES), handled));
        let started = Instant::now();
        consumer
            .run_until(async move { over.notified().await })
            .await?;
        let took = started.elapsed();
        assert_eq!(
            broker.unsettled(),
            0,
            "the consumer ends when all is settled"
        );
        for first in (0..MESSAGES).step_by(BATCH as usize) {
            let forget = OperationKind::Forget {
                seen: Marker::Done(None),
            };
            let batch: Vec<Operation> = (first..MESSAGES.min(first + BATCH))
                .map(|it| operation(1, it, forget, None))
                .collect();
            for answer in self.0.apply(&batch).await {
                assert!(matches!(answer, Ok(Verdict::Applied)), "{answer:?}");
            }
        }
        Ok(took)
    }
}

/// Waits until Redis has finished rehashing, which proceeds with each command: claims existing ids
/// until then.
async fn finish_rehashing(
    server: &RedisServer,
    claims: &Claims,
    markers: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut next = 0;
    while server
        .reply("DEBUG HTSTATS 0")?
        .contains("rehashing target")
    {
        let batches: Vec<Vec<Operation>> = (0..2_000)
            .map(|it| (next + it * BATCH) % markers)
            .map(|begin| {
                (begin..markers.min(begin + BATCH))
                    .map(|it| operation(0, it, OperationKind::Claim, None))
                    .collect()
            })
            .collect();
        next += 2_000 * BATCH;
        for batch in batches {
            for answer in claims.0.apply(&batch).await {
                assert!(matches!(answer, Ok(Verdict::Duplicate)), "{answer:?}");
            }
        }
    }
    Ok(())
}

fn used(server: &RedisServer) -> Result<u64, Box<dyn std::error::Error>> {
    let info = server.reply("INFO memory")?;
    let used = info
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:"))
        .ok_or("INFO has no used_memory")?;
    Ok(used.parse()?)
}

fn median(mut rates: Vec<u64>) -> u64 {
    rates.sort_unstable();
    rates[rates.len() / 2]
}
