//! What ten million done markers cost: memory, and the rate of claims of new ids beside that at ten thousand.
//!
//! `cargo run --release -p oncegate-redis --example ten_million`. Starts two Redis servers of its own; needs some 4 GB of
//! memory and a quiet machine.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate_core::marker::{Ask, Effect, Fingerprint, Guarantee, Operation, Terms, Token, Verdict};
use oncegate_core::{Key, MessageId, Store};
use oncegate_redis::Redis;
use oncegate_testkit::servers::{RedisOptions, RedisServer};

const FEW: u64 = 10_000;
const MANY: u64 = 10_000_000;
const ROUNDS: usize = 5;
const BATCH: u64 = 256;
/// So many claims before they are cleared.
const STRIDE: u64 = 8 * BATCH;
const CLAIMS: u64 = 200 * STRIDE;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = || RedisOptions::new().setting("enable-debug-command", "local");
    let (few, many) = (RedisServer::start(options())?, RedisServer::start(options())?);
    println!("{FEW} done markers: {} bytes each", fill(&few, FEW, None).await?);
    println!("{MANY} done markers: {} bytes each", fill(&many, MANY, None).await?);
    let (at_few, at_many) = (Claims::on(&few).await?, Claims::on(&many).await?);
    claim_in_turn(&at_few, &at_many, ROUNDS as u64).await;
    for server in [&few, &many] {
        table_rests(server).await?;
    }
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        let [few, many] = claim_in_turn(&at_few, &at_many, round as u64).await;
        println!("round {round}: {few} claims/s at {FEW}, {many} at {MANY}");
        rates[0].push(few);
        rates[1].push(many);
    }
    let [few_rate, many_rate] = rates.map(median);
    println!("median: {few_rate} and {many_rate} claims/s, {:.3} of the rate at {FEW}", many_rate as f64 / few_rate as f64);
    drop(many);
    let many = RedisServer::start(options())?;
    println!("{MANY} done markers with a fingerprint: {} bytes each", fill(&many, MANY, Some(Fingerprint::of(b"a body"))).await?);
    Ok(())
}

/// As long as a UUID.
fn operation(series: u64, number: u64, ask: Ask, fingerprint: Option<Fingerprint>) -> Operation {
    let id = format!("{series:08x}-{:04x}-4000-8000-{number:012x}", number % 65_536);
    let key = Key::new(&MessageId::new(id).expect("it is not empty"));
    let [lease, window] = [30, 86_400].map(Duration::from_secs);
    let terms = Terms { guarantee: Guarantee::EffectivelyOnce, lease, window, fingerprint };
    Operation { key, ask, token: Token(u128::from(number)), attempt: u32::from(ask == Ask::Complete), terms }
}

/// Writes done markers as completions do; answers with the bytes that each costs.
async fn fill(server: &RedisServer, markers: u64, fingerprint: Option<Fingerprint>) -> Result<u64, Box<dyn std::error::Error>> {
    let before = used(server)?;
    let store = Redis::at(server.url()).timeout(Duration::from_secs(10));
    let share = markers.div_ceil(4);
    let fillers = (0..4).map(|which| {
        let (store, end) = (store.clone(), markers.min((which + 1) * share));
        tokio::spawn(async move {
            let mut next = which * share;
            while next < end {
                let batch: Vec<Operation> = (next..end.min(next + BATCH)).map(|it| operation(0, it, Ask::Complete, fingerprint)).collect();
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

/// Claims on both by turns, so that whatever else the machine does hits both. Answers with claims a second on each.
async fn claim_in_turn(few: &Claims, many: &Claims, round: u64) -> [u64; 2] {
    let mut times = [Duration::ZERO; 2];
    for first in (0..CLAIMS).step_by(STRIDE as usize) {
        for (claims, time) in [few, many].into_iter().zip(&mut times) {
            *time += claims.stride(round, first).await;
        }
    }
    times.map(|time| (CLAIMS as f64 / time.as_secs_f64()) as u64)
}

/// Claims of ids that nobody had.
struct Claims(Redis);

impl Claims {
    async fn on(server: &RedisServer) -> Result<Self, Box<dyn std::error::Error>> {
        let store = Redis::at(server.url()).timeout(Duration::from_secs(10));
        store.look(&operation(0, 0, Ask::Claim, None).key).await?;
        Ok(Self(store))
    }

    /// Claims some, two batches in flight as the consumer has, and clears them again, which is not timed: so the server
    /// keeps as many markers as it had.
    async fn stride(&self, round: u64, first: u64) -> Duration {
        let batches: Vec<Vec<Operation>> = (0..STRIDE / BATCH)
            .map(|it| first + it * BATCH)
            .map(|begin| (begin..begin + BATCH).map(|it| operation(1 + round, it, Ask::Claim, None)).collect())
            .collect();
        let started = Instant::now();
        let (one, other) = batches.split_at(batches.len() / 2);
        futures_util::future::join(self.claim(one), self.claim(other)).await;
        let claiming = started.elapsed();
        for batch in batches {
            let clears = batch.into_iter().map(|claim| Operation { ask: Ask::Clear(Effect::Nothing), attempt: 1, ..claim });
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

/// Waits until Redis has moved everything into the table that it grew last: meanwhile each command moves a little.
async fn table_rests(server: &RedisServer) -> Result<(), Box<dyn std::error::Error>> {
    while server.reply("DEBUG HTSTATS 0")?.contains("rehashing target") {
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    Ok(())
}

fn used(server: &RedisServer) -> Result<u64, Box<dyn std::error::Error>> {
    let info = server.reply("INFO memory")?;
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).ok_or("Redis does not say what it uses")?;
    Ok(used.parse()?)
}

fn median(mut rates: Vec<u64>) -> u64 {
    rates.sort_unstable();
    rates[rates.len() / 2]
}
