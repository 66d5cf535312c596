//! Six Redis servers as one Cluster: three primaries, and a replica of each.

use std::process::Command;
use std::time::Duration;

use super::ServerError;
use super::port::free_ports;
use super::redis::{RedisOptions, RedisPersistence, RedisServer};
use super::server::{run_program, wait_until};
use super::server_set::ServerSet;

const NAME: &str = "Redis Cluster";
const ADVICE: &str =
    "`cargo xtask setup` installs it (Debian's packages are redis-server and redis-tools)";

/// The time limit until the nodes form the cluster.
const FORMATION_TIMEOUT: Duration = Duration::from_secs(60);

/// Six Redis nodes: three primaries, and a replica of each. Needs `redis-server` and `redis-cli`.
/// Dropping the value stops them.
pub struct ClusterServers {
    nodes: Vec<RedisServer>,
}

impl ClusterServers {
    /// Starts the nodes and returns when every node reports `cluster_state:ok` and every replica is
    /// connected to its primary.
    ///
    /// # Errors
    /// [`ServerError`] if a node does not start or the cluster does not form.
    pub fn start() -> Result<Self, ServerError> {
        let nodes = free_ports::<6>(NAME)?
            .into_iter()
            .map(|bus| node(RedisOptions::new(), bus))
            .collect::<Result<Vec<_>, _>>()?;
        Self::create(nodes, RedisServer::port, &[])
    }

    /// Like [`start`](Self::start), with TLS between the nodes and to clients, and with required
    /// client certificates. [`nodes`](Self::nodes)`()[0]` has the certificates.
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
        let [first, rest @ ..] = free_ports::<6>(NAME)?;
        let mut nodes = vec![over_tls(RedisOptions::new().tls(), first)?];
        for bus in rest {
            let options = RedisOptions::new().tls_from(nodes[0].directory());
            nodes.push(over_tls(options, bus)?);
        }
        let (certificate, key) = nodes[0].client_certificate();
        let files = [nodes[0].certificate_authority(), certificate, key]
            .map(|file| file.display().to_string());
        Self::create(
            nodes,
            RedisServer::tls_port,
            &[
                "--tls", "--cacert", &files[0], "--cert", &files[1], "--key", &files[2],
            ],
        )
    }

    /// Makes a Cluster of these nodes. `port` returns the port at which a node accepts clients, and
    /// `arguments` are those of `redis-cli` for its connections.
    fn create(
        nodes: Vec<RedisServer>,
        port: impl Fn(&RedisServer) -> u16,
        arguments: &[&str],
    ) -> Result<Self, ServerError> {
        let addresses = nodes.iter().map(|node| format!("127.0.0.1:{}", port(node)));
        let set = ServerSet::current()?;
        let mut command = Command::new(set.redis_cli());
        command
            .args(arguments)
            .args(["--cluster", "create"])
            .args(addresses)
            .args(["--cluster-replicas", "1", "--cluster-yes"]);
        run_program(
            NAME,
            &mut set.command(&command),
            "redis-cli --cluster create",
            ADVICE,
        )?;
        let is_formed = || {
            let is_complete = |node: &RedisServer| {
                node.reply("CLUSTER INFO").is_ok_and(|reply| {
                    reply.contains("cluster_state:ok") && reply.contains("cluster_known_nodes:6")
                }) && node
                    .reply("CLUSTER SLOTS")
                    .is_ok_and(|reply| reply.matches("127.0.0.1").count() == 6)
            };
            nodes.iter().all(is_complete)
                && nodes
                    .iter()
                    .filter(|node| {
                        node.reply("INFO replication")
                            .is_ok_and(|reply| reply.contains("master_link_status:up"))
                    })
                    .count()
                    == 3
        };
        wait_until(
            NAME,
            "the nodes to form the cluster",
            FORMATION_TIMEOUT,
            ADVICE,
            is_formed,
        )?;
        Ok(Self { nodes })
    }

    /// The nodes' URLs.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RedisServer::url).collect()
    }

    /// The six nodes.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// One of the nodes, for stopping, killing or freezing it.
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

    /// The index of the primary that serves a hash slot, as that primary reports it.
    ///
    /// # Panics
    /// If no primary reports the slot.
    pub fn primary_of_slot(&self, slot: u16) -> usize {
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

/// Whether a range of slots, `first-last` or a single number, contains the slot.
fn within(range: &str, slot: u16) -> bool {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    matches!((first.parse::<u16>(), last.parse::<u16>()), (Ok(first), Ok(last)) if (first..=last).contains(&slot))
}
