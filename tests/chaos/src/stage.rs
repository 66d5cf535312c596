//! The servers of a run, with proxies before them, and what can be done to them.

mod store;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use oncegate_testkit::proxy::Proxy;
use oncegate_testkit::servers::{
    KafkaDoor, KafkaServer, KafkaUser, RabbitServer, Server, ServerKind, fetch_kafka,
};
use rustix::process::Signal;

use crate::fleet::{Faults, Fleet};
use crate::ledger::{Log, What};
use crate::schedule::{Kind, Planned};
use crate::secrets::{Secret, canary};
use crate::wire::refuse_letters;
use crate::worker::Broker;
use crate::{Error, lock};
use store::Store;

/// As whom consumers come to the broker.
const USER: &str = "chaos";
/// Where what failed is set aside, as RabbitMQ's policies name queues.
const ASIDE: &str = "\\.(dead-letters|in-doubt)$";
/// A consumer leaves the group or comes back so often.
const REBALANCE: Duration = Duration::from_secs(3);
/// How long a fault lasts that needs a moment to be noticed.
const MOMENT: Duration = Duration::from_millis(200);

/// Servers of our own, on free ports.
pub struct Stage {
    store: Store,
    broker: Arc<BrokerServer>,
    secrets: [Secret; 2],
}

enum BrokerServer {
    Kafka(Mutex<Heard<KafkaServer>>, String),
    Rabbit(Mutex<Heard<RabbitServer>>, Proxy, String),
}

/// A server, and how much of what it has said since its last start was kept.
struct Heard<S> {
    server: S,
    kept: usize,
}

impl Stage {
    /// Starts a Redis with an append-only file, and a broker.
    ///
    /// # Errors
    /// The first server that does not start.
    pub fn start(broker: Broker) -> Result<Self, Error> {
        let redis = Secret {
            of: "Redis",
            text: canary(),
        };
        let store = Store::one(&redis.text)?;
        let text = canary();
        let (broker, of) = match broker {
            Broker::Kafka => {
                let server = KafkaServer::start_secured(KafkaUser {
                    name: USER.to_owned(),
                    password: text.clone(),
                })?;
                let brokers = server.brokers();
                (
                    BrokerServer::Kafka(Mutex::new(Heard { server, kept: 0 }), brokers),
                    "Kafka",
                )
            }
            Broker::Rabbitmq => {
                let server = RabbitServer::start()?;
                server.control(&["-q", "add_user", USER, &text])?;
                server.control(&["-q", "set_permissions", USER, ".*", ".*", ".*"])?;
                let (proxy, url) = (Proxy::to(server.port())?, server.url());
                (
                    BrokerServer::Rabbit(Mutex::new(Heard { server, kept: 0 }), proxy, url),
                    "RabbitMQ",
                )
            }
        };
        Ok(Self {
            store,
            broker: Arc::new(broker),
            secrets: [redis, Secret { of, text }],
        })
    }

    /// The same broker, with three Redis servers that Sentinels watch instead of the one.
    ///
    /// # Errors
    /// The first server that does not start.
    pub fn with_sentinels(&self) -> Result<Self, Error> {
        let [_, of_the_broker] = &self.secrets;
        let redis = Secret {
            of: "Redis",
            text: canary(),
        };
        let store = Store::three(&redis.text)?;
        Ok(Self {
            store,
            broker: Arc::clone(&self.broker),
            secrets: [redis, of_the_broker.clone()],
        })
    }

    /// The passwords that consumers are given: none may be told by anybody.
    pub fn secrets(&self) -> &[Secret] {
        &self.secrets
    }

    /// Which broker it has.
    pub fn broker(&self) -> Broker {
        match *self.broker {
            BrokerServer::Kafka(..) => Broker::Kafka,
            BrokerServer::Rabbit(..) => Broker::Rabbitmq,
        }
    }

    /// Where consumers find their markers: one Redis, through the proxy, or Sentinels.
    pub fn redis(&self) -> Vec<String> {
        self.store.urls()
    }

    /// Where the markers are now, without the proxy.
    pub fn redis_direct(&self) -> String {
        self.store.direct()
    }

    /// Where consumers reach the broker: RabbitMQ through the proxy.
    pub fn url(&self) -> String {
        match &*self.broker {
            BrokerServer::Kafka(server, _) => lock(server).server.brokers_by(KafkaDoor::Login),
            BrokerServer::Rabbit(_, proxy, _) => {
                let [_, secret] = &self.secrets;
                format!(
                    "amqp://{USER}:{}@127.0.0.1:{}/%2f",
                    secret.text,
                    proxy.port()
                )
            }
        }
    }

    /// What a consumer is told to log in to Kafka with: a name, a password, and whom to believe.
    pub fn login(&self) -> Option<[String; 3]> {
        let BrokerServer::Kafka(server, _) = &*self.broker else {
            return None;
        };
        let [_, secret] = &self.secrets;
        let authority = lock(server).server.certificate_authority();
        Some([
            USER.to_owned(),
            secret.text.clone(),
            authority.display().to_string(),
        ])
    }

    /// Where the broker is, without a proxy.
    pub fn url_direct(&self) -> &str {
        match &*self.broker {
            BrokerServer::Kafka(_, url) | BrokerServer::Rabbit(_, _, url) => url,
        }
    }

    /// Forgets the markers of the runs before.
    ///
    /// # Errors
    /// If Redis does not.
    pub fn clear(&self) -> Result<(), Error> {
        self.store.clear()
    }

    /// What runs here, and how old it is.
    pub fn versions(&self) -> BTreeMap<String, String> {
        let commit = commit();
        let mut versions = BTreeMap::from([("Redis".to_owned(), self.store.version())]);
        let (name, version) = match &*self.broker {
            BrokerServer::Kafka(..) => ("Kafka", kafka_version()),
            BrokerServer::Rabbit(server, ..) => (
                "RabbitMQ",
                lock(server).server.control(&["-q", "version"]).ok(),
            ),
        };
        versions.insert(
            name.to_owned(),
            version
                .unwrap_or_else(|| "unknown".to_owned())
                .trim()
                .to_owned(),
        );
        versions.extend(said_by("rustc --version").map(|said| ("rustc".to_owned(), said)));
        versions.insert("commit".to_owned(), commit.to_owned());
        versions
    }

    /// Keeps what the servers have said, and looks in it for refused acknowledgements.
    ///
    /// # Errors
    /// What the file system said.
    pub fn keep_logs(&self, folder: &Path, log: &Log) -> Result<(), Error> {
        self.store.keep_logs(folder)?;
        match &*self.broker {
            BrokerServer::Kafka(server, _) => drop(lock(server).keep(folder)?),
            BrokerServer::Rabbit(server, ..) => {
                let said = lock(server).keep(folder)?;
                log.write_all(
                    refused_acknowledgements(&said)
                        .into_iter()
                        .map(|line| What::ChannelRefused { line }),
                );
            }
        }
        Ok(())
    }

    /// Does what was planned, writes it down, and returns when it is over: whatever was killed runs
    /// again.
    ///
    /// # Errors
    /// If that cannot be done: it says nothing about the consumers.
    pub fn inflict(&self, planned: &Planned, seed: u64, on: &Scene<'_>) -> Result<(), Error> {
        let Scene {
            fleet,
            faults,
            folder,
            log,
            ..
        } = *on;
        let name = &planned.name();
        let pause = || std::thread::sleep(planned.lasts);
        let momentary = |play: &dyn Fn()| {
            faults.play(name, None, || {
                play();
                std::thread::sleep(MOMENT);
                Ok(())
            })
        };
        match planned.kind {
            Kind::KillConsumer | Kind::TerminateConsumer => {
                let mut slot = fleet.slot(planned.consumer);
                faults.play(name, slot.name(), || {
                    if planned.kind == Kind::KillConsumer {
                        fleet.kill(&mut slot)?
                    } else {
                        fleet.terminate(&mut slot)?
                    }
                    pause();
                    fleet.start(&mut slot)
                })
            }
            Kind::FreezeConsumer => {
                let slot = fleet.slot(planned.consumer);
                faults.play(name, slot.name(), || {
                    slot.signal(Signal::STOP)?;
                    pause();
                    slot.signal(Signal::CONT)
                })
            }
            Kind::RollingRestart => (0..fleet.size()).try_for_each(|number| {
                let since = Instant::now();
                let mut slot = fleet.slot(number);
                faults.play(name, slot.name(), || {
                    fleet.terminate(&mut slot)?;
                    fleet.start(&mut slot)
                })?;
                drop(slot);
                let is_last = number + 1 == fleet.size();
                std::thread::sleep(if is_last {
                    Duration::ZERO
                } else {
                    planned.lasts.saturating_sub(since.elapsed())
                });
                Ok(())
            }),
            Kind::RefuseLetters => {
                // Before the fault log says that they are refused: nothing waits for a server then.
                self.letters(on.queue, Letters::Refused)?;
                faults.play(name, None, || {
                    std::thread::sleep(planned.lasts);
                    self.letters(on.queue, Letters::Taken)
                })
            }
            Kind::Rebalance => {
                let mut slot = fleet.slot(planned.consumer);
                faults.play(name, None, || {
                    let since = Instant::now();
                    while since.elapsed() < planned.lasts {
                        fleet.terminate(&mut slot)?;
                        std::thread::sleep(REBALANCE);
                        fleet.start(&mut slot)?;
                        std::thread::sleep(REBALANCE);
                    }
                    Ok(())
                })
            }
            Kind::DarkRabbit => dark(self.rabbit()?.1, planned, faults),
            Kind::ResetRabbit => {
                let proxy = self.rabbit()?.1;
                momentary(&|| proxy.reset())
            }
            Kind::RestartRabbit | Kind::KillRabbit => {
                self.keep_logs(folder, log)?;
                let mut server = lock(self.rabbit()?.0);
                let end = if planned.kind == Kind::KillRabbit {
                    Server::kill
                } else {
                    Server::stop
                };
                faults.play(name, None, || server.restart(planned.lasts, end))
            }
            Kind::CloseConnections => {
                self.control(on, name, &["-q", "close_all_connections", "chaos"])
            }
            // As any soft error of a channel: it asks for what is not there.
            Kind::CloseChannels => self.to_channels(
                on,
                name,
                "rabbit_channel:do(Channel, {'basic.get', 0, <<\"no such queue\">>, false})",
            ),
            // The channel stays open, and what it holds with it.
            Kind::CancelConsumers => {
                let does = "Cancel = {'basic.cancel', Tag, true}, rabbit_channel:do(Channel, Cancel), rabbit_channel:send_command(Channel, Cancel)";
                self.to_channels(on, name, does)
            }
            Kind::KillKafka => {
                self.keep_logs(folder, log)?;
                let mut server = lock(self.kafka()?);
                faults.play(name, None, || server.restart(planned.lasts, Server::kill))
            }
            Kind::FreezeKafka => {
                let mut server = lock(self.kafka()?);
                faults.play(name, None, || frozen(&mut server.server, planned.lasts))
            }
            Kind::FailOverRedis => {
                self.store.inflict(planned, seed, faults, folder)?;
                match on.after_a_loss {
                    AfterALoss::GoOn => Ok(()),
                    // So a person accepts what is lost.
                    AfterALoss::StartAgain => {
                        fleet.terminate_all()?;
                        fleet.start_all()
                    }
                }
            }
            _ => self.store.inflict(planned, seed, faults, folder),
        }
    }

    fn letters(&self, queue: &str, letters: Letters) -> Result<(), Error> {
        match (&*self.broker, letters) {
            (BrokerServer::Kafka(_, brokers), letters) => refuse_letters(brokers, queue, letters),
            (BrokerServer::Rabbit(server, ..), Letters::Refused) => {
                let full = r#"{"max-length":0,"overflow":"reject-publish"}"#;
                lock(server).server.control(&[
                    "-q",
                    "set_policy",
                    "--apply-to",
                    "queues",
                    "chaos",
                    ASIDE,
                    full,
                ])?;
                Ok(())
            }
            (BrokerServer::Rabbit(server, ..), Letters::Taken) => {
                lock(server)
                    .server
                    .control(&["-q", "clear_policy", "chaos"])?;
                Ok(())
            }
        }
    }

    fn kafka(&self) -> Result<&Mutex<Heard<KafkaServer>>, Error> {
        match &*self.broker {
            BrokerServer::Kafka(server, _) => Ok(server),
            BrokerServer::Rabbit(..) => Err("there is no Kafka here".into()),
        }
    }

    fn rabbit(&self) -> Result<(&Mutex<Heard<RabbitServer>>, &Proxy), Error> {
        match &*self.broker {
            BrokerServer::Rabbit(server, proxy, _) => Ok((server, proxy)),
            BrokerServer::Kafka(..) => Err("there is no RabbitMQ here".into()),
        }
    }

    fn control(&self, on: &Scene<'_>, name: &str, arguments: &[&str]) -> Result<(), Error> {
        let server = lock(self.rabbit()?.0);
        on.faults.play(name, None, || {
            server.server.control(arguments)?;
            Ok(())
        })
    }

    /// Lets the node do something to each channel that consumes from the run's queue.
    fn to_channels(&self, on: &Scene<'_>, name: &str, does: &str) -> Result<(), Error> {
        let program = format!(
            "[begin [Channel, Tag] = [proplists:get_value(Key, C) || Key <- [channel_pid, consumer_tag]], {does} end || \
             C <- rabbit_amqqueue:consumers_all(<<\"/\">>), proplists:get_value(queue_name, C) == {{resource, <<\"/\">>, queue, <<\"{}\">>}}].",
            on.queue
        );
        self.control(on, name, &["-q", "eval", &program])
    }
}

/// What a fault is played on, beside the servers.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// The consumers.
    pub fleet: &'a Fleet,
    /// The fault log.
    pub faults: &'a Faults,
    /// The run's folder.
    pub folder: &'a Path,
    /// The player's part of the ledger.
    pub log: &'a Arc<Log>,
    /// The topic or queue.
    pub queue: &'a str,
    /// What becomes of the consumers when Redis has forgotten something.
    pub after_a_loss: AfterALoss,
}

/// What becomes of consumers when Redis has forgotten something: at most once pauses, until a
/// person accepts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterALoss {
    /// They go on.
    GoOn,
    /// All are ended, and started again.
    StartAgain,
}

/// Whether the broker takes what is to be set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Letters {
    /// It does.
    Taken,
    /// It does not.
    Refused,
}

impl<K: ServerKind> Heard<Server<K>> {
    /// Ends it, and starts it again after this long.
    fn restart(&mut self, after: Duration, end: fn(&mut Server<K>)) -> Result<(), Error> {
        end(&mut self.server);
        self.kept = 0;
        std::thread::sleep(after);
        Ok(self.server.start_again()?)
    }

    /// Appends what it has said and was not kept yet to a file in the folder.
    fn keep(&mut self, folder: &Path) -> Result<String, Error> {
        let said = std::fs::read(self.server.directory().join("server.log"))?;
        let new = said.get(self.kept..).unwrap_or_default();
        self.kept = said.len();
        let path = folder.join(format!("{}.log", K::NAME.to_lowercase()));
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)?
            .write_all(new)?;
        Ok(String::from_utf8_lossy(new).into_owned())
    }
}

fn frozen<K: ServerKind>(server: &mut Server<K>, lasts: Duration) -> Result<(), Error> {
    server.freeze();
    std::thread::sleep(lasts);
    server.thaw();
    Ok(())
}

fn dark(proxy: &Proxy, planned: &Planned, faults: &Faults) -> Result<(), Error> {
    faults.play(&planned.name(), None, || {
        proxy.black_hole();
        std::thread::sleep(planned.lasts);
        // Faults that are injected at the same time continue.
        proxy.end_black_hole();
        Ok(())
    })
}

/// The lines of RabbitMQ's log that say why it closed a channel with 406.
pub(crate) fn refused_acknowledgements(said: &str) -> Vec<String> {
    said.lines()
        .filter(|line| line.to_lowercase().contains("precondition_failed"))
        .map(str::to_owned)
        .collect()
}

/// The commit that lay here when this process began, and whether what is built had changes beside
/// it. Asked for at the beginning, since others may commit while a long run lasts.
pub fn commit() -> &'static str {
    static COMMIT: OnceLock<String> = OnceLock::new();
    COMMIT.get_or_init(|| {
        let commit =
            said_by("git rev-parse --short=12 HEAD").unwrap_or_else(|| "unknown".to_owned());
        let changed = said_by("git status --porcelain -- Cargo.toml Cargo.lock crates tests/chaos");
        if changed.is_none_or(|changed| changed.is_empty()) {
            commit
        } else {
            format!("{commit} with changes")
        }
    })
}

fn kafka_version() -> Option<String> {
    let libraries = fetch_kafka().ok()?;
    Some(
        libraries
            .parent()?
            .file_name()?
            .to_str()?
            .strip_prefix("kafka-")?
            .to_owned(),
    )
}

fn said_by(command: &str) -> Option<String> {
    let mut words = command.split(' ');
    let output = Command::new(words.next()?)
        .args(words)
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let said = String::from_utf8(output.stdout).ok()?;
    Some(said.trim().trim_start_matches("rustc ").to_owned())
}
