//! The servers of a run, their proxies, and the injection of faults.

mod store;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use oncegate::internal::Lock;
use oncegate_testkit::proxy::Proxy;
use oncegate_testkit::servers::{
    KafkaListener, KafkaServer, KafkaUser, RabbitServer, Server, ServerKind, fetch_kafka,
};
use rustix::process::Signal;

use crate::Error;
use crate::broker_client;
use crate::fleet::{FaultLog, Fleet};
use crate::ledger::{Log, What};
use crate::schedule::{FaultKind, Planned};
use crate::secrets::{Secret, random_password};
use crate::worker::Broker;
use store::RunStore;

/// The user of the consumers at the broker.
const USER: &str = "chaos";
/// The pattern of the dead-letter and in-doubt queues in RabbitMQ policies.
const DESTINATIONS_PATTERN: &str = "\\.(dead-letters|in-doubt)$";
/// The interval at which a consumer leaves or joins the group.
const REBALANCE: Duration = Duration::from_secs(3);
/// The recorded duration of instantaneous faults.
const MOMENT: Duration = Duration::from_millis(200);

/// The servers of a run, on free ports.
pub struct TestServers {
    store: RunStore,
    broker: Arc<BrokerServer>,
    secrets: [Secret; 2],
}

enum BrokerServer {
    Kafka(Lock<LoggedServer<KafkaServer>>, String),
    Rabbit(Lock<LoggedServer<RabbitServer>>, Proxy, String),
}

/// A server, and how many bytes of its log since the last start are saved.
struct LoggedServer<S> {
    server: S,
    saved_bytes: usize,
}

impl TestServers {
    /// Starts a Redis with an append-only file, and a broker.
    ///
    /// # Errors
    /// The error of the first server that does not start.
    pub fn start(broker: Broker) -> Result<Self, Error> {
        let redis = Secret {
            of: "Redis",
            text: random_password(),
        };
        let store = RunStore::one(&redis.text)?;
        let text = random_password();
        let (broker, of) = match broker {
            Broker::Kafka => {
                let server = KafkaServer::start_secured(KafkaUser {
                    name: USER.to_owned(),
                    password: text.clone(),
                })?;
                let brokers = server.brokers();
                (
                    BrokerServer::Kafka(
                        Lock::new(LoggedServer {
                            server,
                            saved_bytes: 0,
                        }),
                        brokers,
                    ),
                    "Kafka",
                )
            }
            Broker::Rabbitmq => {
                let server = RabbitServer::start()?;
                server.control(&["-q", "add_user", USER, &text])?;
                server.control(&["-q", "set_permissions", USER, ".*", ".*", ".*"])?;
                let (proxy, url) = (Proxy::to(server.port())?, server.url());
                (
                    BrokerServer::Rabbit(
                        Lock::new(LoggedServer {
                            server,
                            saved_bytes: 0,
                        }),
                        proxy,
                        url,
                    ),
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

    /// The same broker, with three Redis servers and Sentinels instead of one server.
    ///
    /// # Errors
    /// The first server that does not start.
    pub fn with_sentinels(&self) -> Result<Self, Error> {
        let [_, of_the_broker] = &self.secrets;
        let redis = Secret {
            of: "Redis",
            text: random_password(),
        };
        let store = RunStore::three(&redis.text)?;
        Ok(Self {
            store,
            broker: Arc::clone(&self.broker),
            secrets: [redis, of_the_broker.clone()],
        })
    }

    /// The passwords of the consumers; no file of the run may contain them.
    pub fn secrets(&self) -> &[Secret] {
        &self.secrets
    }

    /// The kind of broker.
    pub fn broker(&self) -> Broker {
        match *self.broker {
            BrokerServer::Kafka(..) => Broker::Kafka,
            BrokerServer::Rabbit(..) => Broker::Rabbitmq,
        }
    }

    /// The URLs of the store for consumers: one Redis behind the proxy, or Sentinels.
    pub fn redis(&self) -> Vec<String> {
        self.store.urls()
    }

    /// The URL of the current primary, without the proxy.
    pub fn redis_direct(&self) -> String {
        self.store.direct()
    }

    /// The address of the broker for consumers; RabbitMQ is behind the proxy.
    pub fn url(&self) -> String {
        match &*self.broker {
            BrokerServer::Kafka(server, _) => server.lock().server.brokers_at(KafkaListener::Login),
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

    /// The login for Kafka: name, password, and the file with the authority's certificate.
    pub fn login(&self) -> Option<[String; 3]> {
        let BrokerServer::Kafka(server, _) = &*self.broker else {
            return None;
        };
        let [_, secret] = &self.secrets;
        let authority = server.lock().server.certificate_authority();
        Some([
            USER.to_owned(),
            secret.text.clone(),
            authority.display().to_string(),
        ])
    }

    /// The address of the broker without the proxy.
    pub fn url_direct(&self) -> &str {
        match &*self.broker {
            BrokerServer::Kafka(_, url) | BrokerServer::Rabbit(_, _, url) => url,
        }
    }

    /// Deletes the markers of earlier runs.
    ///
    /// # Errors
    /// The error of Redis.
    pub fn clear(&self) -> Result<(), Error> {
        self.store.clear()
    }

    /// The versions of the servers, of Rust, and the tested commit.
    pub fn versions(&self) -> BTreeMap<String, String> {
        let commit = commit();
        let mut versions = BTreeMap::from([("Redis".to_owned(), self.store.version())]);
        let (name, version) = match &*self.broker {
            BrokerServer::Kafka(..) => ("Kafka", kafka_version()),
            BrokerServer::Rabbit(server, ..) => (
                "RabbitMQ",
                server.lock().server.control(&["-q", "version"]).ok(),
            ),
        };
        versions.insert(
            name.to_owned(),
            version
                .unwrap_or_else(|| "unknown".to_owned())
                .trim()
                .to_owned(),
        );
        versions.extend(output_of("rustc --version").map(|text| ("rustc".to_owned(), text)));
        versions.insert("commit".to_owned(), commit.to_owned());
        versions
    }

    /// Saves the logs of the servers, and records refused acknowledgements in them.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn save_logs(&self, folder: &Path, log: &Log) -> Result<(), Error> {
        self.store.save_logs(folder)?;
        match &*self.broker {
            BrokerServer::Kafka(server, _) => drop(server.lock().save_log(folder)?),
            BrokerServer::Rabbit(server, ..) => {
                let text = server.lock().save_log(folder)?;
                log.write_all(
                    refused_acknowledgements(&text)
                        .into_iter()
                        .map(|line| What::ChannelRefused { line }),
                );
            }
        }
        Ok(())
    }

    /// Injects a fault, records it, and returns when it has ended and killed processes run again.
    ///
    /// # Errors
    /// The fault could not be injected; the run has no result.
    pub fn inject(
        &self,
        planned: &Planned,
        seed: u64,
        context: &FaultContext<'_>,
    ) -> Result<(), Error> {
        let FaultContext {
            fleet,
            faults,
            folder,
            log,
            ..
        } = *context;
        let name = &planned.name();
        let pause = || std::thread::sleep(planned.lasts);
        let momentary = |inject: &dyn Fn()| {
            faults.record(name, None, || {
                inject();
                std::thread::sleep(MOMENT);
                Ok(())
            })
        };
        match planned.kind {
            FaultKind::KillConsumer | FaultKind::TerminateConsumer => {
                let mut slot = fleet.slot(planned.consumer);
                faults.record(name, slot.name(), || {
                    if planned.kind == FaultKind::KillConsumer {
                        fleet.kill(&mut slot)?
                    } else {
                        fleet.terminate(&mut slot)?
                    }
                    pause();
                    fleet.start(&mut slot)
                })
            }
            FaultKind::FreezeConsumer => {
                let slot = fleet.slot(planned.consumer);
                faults.record(name, slot.name(), || {
                    slot.signal(Signal::STOP)?;
                    pause();
                    slot.signal(Signal::CONT)
                })
            }
            FaultKind::RollingRestart => (0..fleet.size()).try_for_each(|number| {
                let since = Instant::now();
                let mut slot = fleet.slot(number);
                faults.record(name, slot.name(), || {
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
            FaultKind::RefuseLetters => {
                // Before the recorded start of the fault, since changing the setting may take time.
                self.set_rejected_writes(context.queue, RejectedWrites::Refused)?;
                faults.record(name, None, || {
                    std::thread::sleep(planned.lasts);
                    self.set_rejected_writes(context.queue, RejectedWrites::Accepted)
                })
            }
            FaultKind::Rebalance => {
                let mut slot = fleet.slot(planned.consumer);
                faults.record(name, None, || {
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
            FaultKind::DarkRabbit => black_hole(self.rabbit()?.1, planned, faults),
            FaultKind::ResetRabbit => {
                let proxy = self.rabbit()?.1;
                momentary(&|| proxy.reset())
            }
            FaultKind::RestartRabbit | FaultKind::KillRabbit => {
                self.save_logs(folder, log)?;
                let mut server = self.rabbit()?.0.lock();
                let end = if planned.kind == FaultKind::KillRabbit {
                    Server::kill
                } else {
                    Server::stop
                };
                faults.record(name, None, || server.restart(planned.lasts, end))
            }
            FaultKind::CloseConnections => {
                self.control(context, name, &["-q", "close_all_connections", "chaos"])
            }
            // A soft error closes the channel: it requests a queue that does not exist.
            FaultKind::CloseChannels => self.to_channels(
                context,
                name,
                "rabbit_channel_common:do(Channel, {'basic.get', 0, <<\"no such queue\">>, false})",
            ),
            // The channel stays open and keeps its unacknowledged messages.
            FaultKind::CancelConsumers => {
                let does = "Cancel = {'basic.cancel', Tag, true}, rabbit_channel_common:do(Channel, Cancel), rabbit_channel:send_command(Channel, Cancel)";
                self.to_channels(context, name, does)
            }
            FaultKind::KillKafka => {
                self.save_logs(folder, log)?;
                let mut server = self.kafka()?.lock();
                faults.record(name, None, || server.restart(planned.lasts, Server::kill))
            }
            FaultKind::FreezeKafka => {
                let mut server = self.kafka()?.lock();
                faults.record(name, None, || freeze(&mut server.server, planned.lasts))
            }
            FaultKind::FailOverRedis => {
                self.store.inject(planned, seed, faults, folder)?;
                match context.on_data_loss {
                    OnDataLoss::KeepRunning => Ok(()),
                    // A restart accepts the loss, as an operator would.
                    OnDataLoss::Restart => {
                        fleet.terminate_all()?;
                        fleet.start_all()
                    }
                }
            }
            _ => self.store.inject(planned, seed, faults, folder),
        }
    }

    fn set_rejected_writes(&self, queue: &str, writes: RejectedWrites) -> Result<(), Error> {
        match (&*self.broker, writes) {
            (BrokerServer::Kafka(_, brokers), writes) => {
                broker_client::set_rejected_writes(brokers, queue, writes)
            }
            (BrokerServer::Rabbit(server, ..), RejectedWrites::Refused) => {
                let full = r#"{"max-length":0,"overflow":"reject-publish"}"#;
                server.lock().server.control(&[
                    "-q",
                    "set_policy",
                    "--apply-to",
                    "queues",
                    "chaos",
                    DESTINATIONS_PATTERN,
                    full,
                ])?;
                Ok(())
            }
            (BrokerServer::Rabbit(server, ..), RejectedWrites::Accepted) => {
                server
                    .lock()
                    .server
                    .control(&["-q", "clear_policy", "chaos"])?;
                Ok(())
            }
        }
    }

    fn kafka(&self) -> Result<&Lock<LoggedServer<KafkaServer>>, Error> {
        match &*self.broker {
            BrokerServer::Kafka(server, _) => Ok(server),
            BrokerServer::Rabbit(..) => Err("these servers include no Kafka".into()),
        }
    }

    fn rabbit(&self) -> Result<(&Lock<LoggedServer<RabbitServer>>, &Proxy), Error> {
        match &*self.broker {
            BrokerServer::Rabbit(server, proxy, _) => Ok((server, proxy)),
            BrokerServer::Kafka(..) => Err("these servers include no RabbitMQ".into()),
        }
    }

    fn control(
        &self,
        context: &FaultContext<'_>,
        name: &str,
        arguments: &[&str],
    ) -> Result<(), Error> {
        let server = self.rabbit()?.0.lock();
        context.faults.record(name, None, || {
            server.server.control(arguments)?;
            Ok(())
        })
    }

    /// Evaluates an Erlang expression for each channel that consumes from the run's queue.
    fn to_channels(&self, context: &FaultContext<'_>, name: &str, does: &str) -> Result<(), Error> {
        let program = format!(
            "[begin [Channel, Tag] = [proplists:get_value(Key, C) || Key <- [channel_pid, consumer_tag]], {does} end || \
             C <- rabbit_amqqueue:consumers_all(<<\"/\">>), proplists:get_value(queue_name, C) == {{resource, <<\"/\">>, queue, <<\"{}\">>}}].",
            context.queue
        );
        self.control(context, name, &["-q", "eval", &program])
    }
}

/// What a fault needs besides the servers.
#[derive(Clone, Copy, Debug)]
pub struct FaultContext<'a> {
    /// The consumers.
    pub fleet: &'a Fleet,
    /// The fault log.
    pub faults: &'a FaultLog,
    /// The run's folder.
    pub folder: &'a Path,
    /// The ledger file of the harness.
    pub log: &'a Arc<Log>,
    /// The topic or queue.
    pub queue: &'a str,
    /// What to do with the consumers after Redis lost writes.
    pub on_data_loss: OnDataLoss,
}

/// What to do with the consumers after Redis lost writes. With at most once they pause until an
/// operator accepts the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDataLoss {
    /// Leave them running.
    KeepRunning,
    /// Restart all of them.
    Restart,
}

/// Whether the broker accepts dead letters and in-doubt messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectedWrites {
    /// It accepts them.
    Accepted,
    /// It refuses them.
    Refused,
}

impl<K: ServerKind> LoggedServer<Server<K>> {
    /// Ends the server, and starts it again after this time.
    fn restart(&mut self, after: Duration, end: fn(&mut Server<K>)) -> Result<(), Error> {
        end(&mut self.server);
        self.saved_bytes = 0;
        std::thread::sleep(after);
        Ok(self.server.start_again()?)
    }

    /// Appends the new part of its log to a file in the folder, and returns it.
    fn save_log(&mut self, folder: &Path) -> Result<String, Error> {
        let text = std::fs::read(self.server.directory().join("server.log"))?;
        let new = text.get(self.saved_bytes..).unwrap_or_default();
        self.saved_bytes = text.len();
        let path = folder.join(format!("{}.log", K::NAME.to_lowercase()));
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)?
            .write_all(new)?;
        Ok(String::from_utf8_lossy(new).into_owned())
    }
}

fn freeze<K: ServerKind>(server: &mut Server<K>, lasts: Duration) -> Result<(), Error> {
    server.freeze();
    std::thread::sleep(lasts);
    server.thaw();
    Ok(())
}

fn black_hole(proxy: &Proxy, planned: &Planned, faults: &FaultLog) -> Result<(), Error> {
    faults.record(&planned.name(), None, || {
        proxy.black_hole();
        std::thread::sleep(planned.lasts);
        // Faults that are injected at the same time continue.
        proxy.end_black_hole();
        Ok(())
    })
}

/// The lines of RabbitMQ's log in which it closed a channel with 406.
pub(crate) fn refused_acknowledgements(text: &str) -> Vec<String> {
    text.lines()
        .filter(|line| line.to_lowercase().contains("precondition_failed"))
        .map(str::to_owned)
        .collect()
}

/// The commit at the start of this process, and whether the sources had uncommitted changes. Read
/// once at the start, since the commit may change during a long run.
pub fn commit() -> &'static str {
    static COMMIT: OnceLock<String> = OnceLock::new();
    COMMIT.get_or_init(|| {
        let commit =
            output_of("git rev-parse --short=12 HEAD").unwrap_or_else(|| "unknown".to_owned());
        let changed =
            output_of("git status --porcelain -- Cargo.toml Cargo.lock crates tests/chaos");
        if changed.is_none_or(|changed| changed.is_empty()) {
            commit
        } else {
            format!("{commit} with changes")
        }
    })
}

/// The version of the Kafka that tests start.
pub(crate) fn kafka_version() -> Option<String> {
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

fn output_of(command: &str) -> Option<String> {
    let mut words = command.split(' ');
    let output = Command::new(words.next()?)
        .args(words)
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().trim_start_matches("rustc ").to_owned())
}
