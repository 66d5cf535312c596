//! The Redis servers of a run: one behind a proxy, or three with Sentinels.

use std::path::Path;
use std::time::Duration;

use oncegate::internal::Lock;
use oncegate_testkit::proxy::{Proxy, RequestFault};
use oncegate_testkit::servers::{
    RedisOptions, RedisPersistence, RedisServer, SentinelServers, Server,
};
use tempfile::TempDir;

use super::{LoggedServer, MOMENT, black_hole, freeze};
use crate::Error;
use crate::fleet::FaultLog;
use crate::schedule::{FaultKind, Planned};

/// How long Redis may take to write its buffers after its disk was full.
const WRITTEN: Duration = Duration::from_millis(1_500);
/// `down-after-milliseconds` of the Sentinels: longer than a running server may not answer on an
/// overloaded machine.
const DOWN_AFTER: Duration = Duration::from_secs(3);
/// How many keys Redis loads per second with a load delay; it gets this many for each second of
/// loading.
const LOADED: f64 = 2_000.0;

/// The marker store of a run.
pub(super) enum RunStore {
    /// One server behind a proxy.
    One {
        server: Lock<LoggedServer<RedisServer>>,
        proxy: Proxy,
        password: String,
        _files: TempDir,
    },
    /// A primary, two replicas and Sentinels.
    Three(Lock<SentinelServers>),
}

impl RunStore {
    /// One server with an append-only file, if possible on a memory file system: while a slow disk
    /// syncs, Redis may postpone writes for two seconds, and a kill would lose them.
    pub(super) fn one(password: &str) -> Result<Self, Error> {
        let files = crate::in_memory()?;
        let options = RedisOptions::new()
            .persistence(RedisPersistence::EverySecond)
            .password(password)
            .disk_may_fill();
        let options = options.setting("dir", files.path().display().to_string());
        // Processes commands often enough while loading, so that loading can be shortened in time.
        let options = options.setting("loading-process-events-interval-bytes", "4096");
        let server = RedisServer::start(options)?;
        let proxy = Proxy::to(server.port())?;
        Ok(Self::One {
            server: Lock::new(LoggedServer {
                server,
                saved_bytes: 0,
            }),
            proxy,
            password: password.to_owned(),
            _files: files,
        })
    }

    /// Three servers with append-only files, and three Sentinels.
    pub(super) fn three(password: &str) -> Result<Self, Error> {
        Ok(Self::Three(Lock::new(
            SentinelServers::start_with_down_after(password, DOWN_AFTER)?,
        )))
    }

    /// The URLs for consumers: one, or those of the Sentinels.
    pub(super) fn urls(&self) -> Vec<String> {
        match self {
            Self::One {
                proxy, password, ..
            } => vec![format!("redis://:{password}@127.0.0.1:{}", proxy.port())],
            Self::Three(servers) => servers.lock().urls(),
        }
    }

    /// The URL of the current primary, without a proxy.
    pub(super) fn direct(&self) -> String {
        self.with_primary(RedisServer::url)
    }

    /// Deletes all keys.
    pub(super) fn clear(&self) -> Result<(), Error> {
        self.with_primary(|primary| primary.command("FLUSHALL"))?;
        Ok(())
    }

    pub(super) fn version(&self) -> String {
        let text = self
            .with_primary(|primary| primary.reply("INFO server"))
            .unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("redis_version:"))
            .unwrap_or("unknown")
            .to_owned()
    }

    /// Saves the logs in the folder.
    pub(super) fn save_logs(&self, folder: &Path) -> Result<(), Error> {
        match self {
            Self::One { server, .. } => drop(server.lock().save_log(folder)?),
            Self::Three(servers) => {
                for (which, server) in servers.lock().redis().iter().enumerate() {
                    let text = std::fs::read(server.directory().join("server.log"))?;
                    std::fs::write(folder.join(format!("redis-{which}.log")), text)?;
                }
            }
        }
        Ok(())
    }

    /// Injects a fault.
    pub(super) fn inject(
        &self,
        planned: &Planned,
        seed: u64,
        faults: &FaultLog,
        folder: &Path,
    ) -> Result<(), Error> {
        let name = &planned.name();
        let (server, proxy) = match self {
            Self::One { server, proxy, .. } => (server, proxy),
            Self::Three(servers) => {
                return faults.record(name, None, || fail_over(&mut servers.lock(), planned.lasts));
            }
        };
        let momentary = |inject: &dyn Fn()| {
            faults.record(name, None, || {
                inject();
                std::thread::sleep(MOMENT);
                Ok(())
            })
        };
        match planned.kind {
            FaultKind::KillRedis => {
                let mut redis = server.lock();
                redis.save_log(folder)?;
                faults.record(name, None, || redis.restart(planned.lasts, Server::kill))
            }
            FaultKind::LoadRedis => {
                let mut redis = server.lock();
                redis.save_log(folder)?;
                let keys = (planned.lasts.as_secs_f64() * LOADED) as u64;
                faults.record(name, None, || {
                    let fill = format!("EVAL \"for i=1,{keys} do redis.call('SET','filler:'..i,'x','PX',600000) end\" 0");
                    redis.server.command(&fill)?;
                    redis.server.kill();
                    redis.saved_bytes = 0;
                    Ok(redis.server.start_again_loading(planned.lasts)?)
                })
            }
            FaultKind::FreezeRedis => {
                let mut redis = server.lock();
                faults.record(name, None, || freeze(&mut redis.server, planned.lasts))
            }
            FaultKind::FillRedis => while_set(
                server,
                planned,
                faults,
                "CONFIG SET maxmemory 1",
                "CONFIG SET maxmemory 0",
            ),
            FaultKind::StrandRedis => while_set(
                server,
                planned,
                faults,
                "CONFIG SET min-replicas-to-write 1",
                "CONFIG SET min-replicas-to-write 0",
            ),
            // No server listens on port 1, so Redis keeps its data.
            FaultKind::DemoteRedis => while_set(
                server,
                planned,
                faults,
                "REPLICAOF 127.0.0.1 1",
                "REPLICAOF NO ONE",
            ),
            FaultKind::FlushScripts => {
                let redis = server.lock();
                momentary(&|| drop(redis.server.command("SCRIPT FLUSH")))
            }
            FaultKind::FillDisk => {
                let redis = server.lock();
                let result = faults.record(name, None, || {
                    redis.server.fill_disk()?;
                    std::thread::sleep(planned.lasts);
                    Ok(redis.server.free_disk()?)
                });
                // A kill before Redis has written its buffers would lose acknowledged writes, which
                // is another fault.
                std::thread::sleep(WRITTEN);
                result
            }
            FaultKind::DropReplies => {
                let (mut random, percent) = (fastrand::Rng::with_seed(seed), planned.percent);
                faults.record(name, None, || {
                    proxy.inject_faults(move |_| {
                        if random.u8(0..100) < percent {
                            RequestFault::LoseReply
                        } else {
                            RequestFault::Pass
                        }
                    });
                    std::thread::sleep(planned.lasts);
                    // A black hole at the same time continues.
                    proxy.inject_faults(|_| RequestFault::Pass);
                    Ok(())
                })
            }
            FaultKind::DarkRedis => black_hole(proxy, planned, faults),
            FaultKind::ResetRedis => momentary(&|| proxy.reset()),
            other => Err(format!("{other} cannot be injected into a single Redis server").into()),
        }
    }

    fn with_primary<T>(&self, look: impl FnOnce(&RedisServer) -> T) -> T {
        match self {
            Self::One { server, .. } => look(&server.lock().server),
            Self::Three(servers) => {
                let servers = servers.lock();
                look(&servers.redis()[servers.primary()])
            }
        }
    }
}

/// Sends one command to Redis, waits for the duration of the fault, and sends another.
fn while_set(
    server: &Lock<LoggedServer<RedisServer>>,
    planned: &Planned,
    faults: &FaultLog,
    begin: &str,
    end: &str,
) -> Result<(), Error> {
    let redis = server.lock();
    let send = |what: &str| match redis.server.command(what)? {
        text if text.starts_with("+OK") => Ok(()),
        text => Err(Error::from(format!("Redis rejected `{what}`: {text}"))),
    };
    faults.record(&planned.name(), None, || {
        send(begin)?;
        std::thread::sleep(planned.lasts);
        send(end)
    })
}

/// Interrupts replication for a while, kills the primary, and waits for the failover. The last
/// writes are lost.
fn fail_over(servers: &mut SentinelServers, after: Duration) -> Result<(), Error> {
    let old = servers.primary();
    servers.cut_replication()?;
    std::thread::sleep(after);
    servers.redis_mut(old).kill();
    servers.wait_for_failover(old)?;
    Ok(servers.restore()?)
}
