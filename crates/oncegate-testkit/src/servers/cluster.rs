//! Six Redis servers as one Cluster: three primaries, and a replica of each.

use std::process::Command;
use std::time::{Duration, Instant};

use super::port::free_ports;
use super::process::POLL_INTERVAL;
use super::redis::{RedisOptions, RedisPersistence, RedisServer};
use super::{ServerError, io};

const NAME: &str = "Redis Cluster";
const ADVICE: &str =
    "`cargo xtask setup` installs it (Debian's packages are redis-server and redis-tools)";

/// The time limit until the nodes form the cluster.
const FORMATION_TIMEOUT: Duration = Duration::from_secs(60);

/// Six Redis nodes: three primaries, and a replica of each. Needs `redis-server` and `redis-cli`.
/// Dropping it stops them.
pub struct ClusterServers {
    nodes: Vec<RedisServer>,
}

impl ClusterServers {
    /// Starts them and returns when every node reports `cluster_state:ok`.
    ///
    /// # Errors
    /// [`ServerError`] if a node does not start or the cluster does not form.
    pub fn start() -> Result<Self, ServerError> {
        let nodes = bus_ports()?
            .into_iter()
            .map(|bus| node(RedisOptions::new(), bus))
            .collect::<Result<Vec<_>, _>>()?;
        Self::join(nodes, RedisServer::port, &[])
    }

    /// The same with TLS between the nodes and to clients, and with required client certificates.
    /// [`nodes`](Self::nodes)`()[0]` has the certificates.
    ///
    /// # Errors
    /// [`ServerError`] if a node does not start or the cluster does not form.
    pub fn start_with_tls() -> Result<Self, ServerError> {
        let over_tls = |options: RedisOptions, bus| {
            node(
                options
                    .certified_clients()
                    .setting("tls-cluster", "yes")
                    .setting("tls-replication", "yes"),
                bus,
            )
        };
        let [first, rest @ ..] = bus_ports()?;
        let mut nodes = vec![over_tls(RedisOptions::new().tls(), first)?];
        for bus in rest {
            let options = RedisOptions::new().tls_from(nodes[0].directory());
            nodes.push(over_tls(options, bus)?);
        }
        let (certificate, key) = nodes[0].client_certificate();
        let files = [nodes[0].certificate_authority(), certificate, key]
            .map(|file| file.display().to_string());
        Self::join(
            nodes,
            RedisServer::tls_port,
            &[
                "--tls", "--cacert", &files[0], "--cert", &files[1], "--key", &files[2],
            ],
        )
    }

    /// Makes a Cluster of the nodes at these ports.
    fn join(
        nodes: Vec<RedisServer>,
        port: impl Fn(&RedisServer) -> u16,
        arguments: &[&str],
    ) -> Result<Self, ServerError> {
        let addresses = nodes.iter().map(|node| format!("127.0.0.1:{}", port(node)));
        let create = Command::new("redis-cli")
            .args(arguments)
            .args(["--cluster", "create"])
            .args(addresses)
            .args(["--cluster-replicas", "1", "--cluster-yes"])
            .output()
            .map_err(|source| io(NAME, "run redis-cli", source))?;
        if !create.status.success() {
            let output = String::from_utf8_lossy(&create.stdout).into_owned();
            return Err(ServerError::ProgramFailed {
                server: NAME,
                program: "redis-cli --cluster create".into(),
                output,
                advice: ADVICE,
            });
        }
        let cluster = Self { nodes };
        cluster.wait("the nodes to agree", |it| {
            let is_complete = |node: &RedisServer| {
                node.reply("CLUSTER INFO").is_ok_and(|reply| {
                    reply.contains("cluster_state:ok") && reply.contains("cluster_known_nodes:6")
                }) && node
                    .reply("CLUSTER SLOTS")
                    .is_ok_and(|reply| reply.matches("127.0.0.1").count() == 6)
            };
            it.nodes.iter().all(is_complete)
                && it
                    .nodes
                    .iter()
                    .filter(|node| {
                        node.reply("INFO replication")
                            .is_ok_and(|reply| reply.contains("master_link_status:up"))
                    })
                    .count()
                    == 3
        })?;
        Ok(cluster)
    }

    /// The nodes' addresses.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RedisServer::url).collect()
    }

    /// The six nodes.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// One of the nodes, to be stopped, killed or frozen.
    pub fn node_mut(&mut self, which: usize) -> &mut RedisServer {
        &mut self.nodes[which]
    }

    /// The indices of the nodes that are primaries now.
    pub fn primaries(&self) -> Vec<usize> {
        let is_primary = |node: &RedisServer| {
            node.reply("INFO replication")
                .is_ok_and(|reply| reply.contains("role:master"))
        };
        (0..self.nodes.len())
            .filter(|which| is_primary(&self.nodes[*which]))
            .collect()
    }

    /// The index of the primary that serves a hash slot, according to that primary.
    ///
    /// # Panics
    /// If no primary reports the slot.
    pub fn serves(&self, slot: u16) -> usize {
        self.primaries()
            .into_iter()
            .find(|which| {
                // `<id> <address> myself,master - … <slots>`: the node's own line ends with its
                // slots.
                let reply = self.nodes[*which]
                    .reply("CLUSTER NODES")
                    .unwrap_or_default();
                let own = reply.lines().find(|line| line.contains("myself"));
                own.is_some_and(|line| line.split(' ').skip(8).any(|range| within(range, slot)))
            })
            .expect("a primary serves the slot")
    }

    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) -> Result<(), ServerError> {
        let deadline = Instant::now() + FORMATION_TIMEOUT;
        while !done(self) {
            if Instant::now() >= deadline {
                let reason = format!("waited for {what} for {FORMATION_TIMEOUT:?}");
                return Err(ServerError::DidNotStart {
                    server: NAME,
                    reason,
                    log: String::new(),
                    advice: ADVICE,
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

fn bus_ports() -> Result<[u16; 6], ServerError> {
    free_ports().map_err(|source| io(NAME, "find free ports", source))
}

fn node(options: RedisOptions, bus: u16) -> Result<RedisServer, ServerError> {
    let options = options.persistence(RedisPersistence::EverySecond);
    let options = options
        .setting("cluster-enabled", "yes")
        .setting("cluster-port", bus.to_string());
    RedisServer::start(
        options
            .setting("cluster-node-timeout", "1500")
            .setting("repl-diskless-sync-delay", "0"),
    )
}

/// Whether a range, `first-last` or a single number, contains the slot.
fn within(range: &str, slot: u16) -> bool {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    matches!((first.parse::<u16>(), last.parse::<u16>()), (Ok(first), Ok(last)) if (first..=last).contains(&slot))
}
