//! Redis as a run has it: one server behind a proxy, or three behind Sentinels.

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use oncegate_testkit::proxy::{Proxy, RequestFault};
use oncegate_testkit::servers::{
    RedisOptions, RedisPersistence, RedisServer, SentinelServers, Server,
};
use tempfile::TempDir;

use super::{Heard, MOMENT, dark, frozen};
use crate::fleet::Faults;
use crate::schedule::{Kind, Planned};
use crate::{Error, lock};

/// How long Redis may take to write down what it had kept for a disk that was full.
const WRITTEN: Duration = Duration::from_millis(1_500);
/// How long a Redis has to be silent until Sentinels take it for gone: none that lives is, however
/// busy the machine may be.
const DOWN_AFTER: Duration = Duration::from_secs(3);
/// How many keys Redis loads in a second when it loads slowly: what it is given before it is killed
/// to do so.
const LOADED: f64 = 2_000.0;

/// The servers that keep the markers of a run.
pub(super) enum Store {
    /// One, with a proxy before it that consumers go through.
    One {
        server: Mutex<Heard<RedisServer>>,
        proxy: Proxy,
        password: String,
        _files: TempDir,
    },
    /// A primary and two replicas, as Sentinels name them.
    Three(Mutex<SentinelServers>),
}

impl Store {
    /// One server, with an append-only file and a disk that may be full. It lies in memory, where
    /// there is such a place: while a disk that others keep busy takes long to sync, Redis holds
    /// back for up to two seconds what it has answered, and a kill would have it forget that.
    pub(super) fn one(password: &str) -> Result<Self, Error> {
        let files = crate::in_memory()?;
        let options = RedisOptions::new()
            .persistence(RedisPersistence::EverySecond)
            .password(password)
            .disk_may_fill();
        let options = options.setting("dir", files.path().display().to_string());
        // So that it hears in time, while it loads a large file slowly, that it is enough.
        let options = options.setting("loading-process-events-interval-bytes", "4096");
        let server = RedisServer::start(options)?;
        let proxy = Proxy::to(server.port())?;
        Ok(Self::One {
            server: Mutex::new(Heard { server, kept: 0 }),
            proxy,
            password: password.to_owned(),
            _files: files,
        })
    }

    /// Three, with append-only files, and three Sentinels.
    pub(super) fn three(password: &str) -> Result<Self, Error> {
        Ok(Self::Three(Mutex::new(SentinelServers::start_patient(
            password, DOWN_AFTER,
        )?)))
    }

    /// Where consumers reach it: one URL, or those of Sentinels.
    pub(super) fn urls(&self) -> Vec<String> {
        match self {
            Self::One {
                proxy, password, ..
            } => vec![format!("redis://:{password}@127.0.0.1:{}", proxy.port())],
            Self::Three(servers) => lock(servers).urls(),
        }
    }

    /// Where the markers are now, without a proxy.
    pub(super) fn direct(&self) -> String {
        self.with_primary(RedisServer::url)
    }

    /// Forgets everything.
    pub(super) fn clear(&self) -> Result<(), Error> {
        self.with_primary(|primary| primary.command("FLUSHALL"))?;
        Ok(())
    }

    pub(super) fn version(&self) -> String {
        let told = self
            .with_primary(|primary| primary.reply("INFO server"))
            .unwrap_or_default();
        told.lines()
            .find_map(|line| line.strip_prefix("redis_version:"))
            .unwrap_or("unknown")
            .to_owned()
    }

    /// Keeps what it has said, in the folder.
    pub(super) fn keep_logs(&self, folder: &Path) -> Result<(), Error> {
        match self {
            Self::One { server, .. } => drop(lock(server).keep(folder)?),
            Self::Three(servers) => {
                for (which, server) in lock(servers).redis().iter().enumerate() {
                    let said = std::fs::read(server.directory().join("server.log"))?;
                    std::fs::write(folder.join(format!("redis-{which}.log")), said)?;
                }
            }
        }
        Ok(())
    }

    /// Does to it what was planned.
    pub(super) fn inflict(
        &self,
        planned: &Planned,
        seed: u64,
        faults: &Faults,
        folder: &Path,
    ) -> Result<(), Error> {
        let name = &planned.name();
        let (server, proxy) = match self {
            Self::One { server, proxy, .. } => (server, proxy),
            Self::Three(servers) => {
                return faults.play(name, None, || fail_over(&mut lock(servers), planned.lasts));
            }
        };
        let momentary = |play: &dyn Fn()| {
            faults.play(name, None, || {
                play();
                std::thread::sleep(MOMENT);
                Ok(())
            })
        };
        match planned.kind {
            Kind::KillRedis => {
                let mut redis = lock(server);
                redis.keep(folder)?;
                faults.play(name, None, || redis.restart(planned.lasts, Server::kill))
            }
            Kind::LoadRedis => {
                let mut redis = lock(server);
                redis.keep(folder)?;
                let keys = (planned.lasts.as_secs_f64() * LOADED) as u64;
                faults.play(name, None, || {
                    let fill = format!("EVAL \"for i=1,{keys} do redis.call('SET','filler:'..i,'x','PX',600000) end\" 0");
                    redis.server.command(&fill)?;
                    redis.server.kill();
                    redis.kept = 0;
                    Ok(redis.server.start_again_loading(planned.lasts)?)
                })
            }
            Kind::FreezeRedis => {
                let mut redis = lock(server);
                faults.play(name, None, || frozen(&mut redis.server, planned.lasts))
            }
            Kind::FillRedis => while_set(
                server,
                planned,
                faults,
                "CONFIG SET maxmemory 1",
                "CONFIG SET maxmemory 0",
            ),
            Kind::StrandRedis => while_set(
                server,
                planned,
                faults,
                "CONFIG SET min-replicas-to-write 1",
                "CONFIG SET min-replicas-to-write 0",
            ),
            // Nobody listens on that port: what it has it keeps.
            Kind::DemoteRedis => while_set(
                server,
                planned,
                faults,
                "REPLICAOF 127.0.0.1 1",
                "REPLICAOF NO ONE",
            ),
            Kind::FlushScripts => {
                let redis = lock(server);
                momentary(&|| drop(redis.server.command("SCRIPT FLUSH")))
            }
            Kind::FillDisk => {
                let redis = lock(server);
                let played = faults.play(name, None, || {
                    redis.server.fill_disk()?;
                    std::thread::sleep(planned.lasts);
                    Ok(redis.server.free_disk()?)
                });
                // Whoever kills it now would have it lose what it has answered: that is another
                // fault.
                std::thread::sleep(WRITTEN);
                played
            }
            Kind::DropReplies => {
                let (mut random, percent) = (fastrand::Rng::with_seed(seed), planned.percent);
                faults.play(name, None, || {
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
            Kind::DarkRedis => dark(proxy, planned, faults),
            Kind::ResetRedis => momentary(&|| proxy.reset()),
            other => Err(format!("{other} needs other servers").into()),
        }
    }

    fn with_primary<T>(&self, look: impl FnOnce(&RedisServer) -> T) -> T {
        match self {
            Self::One { server, .. } => look(&lock(server).server),
            Self::Three(servers) => {
                let servers = lock(servers);
                look(&servers.redis()[servers.primary()])
            }
        }
    }
}

/// Says one thing to Redis, and after a while another.
fn while_set(
    server: &Mutex<Heard<RedisServer>>,
    planned: &Planned,
    faults: &Faults,
    begin: &str,
    end: &str,
) -> Result<(), Error> {
    let redis = lock(server);
    let say = |what: &str| match redis.server.command(what)? {
        said if said.starts_with("+OK") => Ok(()),
        said => Err(Error::from(format!("Redis does not {what}: {said}"))),
    };
    faults.play(&planned.name(), None, || {
        say(begin)?;
        std::thread::sleep(planned.lasts);
        say(end)
    })
}

/// The replicas hear nothing of their primary for a while, then it is killed, and one of them takes
/// over. What it was told last is lost.
fn fail_over(servers: &mut SentinelServers, after: Duration) -> Result<(), Error> {
    let old = servers.primary();
    servers.cut_replication()?;
    std::thread::sleep(after);
    servers.redis_mut(old).kill();
    servers.wait_for_failover(old)?;
    Ok(servers.mend()?)
}
