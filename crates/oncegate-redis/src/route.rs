//! Over which connections a command travels.

use std::sync::Arc;

use crate::cluster::{Cluster, Map, slot};
use crate::durability::Durability;
use crate::failure::{Failure, Problem};
use crate::info::Info;
use crate::link::{Link, Patience, Place};
use crate::server::Server;

/// What the user named.
#[derive(Clone)]
pub(crate) enum Target {
    One(Place),
    Cluster(Vec<Server>),
}

impl Target {
    /// The same, reached in another way.
    pub(crate) fn with_servers(
        self,
        change: impl Fn(Server) -> Result<Server, Problem>,
    ) -> Result<Self, Problem> {
        Ok(match self {
            Self::One(Place::Fixed(server)) => Self::One(Place::Fixed(change(server)?)),
            Self::One(Place::Primary(sentinels)) => {
                let servers = sentinels
                    .servers()
                    .iter()
                    .cloned()
                    .map(change)
                    .collect::<Result<_, _>>()?;
                Self::One(Place::Primary(sentinels.reached_by(servers)))
            }
            Self::Cluster(seeds) => {
                Self::Cluster(seeds.into_iter().map(change).collect::<Result<_, _>>()?)
            }
        })
    }
}

/// The connections to one server.
pub(crate) struct Lanes {
    pub(crate) general: Link,
    /// Only where replicas have to know of claims: `WAIT` holds up everything on its connection,
    /// and answers for that connection's own writes alone.
    claims: Option<Link>,
}

/// Which of the connections to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    General,
    Claims,
}

impl Lanes {
    pub(crate) fn to(
        place: Result<Place, Problem>,
        patience: Patience,
        durability: Durability,
    ) -> Self {
        let claims = match durability {
            Durability::Primary => None,
            Durability::Replicas { .. } => {
                let reply = patience.reply + durability.patience();
                Some(Link::new(place.clone(), Patience { reply, ..patience }))
            }
        };
        Self {
            general: Link::new(place, patience),
            claims,
        }
    }

    pub(crate) fn link(&self, lane: Lane) -> &Link {
        match (lane, &self.claims) {
            (Lane::Claims, Some(claims)) => claims,
            _ => &self.general,
        }
    }
}

/// To a single server, or to the nodes of a Cluster.
pub(crate) enum Route {
    One(Arc<Lanes>),
    Cluster(Box<Cluster>),
}

/// Which server a command is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// The one that serves its key.
    Owner,
    /// The one that a node named instead.
    Node(Arc<str>),
    /// The same, which has to be told that it was named, because the key's slot is still moving.
    Asking(Arc<str>),
}

/// What a batch goes by when it looks for servers: one view for all of its keys.
pub(crate) enum View<'a> {
    One(&'a Arc<Lanes>),
    Cluster(&'a Cluster, Arc<Map>),
}

impl Route {
    pub(crate) fn to(
        target: &Result<Target, Problem>,
        patience: Patience,
        durability: Durability,
    ) -> Self {
        match target {
            Ok(Target::One(place)) => {
                Self::One(Arc::new(Lanes::to(Ok(place.clone()), patience, durability)))
            }
            Ok(Target::Cluster(seeds)) => {
                Self::Cluster(Box::new(Cluster::new(seeds.clone(), patience, durability)))
            }
            Err(problem) => Self::One(Arc::new(Lanes::to(
                Err(problem.clone()),
                patience,
                durability,
            ))),
        }
    }

    /// Who serves what at this moment.
    ///
    /// # Errors
    /// `NotApplied` or `Misconfigured`: nobody could be asked.
    pub(crate) async fn view(&self) -> Result<View<'_>, Failure> {
        Ok(match self {
            Self::One(lanes) => View::One(lanes),
            Self::Cluster(cluster) => View::Cluster(cluster, cluster.map().await?),
        })
    }

    /// The connections to the server that a key is on.
    pub(crate) async fn owner(&self, key: &[u8]) -> Result<Arc<Lanes>, Failure> {
        self.view().await?.lanes(key, &At::Owner).await
    }

    /// Each primary once, with a key of this name that lies there; where there are several, a
    /// number is added to the name.
    pub(crate) async fn keys_on_each(
        &self,
        name: &[u8],
    ) -> Result<Vec<(Vec<u8>, Arc<Lanes>)>, Failure> {
        match self {
            Self::One(lanes) => Ok(vec![(name.to_vec(), lanes.clone())]),
            Self::Cluster(cluster) => {
                let map = cluster.map().await?;
                let mut found = Vec::new();
                for address in map.primaries() {
                    if let (Some(key), Some(lanes)) = (
                        map.key_at(address, name, &cluster.moving),
                        cluster.node(address).await,
                    ) {
                        found.push((key, lanes));
                    }
                }
                Ok(found)
            }
        }
    }

    /// The key of this name that lies on one server; `None` where that serves no slot.
    pub(crate) async fn key_on(
        &self,
        lanes: &Lanes,
        name: &[u8],
    ) -> Result<Option<Vec<u8>>, Failure> {
        Ok(match self {
            Self::One(_) => Some(name.to_vec()),
            Self::Cluster(cluster) => {
                cluster
                    .map()
                    .await?
                    .key_at(&lanes.general.described(), name, &cluster.moving)
            }
        })
    }

    /// The connections to each primary once.
    pub(crate) async fn primaries(&self) -> Result<Vec<Arc<Lanes>>, Failure> {
        match self {
            Self::One(lanes) => Ok(vec![lanes.clone()]),
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

    /// Where others tell which server is the primary, one that is a replica by now is the wrong
    /// one.
    ///
    /// # Errors
    /// `NotApplied`: the primary is to be looked for anew.
    pub(crate) fn still_a_primary(&self, info: &Info) -> Result<(), Failure> {
        match info.field("role") {
            Some("slave") if self.setting() != "Redis::at" => Err(Failure::not_applied(format!(
                "{}: a server that was the primary is a replica by now",
                self.setting()
            ))),
            _ => Ok(()),
        }
    }

    /// The setting that names the servers, for messages.
    pub(crate) fn setting(&self) -> &'static str {
        match self {
            Self::One(lanes) => lanes.general.setting(),
            Self::Cluster(_) => "Redis::cluster",
        }
    }

    /// Looks for the servers anew before the next command.
    pub(crate) fn distrust(&self) {
        match self {
            Self::One(lanes) => {
                lanes.general.distrust();
                if let Some(claims) = &lanes.claims {
                    claims.distrust();
                }
            }
            Self::Cluster(cluster) => cluster.distrust(),
        }
    }

    /// Looks for the servers anew, and for keys of other slots than one that is on its way to
    /// another node.
    pub(crate) fn distrust_slot(&self, moving: Option<u16>) {
        if let (Self::Cluster(cluster), Some(slot)) = (self, moving) {
            cluster.moving.add(slot);
        }
        self.distrust();
    }

    /// For people.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::One(lanes) => lanes.general.described(),
            Self::Cluster(cluster) => cluster.described(),
        }
    }
}

impl View<'_> {
    /// The connections to the server that a command is for.
    pub(crate) async fn lanes(&self, key: &[u8], at: &At) -> Result<Arc<Lanes>, Failure> {
        match self {
            Self::One(lanes) => Ok(Arc::clone(lanes)),
            Self::Cluster(cluster, map) => {
                let address = match at {
                    At::Owner => map.owner(slot(key)),
                    At::Node(address) | At::Asking(address) => Some(&**address),
                };
                let lanes = match address {
                    Some(address) => cluster.node(address).await,
                    None => None,
                };
                lanes.ok_or_else(|| {
                    Failure::not_applied("no node of the Cluster serves the slot of this key")
                })
            }
        }
    }
}
