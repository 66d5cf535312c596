//! Selects the connections for a command.

use std::sync::Arc;

use crate::client::connection::{Endpoint, SharedConnection, Timeouts};
use crate::client::server::ServerConfig;
use crate::cluster::{Cluster, SlotMap, slot};
use crate::durability::Durability;
use crate::failure::{Problem, StoreFailure};
use crate::info::InfoReply;

/// The servers that the user configured.
#[derive(Clone)]
pub(crate) enum Deployment {
    Single(Endpoint),
    Cluster(Vec<ServerConfig>),
}

impl Deployment {
    /// Applies `change` to the settings of each server.
    pub(crate) fn map_servers(
        self,
        change: impl Fn(ServerConfig) -> Result<ServerConfig, Problem>,
    ) -> Result<Self, Problem> {
        Ok(match self {
            Self::Single(Endpoint::Fixed(server)) => Self::Single(Endpoint::Fixed(change(server)?)),
            Self::Single(Endpoint::Sentinel(sentinels)) => {
                let servers = sentinels
                    .servers()
                    .iter()
                    .cloned()
                    .map(change)
                    .collect::<Result<_, _>>()?;
                Self::Single(Endpoint::Sentinel(sentinels.with_servers(servers)))
            }
            Self::Cluster(seeds) => {
                Self::Cluster(seeds.into_iter().map(change).collect::<Result<_, _>>()?)
            }
        })
    }
}

/// The connections to one server.
pub(crate) struct ConnectionPair {
    /// For all commands that do not use `claims`.
    pub(crate) general: SharedConnection,
    /// Only with [`Durability::Replicas`], for claims and the renewals of at most once: `WAIT` blocks its
    /// connection and covers only the writes of that connection.
    claims: Option<SharedConnection>,
}

/// The use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionKind {
    General,
    Claims,
}

impl ConnectionPair {
    pub(crate) fn to(
        endpoint: Result<Endpoint, Problem>,
        timeouts: Timeouts,
        durability: Durability,
    ) -> Self {
        let claims = match durability {
            Durability::Primary => None,
            Durability::Replicas { .. } => {
                let reply = timeouts.reply + durability.extra_reply_time();
                Some(SharedConnection::new(
                    endpoint.clone(),
                    Timeouts { reply, ..timeouts },
                ))
            }
        };
        Self {
            general: SharedConnection::new(endpoint, timeouts),
            claims,
        }
    }

    pub(crate) fn get(&self, connection_kind: ConnectionKind) -> &SharedConnection {
        match (connection_kind, &self.claims) {
            (ConnectionKind::Claims, Some(claims)) => claims,
            _ => &self.general,
        }
    }
}

/// Routes commands to a single server or to the nodes of a Cluster.
pub(crate) enum CommandRouter {
    Single(Arc<ConnectionPair>),
    Cluster(Box<Cluster>),
}

/// The server that a command is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CommandTarget {
    /// The owner of the key's slot.
    Owner,
    /// The node of a `MOVED` redirection.
    Moved(Arc<str>),
    /// The node of an `ASK` redirection, which needs `ASKING` first: the slot is migrating.
    Ask(Arc<str>),
}

/// The topology that a batch uses for all of its keys.
pub(crate) enum RoutingView<'a> {
    Single(&'a Arc<ConnectionPair>),
    Cluster(&'a Cluster, Arc<SlotMap>),
}

impl CommandRouter {
    pub(crate) fn to(
        deployment: &Result<Deployment, Problem>,
        timeouts: Timeouts,
        durability: Durability,
    ) -> Self {
        match deployment {
            Ok(Deployment::Single(endpoint)) => Self::Single(Arc::new(ConnectionPair::to(
                Ok(endpoint.clone()),
                timeouts,
                durability,
            ))),
            Ok(Deployment::Cluster(seeds)) => {
                Self::Cluster(Box::new(Cluster::new(seeds.clone(), timeouts, durability)))
            }
            Err(problem) => Self::Single(Arc::new(ConnectionPair::to(
                Err(problem.clone()),
                timeouts,
                durability,
            ))),
        }
    }

    /// The current topology.
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured`: no node could be queried.
    pub(crate) async fn view(&self) -> Result<RoutingView<'_>, StoreFailure> {
        Ok(match self {
            Self::Single(connections) => RoutingView::Single(connections),
            Self::Cluster(cluster) => RoutingView::Cluster(cluster, cluster.map().await?),
        })
    }

    /// The connections to the owner of a key's slot.
    pub(crate) async fn owner(&self, key: &[u8]) -> Result<Arc<ConnectionPair>, StoreFailure> {
        self.view()
            .await?
            .connections(key, &CommandTarget::Owner)
            .await
    }

    /// Each primary once, with a key that it serves, as of [`key_on_server`](Self::key_on_server).
    pub(crate) async fn keys_on_each_primary(
        &self,
        name: &[u8],
    ) -> Result<Vec<(Vec<u8>, Arc<ConnectionPair>)>, StoreFailure> {
        match self {
            Self::Single(connections) => Ok(vec![(name.to_vec(), connections.clone())]),
            Self::Cluster(cluster) => {
                let map = cluster.map().await?;
                let mut keys = Vec::new();
                for address in map.primaries() {
                    if let (Some(key), Some(connections)) = (
                        map.key_on_node(address, name, &cluster.migrating),
                        cluster.node(address).await,
                    ) {
                        keys.push((key, connections));
                    }
                }
                Ok(keys)
            }
        }
    }

    /// A key that a server serves: `name`, in a Cluster with a number appended; `None` if the
    /// server serves no slot.
    pub(crate) async fn key_on_server(
        &self,
        connections: &ConnectionPair,
        name: &[u8],
    ) -> Result<Option<Vec<u8>>, StoreFailure> {
        Ok(match self {
            Self::Single(_) => Some(name.to_vec()),
            Self::Cluster(cluster) => cluster.map().await?.key_on_node(
                &connections.general.described(),
                name,
                &cluster.migrating,
            ),
        })
    }

    /// The connections to each primary once.
    pub(crate) async fn primaries(&self) -> Result<Vec<Arc<ConnectionPair>>, StoreFailure> {
        match self {
            Self::Single(connections) => Ok(vec![connections.clone()]),
            Self::Cluster(cluster) => {
                let map = cluster.map().await?;
                let mut primaries = Vec::new();
                for address in map.primaries() {
                    primaries.extend(cluster.node(address).await);
                }
                Ok(primaries)
            }
        }
    }

    /// Checks that a server found by Sentinel or in a Cluster is still a primary.
    ///
    /// # Errors
    /// `NotApplied`: the caller must invalidate the topology.
    pub(crate) fn check_role(&self, info: &InfoReply) -> Result<(), StoreFailure> {
        match info.field("role") {
            Some("slave") if self.setting() != "Redis::at" => {
                Err(StoreFailure::not_applied(format!(
                    "{}: the server is no longer a primary; looking for the new one",
                    self.setting()
                )))
            }
            _ => Ok(()),
        }
    }

    /// The setting that names the servers, for log lines and errors.
    pub(crate) fn setting(&self) -> &'static str {
        match self {
            Self::Single(connections) => connections.general.setting(),
            Self::Cluster(_) => "Redis::cluster",
        }
    }

    /// Refreshes the topology before the next command.
    pub(crate) fn invalidate(&self) {
        match self {
            Self::Single(connections) => {
                connections.general.invalidate();
                if let Some(claims) = &connections.claims {
                    claims.invalidate();
                }
            }
            Self::Cluster(cluster) => cluster.invalidate(),
        }
    }

    /// As [`invalidate`](Self::invalidate). For a minute, no canary or probe key is chosen in the
    /// migrating slot, if there is one.
    pub(crate) fn invalidate_slot(&self, migrating: Option<u16>) {
        if let (Self::Cluster(cluster), Some(slot)) = (self, migrating) {
            cluster.migrating.add(slot);
        }
        self.invalidate();
    }

    /// The addresses, for log lines and errors.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::Single(connections) => connections.general.described(),
            Self::Cluster(cluster) => cluster.described(),
        }
    }
}

impl RoutingView<'_> {
    /// The connections to a command's target.
    pub(crate) async fn connections(
        &self,
        key: &[u8],
        target: &CommandTarget,
    ) -> Result<Arc<ConnectionPair>, StoreFailure> {
        match self {
            Self::Single(connections) => Ok(Arc::clone(connections)),
            Self::Cluster(cluster, map) => {
                let address = match target {
                    CommandTarget::Owner => map.owner(slot(key)),
                    CommandTarget::Moved(address) | CommandTarget::Ask(address) => Some(&**address),
                };
                let connections = match address {
                    Some(address) => cluster.node(address).await,
                    None => None,
                };
                connections.ok_or_else(|| {
                    StoreFailure::not_applied(
                        "no node of the Cluster serves the hash slot of this key; check CLUSTER INFO",
                    )
                })
            }
        }
    }
}
