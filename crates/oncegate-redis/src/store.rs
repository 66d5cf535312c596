//! The store that users name.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::marker::{Marker, Operation, Verdict};
use oncegate_core::{Key, Memory, Store, StoreError};
use redis::{Pipeline, Value};

use crate::failure::Failure;
use crate::link::{Link, Server};
use crate::{batch, memory, record};

/// How long a reply may take by default.
const TIMEOUT: Duration = Duration::from_millis(500);

/// The prefix of keys by default.
const PREFIX: &str = "processed:";

/// Remembers ids in a single Redis server, 7.0 or newer ([`Guarantee::Bare`](oncegate_core::Guarantee::Bare) needs
/// nothing that older ones lack).
///
/// Each operation is atomic on its key and judged by the server's clock. It connects when it is first used, and again
/// when the connection breaks; what was under way then is [`StoreError::Unknown`]. Clones share the connection.
///
/// ```
/// # use std::time::Duration;
/// use oncegate_redis::Redis;
///
/// let store = Redis::at("redis://localhost:6379").prefix("payments:").timeout(Duration::from_secs(1));
/// ```
#[derive(Clone)]
pub struct Redis {
    link: Arc<Link>,
    prefix: Arc<[u8]>,
    forgetting: Forgetting,
}

/// What the user says to a server that may forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forgetting {
    Told,
    Accepted,
}

impl Redis {
    /// The server at `redis://[user[:password]@]host[:port][/database]`, or `redis+unix:///path/of.sock`.
    ///
    /// Connects to nothing yet. A URL that cannot be read is [`StoreError::Misconfigured`] at the first use.
    pub fn at(url: impl AsRef<str>) -> Self {
        let link = Link::new(Server::at(url.as_ref()), TIMEOUT);
        Self { link: Arc::new(link), prefix: PREFIX.as_bytes().into(), forgetting: Forgetting::Told }
    }

    /// What stands before each key: `processed:` by default. Two services on one server without a prefix or a scope
    /// of their own skip each other's messages.
    #[must_use]
    pub fn prefix(mut self, prefix: impl AsRef<str>) -> Self {
        self.prefix = prefix.as_ref().as_bytes().into();
        self
    }

    /// How long a reply may take before its outcome is unknown: 500 ms by default. Connecting has 2 s of its own.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.link = Arc::new(Link::new(self.link.server().clone(), timeout));
        self
    }

    /// Lets at most once run on a server that may forget what it was told: one that evicts keys, keeps no append-only
    /// file, or is a replica. A forgotten marker lets its message run again.
    #[must_use]
    pub fn accept_forgetful_store(mut self) -> Self {
        self.forgetting = Forgetting::Accepted;
        self
    }

    /// The marker under a key as it is now: what an operator has to have seen before
    /// [`Ask::Forget`](oncegate_core::marker::Ask::Forget) or [`Ask::Resolve`](oncegate_core::marker::Ask::Resolve).
    /// Changes nothing.
    ///
    /// # Errors
    /// [`StoreError::Misconfigured`] if the key holds no marker that this release can read; otherwise as for
    /// [`Store::apply`].
    pub async fn look(&self, key: &Key) -> Result<Marker, StoreError> {
        match self.one("GET", Some(&[&self.prefix, key.as_bytes()].concat())).await? {
            Value::Nil => Ok(Marker::Absent),
            Value::BulkString(raw) => Ok(record::decode(&raw).map_err(Failure::unreadable)?),
            _ => Err(wrong_kind("GET").into()),
        }
    }

    /// One command that changes nothing.
    async fn one(&self, name: &str, argument: Option<&[u8]>) -> Result<Value, Failure> {
        let mut pipeline = Pipeline::new();
        pipeline.cmd(name);
        if let Some(argument) = argument {
            pipeline.arg(argument);
        }
        match self.link.ask(&pipeline).await?.pop() {
            Some(Value::ServerError(error)) => Err(Failure::said_by_server(error.code(), error.details().unwrap_or_default())),
            Some(reply) => Ok(reply),
            None => Err(wrong_kind(name)),
        }
    }

    async fn info(&self) -> Result<String, Failure> {
        match self.one("INFO", None).await? {
            Value::BulkString(info) => Ok(String::from_utf8_lossy(&info).into_owned()),
            Value::VerbatimString { text, .. } => Ok(text),
            _ => Err(wrong_kind("INFO")),
        }
    }
}

fn wrong_kind(command: &str) -> Failure {
    Failure::unknown(format!("Redis gave an answer of the wrong kind to {command}"))
}

#[async_trait]
impl Store for Redis {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        batch::apply(&self.link, &self.prefix, operations).await
    }

    async fn memory(&self) -> Result<Memory, StoreError> {
        let memory = memory::judge(&self.info().await?)?;
        Ok(match (memory, self.forgetting) {
            (Memory::Forgets(why), Forgetting::Accepted) => {
                Memory::Survives(format!("accepted by the user with accept_forgetful_store(): {why}"))
            }
            (memory, _) => memory,
        })
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        let link = Arc::new(Link::new(self.link.server().clone(), self.link.timeout()));
        Some(Arc::new(Self { link, ..self.clone() }))
    }

    fn parallel_applies(&self) -> usize {
        // One is being written and read here while the server works on the other.
        2
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.link.server().as_ref().map_or("unreadable URL", Server::address);
        f.debug_struct("Redis")
            .field("address", &address)
            .field("prefix", &String::from_utf8_lossy(&self.prefix))
            .field("timeout", &self.link.timeout())
            .field("forgetting", &self.forgetting)
            .finish()
    }
}
