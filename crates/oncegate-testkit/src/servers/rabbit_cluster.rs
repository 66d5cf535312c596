//! Three RabbitMQ nodes as one cluster.

use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::ServerError;
use super::port::free_ports;
use super::rabbit::{RabbitOptions, RabbitServer, name_server};
use super::server::{Server, ServerKind, temporary_directory};

const NAME: &str = "RabbitMQ cluster";

/// Three nodes, each of which can be stopped, killed, frozen and started again. Needs
/// `rabbitmq-server`. Dropping the value stops them.
pub struct RabbitCluster {
    nodes: Vec<RabbitServer>,
    /// The `epmd` of all nodes. It is dropped after them, because they need it to connect.
    _name_server: Server<NameServerProcess>,
}

/// An `epmd` that does not belong to a node, so that it does not end with one.
#[derive(Debug)]
struct NameServerProcess {
    port: u16,
}

impl ServerKind for NameServerProcess {
    const NAME: &'static str = "epmd";
    const ADVICE: &'static str =
        "`cargo xtask setup` installs it (Debian's package is erlang-base)";
    const START_TIMEOUT: Duration = Duration::from_secs(10);
    const IN_SERVER_SET: bool = true;

    fn commands(&self, _: &Path) -> Vec<Command> {
        vec![name_server(self.port)]
    }

    fn answers(&self, _: u32, _: &str) -> bool {
        TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok()
    }
}

impl RabbitCluster {
    /// Starts the nodes and returns when all three form one cluster, which takes about 30 s.
    ///
    /// # Errors
    /// [`ServerError`] if one does not start.
    pub fn start() -> Result<Self, ServerError> {
        let [port] = free_ports(NAME)?;
        let name_server_process =
            Server::launch(NameServerProcess { port }, temporary_directory(NAME)?)?;
        let first = RabbitServer::start_with(&RabbitOptions::new().name_server(port))?;
        let mut nodes = vec![first];
        for _ in 1..3 {
            let options = RabbitOptions::new().name_server(port).joins(&nodes[0]);
            nodes.push(RabbitServer::start_with(&options)?);
        }
        let cluster = Self {
            nodes,
            _name_server: name_server_process,
        };
        let running =
            cluster.nodes[0].control(&["-q", "eval", "length(rabbit_nodes:all_running())."])?;
        if running.trim() != "3" {
            let reason = format!("{} of 3 nodes are in the cluster", running.trim());
            return Err(ServerError::DidNotStart {
                server: NAME,
                reason,
                log: String::new(),
                advice: "check the logs of the nodes",
            });
        }
        Ok(cluster)
    }

    /// The nodes' addresses for clients.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RabbitServer::url).collect()
    }

    /// The three nodes.
    pub fn nodes(&self) -> &[RabbitServer] {
        &self.nodes
    }

    /// One of the nodes, for stopping, killing or freezing it.
    pub fn node_mut(&mut self, which: usize) -> &mut RabbitServer {
        &mut self.nodes[which]
    }
}
