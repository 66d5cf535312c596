//! Three Kafka brokers as one cluster.

use super::kafka::{CLUSTER_ID, Quorum};
use super::port::free_ports;
use super::server::ServerKind;
use super::{Kafka, KafkaServer, ServerError};

/// Three brokers that are also controllers. Topics have three replicas and remain writable if one
/// node fails. The brokers need about 900 MB of memory. Dropping the value stops them.
pub struct KafkaServers {
    nodes: Vec<KafkaServer>,
}

impl KafkaServers {
    /// Starts the brokers and returns when each of them answers.
    ///
    /// # Errors
    /// [`ServerError`] if one does not start.
    pub fn start() -> Result<Self, ServerError> {
        let controllers: [u16; 3] = free_ports(Kafka::NAME)?;
        // The nodes start in parallel, because a node answers only after a majority has started.
        let nodes = std::thread::scope(|scope| {
            let starting = (0..controllers.len()).map(|node| {
                let quorum = Quorum {
                    controllers: controllers.to_vec(),
                    node,
                    cluster_id: CLUSTER_ID.to_owned(),
                };
                scope.spawn(move || KafkaServer::start_in(&quorum, None))
            });
            let starting: Vec<_> = starting.collect();
            starting
                .into_iter()
                .map(|it| {
                    it.join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect::<Result<Vec<_>, _>>()
        })?;
        Ok(Self { nodes })
    }

    /// The bootstrap servers: the addresses of all brokers, separated by commas.
    pub fn brokers(&self) -> String {
        self.nodes
            .iter()
            .map(KafkaServer::brokers)
            .collect::<Vec<_>>()
            .join(",")
    }

    /// The number of brokers.
    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// One of the brokers, for stopping, killing or freezing it.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn node_mut(&mut self, which: usize) -> &mut KafkaServer {
        &mut self.nodes[which]
    }
}
