//! Measures the CPU time of the server per claim, completion and clearing: by `MSETEX` and commands
//! that compare values, where the server has them, or, in a build with
//! `RUSTFLAGS="--cfg oncegate_script_only"`, by single claims and the script.
//!
//! `cargo run --release -p oncegate-redis --example server_cpu`. `ONCEGATE_SERVERS=today` and
//! `today-redis` measure Valkey 9 and Redis 8. Needs an idle machine.

use std::error::Error;
use std::time::Duration;

use futures_util::future::join_all;
use oncegate_core::Store;
use oncegate_core::marker::{Effect, Guarantee, Operation, OperationKind, Token, Verdict};
use oncegate_redis::Redis;
use oncegate_testkit::operations::{operation, terms};
use oncegate_testkit::servers::{ClusterServers, RedisOptions, RedisServer};

const ROUNDS: usize = 5;
/// The number of operations of a batch.
const BATCH: usize = 64;
/// The number of batches in flight.
const CONCURRENT: usize = 16;
const IDS: usize = 800 * BATCH;

/// Microseconds of the server's CPU time per operation.
#[derive(Clone, Copy)]
struct Costs {
    claim: f64,
    /// Of ids of which one in two hundred is done, and one in ten.
    claim_half_percent: f64,
    claim_ten_percent: f64,
    complete: f64,
    clear: f64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = RedisServer::start(RedisOptions::new())?;
    let servers = std::slice::from_ref(&server);
    println!(
        "{}, {IDS} ids, {ROUNDS} rounds, µs per operation",
        version(&server)?
    );
    println!(
        "| server | commands | claim | 0.5 % duplicates | 10 % | completion | claim + completion | clearing |"
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    let at_server = || Redis::at(server.url());
    compare("one", servers, &at_server).await?;
    let cluster = ClusterServers::start()?;
    let in_cluster = || Redis::cluster(cluster.urls());
    compare("Cluster", cluster.nodes(), &in_cluster).await
}

/// Measures and prints the medians.
async fn compare(
    name: &str,
    servers: &[RedisServer],
    store: &dyn Fn() -> Redis,
) -> Result<(), Box<dyn Error>> {
    // One for each share of duplicates, because it decides how claims are sent.
    let stores = [(); 3].map(|()| store().timeout(Duration::from_secs(20)));
    let mut rounds = Vec::new();
    for round in 0..=ROUNDS {
        let costs = measure(servers, &stores).await?;
        // The first one connects and loads the script.
        if round > 0 {
            rounds.push(costs);
        }
    }
    let median = |of: fn(&Costs) -> f64| {
        let mut all: Vec<f64> = rounds.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let commands = if cfg!(oncegate_script_only) {
        "script"
    } else {
        "newer"
    };
    println!(
        "| {name} | {commands} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
        median(|it| it.claim),
        median(|it| it.claim_half_percent),
        median(|it| it.claim_ten_percent),
        median(|it| it.complete),
        median(|it| it.claim + it.complete),
        median(|it| it.clear),
    );
    Ok(())
}

async fn measure(
    servers: &[RedisServer],
    [store, half_percent, ten_percent]: &[Redis; 3],
) -> Result<Costs, Box<dyn Error>> {
    let claim = cost(servers, store, OperationKind::Claim, 1).await?;
    let complete = cost(servers, store, OperationKind::Complete, 1).await?;
    flush(servers)?;
    cost(servers, store, OperationKind::Claim, 1).await?;
    let clear = cost(servers, store, OperationKind::Clear(Effect::Nothing), 1).await?;
    flush(servers)?;
    let mut with_duplicates = [0.0; 2];
    for ((cost_of, store), every) in with_duplicates
        .iter_mut()
        .zip([half_percent, ten_percent])
        .zip([200, 10])
    {
        cost(servers, store, OperationKind::Complete, every).await?;
        *cost_of = cost(servers, store, OperationKind::Claim, 1).await?;
        flush(servers)?;
    }
    let [claim_half_percent, claim_ten_percent] = with_duplicates;
    Ok(Costs {
        claim,
        claim_half_percent,
        claim_ten_percent,
        complete,
        clear,
    })
}

/// Asks the same of every nth id.
async fn cost(
    servers: &[RedisServer],
    store: &Redis,
    kind: OperationKind,
    every: usize,
) -> Result<f64, Box<dyn Error>> {
    let ids: Vec<usize> = (0..IDS).step_by(every).collect();
    let batches: Vec<Vec<Operation>> = ids
        .chunks(BATCH)
        .map(|batch| batch.iter().map(|id| on(*id, kind)).collect())
        .collect();
    let before = cpu_time(servers)?;
    for concurrent in batches.chunks(CONCURRENT) {
        let answers = join_all(concurrent.iter().map(|batch| store.apply(batch))).await;
        for answer in answers.into_iter().flatten() {
            let verdict = answer?;
            let expected = match kind {
                OperationKind::Claim => {
                    matches!(verdict, Verdict::Granted(_) | Verdict::Duplicate)
                }
                OperationKind::Complete => matches!(verdict, Verdict::Done { .. }),
                _ => verdict == Verdict::Applied,
            };
            assert!(expected, "{kind:?}: {verdict:?}");
        }
    }
    Ok((cpu_time(servers)? - before) * 1e6 / ids.len() as f64)
}

fn on(id: usize, kind: OperationKind) -> Operation {
    let attempt = u32::from(kind != OperationKind::Claim);
    let token = Token(id as u128 + 1).0;
    let terms = terms(Guarantee::EffectivelyOnce);
    operation(&format!("payment-{id:012}"), kind, token, attempt, terms)
}

/// Seconds of CPU time that the primaries have used.
fn cpu_time(servers: &[RedisServer]) -> Result<f64, Box<dyn Error>> {
    let mut sum = 0.0;
    for server in servers {
        let info = server.reply("INFO")?;
        if field(&info, "role") != Some("master") {
            continue;
        }
        for name in ["used_cpu_user", "used_cpu_sys"] {
            sum += field(&info, name).unwrap_or_default().parse::<f64>()?;
        }
    }
    Ok(sum)
}

fn flush(servers: &[RedisServer]) -> std::io::Result<()> {
    servers.iter().try_for_each(|server| {
        let info = server.reply("INFO replication")?;
        if field(&info, "role") == Some("master") {
            server.command("FLUSHALL")?;
        }
        Ok(())
    })
}

fn version(server: &RedisServer) -> Result<String, Box<dyn Error>> {
    let info = server.reply("INFO server")?;
    let valkey = field(&info, "valkey_version").map(|version| format!("Valkey {version}"));
    let redis = || {
        format!(
            "Redis {}",
            field(&info, "redis_version").unwrap_or("unknown")
        )
    };
    Ok(valkey.unwrap_or_else(redis))
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
}
