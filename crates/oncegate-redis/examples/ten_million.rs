//! What ten million done markers cost: memory, and the rate of claims of new ids beside that at ten thousand.
//!
//! `cargo run --release -p oncegate-redis --example ten_million`. Starts two Redis servers of its own; needs some 4 GB of
//! memory and a quiet machine.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate_core::marker::{Ask, Fingerprint, Guarantee, Operation, Terms, Token, Verdict};
use oncegate_core::{Key, MessageId, Store};
use oncegate_redis::Redis;
use oncegate_testkit::servers::{RedisOptions, RedisServer};

const FEW: u64 = 10_000;
const MANY: u64 = 10_000_000;
const ROUNDS: usize = 5;
const CLAIMS: u64 = 200_000;
const BATCH: u64 = 256;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (few, many) = (RedisServer::start(RedisOptions::new())?, RedisServer::start(RedisOptions::new())?);
    println!("{FEW} done markers: {} bytes each", fill(&few, FEW, None).await?);
    println!("{MANY} done markers: {} bytes each", fill(&many, MANY, None).await?);
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for (server, rates) in [&few, &many].into_iter().zip(&mut rates) {
            rates.push(claim_new(server, round as u64).await?);
        }
        println!("round {round}: {} claims/s at {FEW}, {} at {MANY}", rates[0][round], rates[1][round]);
    }
    let [few_rate, many_rate] = rates.map(median);
    println!("median: {few_rate} and {many_rate} claims/s, {:.3} of the rate at {FEW}", many_rate as f64 / few_rate as f64);
    many.command("FLUSHALL")?;
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

/// Claims ids that nobody had, two batches in flight as the consumer does; forgets them again. Answers with claims a second.
async fn claim_new(server: &RedisServer, round: u64) -> Result<u64, Box<dyn std::error::Error>> {
    let store = Redis::at(server.url()).timeout(Duration::from_secs(10));
    store.look(&operation(0, 0, Ask::Claim, None).key).await?;
    let started = Instant::now();
    let halves = (0..2_u64).map(|half| {
        let store = &store;
        async move {
            let (mut next, end) = (half * CLAIMS / 2, (half + 1) * CLAIMS / 2);
            while next < end {
                let batch: Vec<Operation> = (next..end.min(next + BATCH)).map(|it| operation(1 + round, it, Ask::Claim, None)).collect();
                next += BATCH;
                for answer in store.apply(&batch).await {
                    assert!(matches!(answer, Ok(Verdict::Granted { .. })), "{answer:?}");
                }
            }
        }
    });
    join_all(halves).await;
    let rate = CLAIMS as f64 / started.elapsed().as_secs_f64();
    for first in (0..CLAIMS).step_by(BATCH as usize) {
        let clear = Ask::Clear(oncegate_core::marker::Effect::Nothing);
        let batch: Vec<Operation> =
            (first..CLAIMS.min(first + BATCH)).map(|it| Operation { attempt: 1, ..operation(1 + round, it, clear, None) }).collect();
        store.apply(&batch).await;
    }
    Ok(rate as u64)
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
