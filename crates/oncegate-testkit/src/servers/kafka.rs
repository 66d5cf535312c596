//! A Kafka broker as a test server.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::kafka_distribution::fetch_kafka;
use super::kafka_listeners::{self, KafkaListener, KafkaUser};
use super::port::free_ports;
use super::server::{Server, ServerKind, run_program, temporary_directory, write};
use super::{ServerError, io_error};

/// The default cluster id: `oncegate-kafka-1` in base64.
pub(crate) const CLUSTER_ID: &str = "b25jZWdhdGUta2Fma2EtMQ";

/// The file with the broker's settings.
const PROPERTIES: &str = "server.properties";

/// A Kafka broker that is also its controller. Needs `java`, and `mvn` if the broker's jars are not
/// in the cache.
pub type KafkaServer = Server<Kafka>;

/// The kind of a [`KafkaServer`].
#[derive(Debug)]
pub struct Kafka {
    port: u16,
    /// The listeners with TLS and their ports; empty unless the broker is secured.
    listeners: Vec<(KafkaListener, u16)>,
    /// The user of [`KafkaListener::Login`].
    user: Option<KafkaUser>,
    class_path: PathBuf,
    /// The option of `java` for the size of the heap.
    heap: &'static str,
}

/// The controller quorum of a cluster, as one of its nodes needs it.
#[derive(Debug, Clone)]
pub(crate) struct Quorum {
    /// The controller ports of all nodes.
    pub(crate) controllers: Vec<u16>,
    /// The index of this node in `controllers`.
    pub(crate) node: usize,
    /// The cluster id, the same for all nodes.
    pub(crate) cluster_id: String,
}

impl KafkaServer {
    /// Starts a broker and returns when it answers, which takes some seconds. Downloads the broker
    /// first if it is not in the cache.
    ///
    /// # Errors
    /// [`ServerError`], with the end of the server's log, if it does not start or cannot be
    /// downloaded.
    pub fn start() -> Result<Self, ServerError> {
        Self::start_with(CLUSTER_ID, None)
    }

    /// Starts a broker with this cluster id, by which clients distinguish clusters: 16 bytes in
    /// base64 without padding.
    ///
    /// # Errors
    /// As [`KafkaServer::start`].
    pub fn start_cluster(cluster_id: &str) -> Result<Self, ServerError> {
        Self::start_with(cluster_id, None)
    }

    /// Starts a broker with every [`KafkaListener`]. [`brokers`](Self::brokers) returns the address
    /// of the plain one. The certificate is for `localhost` and 127.0.0.1. Needs `openssl`.
    ///
    /// # Errors
    /// As [`KafkaServer::start`], or if no certificate can be made.
    pub fn start_secured(user: KafkaUser) -> Result<Self, ServerError> {
        Self::start_with(CLUSTER_ID, Some(user))
    }

    fn start_with(cluster_id: &str, user: Option<KafkaUser>) -> Result<Self, ServerError> {
        let [controller] = free_ports(Kafka::NAME)?;
        Self::start_in(
            &Quorum {
                controllers: vec![controller],
                node: 0,
                cluster_id: cluster_id.to_owned(),
            },
            user,
        )
    }

    /// Starts the node of this quorum. With several nodes it answers only after a majority of them
    /// has started.
    pub(crate) fn start_in(quorum: &Quorum, user: Option<KafkaUser>) -> Result<Self, ServerError> {
        let class_path = fetch_kafka()?.join("*");
        let [port, tls, mutual, login] = free_ports(Kafka::NAME)?;
        let listeners = user
            .as_ref()
            .map(|_| {
                KafkaListener::SECURED
                    .into_iter()
                    .zip([tls, mutual, login])
                    .collect()
            })
            .unwrap_or_default();
        let heap = if quorum.controllers.len() == 1 {
            "-Xmx512m"
        } else {
            "-Xmx256m"
        };
        let directory = temporary_directory(Kafka::NAME)?;
        let kafka = Kafka {
            port,
            listeners,
            user,
            class_path,
            heap,
        };
        let mut properties = kafka.properties(quorum, directory.path());
        if let Some(user) = &kafka.user {
            kafka_listeners::make_certificates(Kafka::NAME, directory.path())?;
            properties += &kafka_listeners::properties(user, directory.path());
        }
        write(Kafka::NAME, &directory.path().join(PROPERTIES), &properties)?;
        kafka.format(directory.path(), &quorum.cluster_id)?;
        Self::launch(kafka, directory)
    }

    /// The broker's address for clients without TLS.
    pub fn brokers(&self) -> String {
        format!("127.0.0.1:{}", self.kind().port)
    }

    /// The broker's address at a listener.
    ///
    /// # Panics
    /// If the broker does not have the listener: [`KafkaServer::start_secured`] enables all, the
    /// other functions only the plain one.
    pub fn brokers_at(&self, listener: KafkaListener) -> String {
        let Kafka {
            port, listeners, ..
        } = self.kind();
        let found = listeners
            .iter()
            .find(|(it, _)| *it == listener)
            .map(|(_, port)| port)
            .or((listener == KafkaListener::Plain).then_some(port));
        format!("localhost:{}", found.expect("this broker has the listener"))
    }

    /// The port on 127.0.0.1. Only [`take_port_of`](Self::take_port_of) changes it.
    pub fn port(&self) -> u16 {
        self.kind().port
    }

    /// Gives this broker the port of another broker at its next start: clients of the other broker
    /// then reach this one, as if a DNS name were moved to another cluster. Both brokers must be
    /// stopped and have only the plain listener.
    ///
    /// # Errors
    /// [`ServerError::Io`] if the broker's properties cannot be read or written.
    pub fn take_port_of(&mut self, other: &Self) -> Result<(), ServerError> {
        let path = self.directory().join(PROPERTIES);
        let written = std::fs::read_to_string(&path)
            .map_err(|source| io_error(Kafka::NAME, "read the properties", source))?;
        let (own, taken) = (self.brokers(), other.brokers());
        write(Kafka::NAME, &path, &written.replace(&own, &taken))?;
        self.kind_mut().port = other.port();
        Ok(())
    }
}

impl ServerKind for Kafka {
    const NAME: &'static str = "Kafka";
    const ADVICE: &'static str =
        "`cargo xtask setup` installs what it needs (Debian's package is default-jre-headless)";
    const START_TIMEOUT: Duration = Duration::from_secs(90);
    const IN_SERVER_SET: bool = false;

    fn commands(&self, directory: &Path) -> Vec<Command> {
        let mut command = self.java();
        command.args([
            self.heap,
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "kafka.Kafka",
        ]);
        command.arg(directory.join(PROPERTIES));
        vec![command]
    }

    fn answers(&self, _: u32, log: &str) -> bool {
        log.contains("Kafka Server started") && self.answers_api_versions().is_ok()
    }
}

impl Kafka {
    fn java(&self) -> Command {
        let mut java = Command::new("java");
        java.arg("-cp").arg(&self.class_path);
        java
    }

    /// Formats an empty data directory, with the SCRAM credentials of the user if there is one.
    fn format(&self, directory: &Path, cluster_id: &str) -> Result<(), ServerError> {
        let mut command = self.java();
        command
            .args(["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c"])
            .arg(directory.join(PROPERTIES));
        command.args(self.user.iter().flat_map(KafkaUser::scram));
        let shown = "java kafka.tools.StorageTool format";
        run_program(Self::NAME, &mut command, shown, Self::ADVICE)?;
        Ok(())
    }

    /// Sends an ApiVersions request, version 0, and waits for the header of the response.
    fn answers_api_versions(&self) -> std::io::Result<()> {
        const API_VERSIONS: [u8; 2] = [0, 18];
        const VERSION: [u8; 2] = [0, 0];
        const CORRELATION: [u8; 4] = *b"once";
        const NO_CLIENT_ID: [u8; 2] = [0xff, 0xff];
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        let length = [0, 0, 0, 10];
        let request: &[&[u8]] = &[
            &length,
            &API_VERSIONS,
            &VERSION,
            &CORRELATION,
            &NO_CLIENT_ID,
        ];
        stream.write_all(&request.concat())?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        if answer[4..] == CORRELATION {
            Ok(())
        } else {
            Err(std::io::ErrorKind::InvalidData.into())
        }
    }

    /// The properties of a node that is broker and controller. Groups form without delay, and the
    /// minimum session timeouts are short. With three nodes, topics remain writable if one node
    /// fails.
    fn properties(&self, quorum: &Quorum, directory: &Path) -> String {
        let Quorum {
            controllers, node, ..
        } = quorum;
        let listeners: Vec<(&str, u16)> = [(KafkaListener::Plain, self.port)]
            .iter()
            .chain(&self.listeners)
            .map(|(listener, port)| (listener.name(), *port))
            .collect();
        let at = |host: &str| {
            listeners
                .iter()
                .map(|(name, port)| format!("{name}://{host}:{port}"))
                .collect::<Vec<_>>()
                .join(",")
        };
        let voters: Vec<String> = controllers
            .iter()
            .zip(1..)
            .map(|(port, id)| format!("{id}@127.0.0.1:{port}"))
            .collect();
        format!(
            "process.roles=broker,controller
node.id={id}
controller.quorum.voters={voters}
listeners={listeners},CONTROLLER://127.0.0.1:{controller}
advertised.listeners={advertised}
controller.listener.names=CONTROLLER
log.dirs={data}
default.replication.factor={replicas}
min.insync.replicas={in_sync}
offsets.topic.num.partitions=4
offsets.topic.replication.factor={replicas}
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync}
share.coordinator.state.topic.num.partitions=4
share.coordinator.state.topic.replication.factor={replicas}
share.coordinator.state.topic.min.isr={in_sync}
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.session.timeout.ms=5000
group.consumer.min.heartbeat.interval.ms=100
group.consumer.heartbeat.interval.ms=500
",
            id = node + 1,
            voters = voters.join(","),
            listeners = at("127.0.0.1"),
            controller = controllers[*node],
            advertised = at(if self.listeners.is_empty() {
                "127.0.0.1"
            } else {
                "localhost"
            }),
            data = directory.join("data").display(),
            replicas = controllers.len(),
            in_sync = controllers.len() / 2 + 1,
        )
    }
}
