//! One side of a comparison: a process of its own that handles so many messages and says what it
//! took.

mod gated;
mod kafka;
mod latency;
mod meter;
mod rabbitmq;
mod store;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use meter::{Meter, ThreadTime, Took, cpu_of};
pub(crate) use store::operation;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    /// Where messages come from.
    pub from: From,
    /// What stands between them and the handler.
    pub way: Way,
    /// What the handler does.
    pub work: Work,
    /// How many messages to handle.
    pub messages: usize,
    /// The processes whose CPU time is to be read beside one's own: the servers.
    pub servers: Vec<u32>,
    /// How long to stay after the last message, so that others are not disturbed who have not had
    /// theirs.
    pub stays: Duration,
}

/// Where messages come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum From {
    /// A topic, as a member of a group.
    Kafka {
        /// `host:port`.
        brokers: String,
        /// The topic, which is there and full.
        topic: String,
        /// The group; a new one reads from the beginning.
        group: String,
        /// Where the id is.
        id: Id,
    },
    /// A queue, which is there and full.
    RabbitMq {
        /// The broker.
        url: String,
        /// The queue.
        queue: String,
        /// How many deliveries the broker hands over ahead of their acknowledgement.
        prefetch: u16,
    },
    /// No broker: the store is asked as fast as it answers.
    Nowhere,
}

/// Where the id of a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Id {
    /// In the header `id`; the message has no key.
    Header,
    /// It is the record's key; the message has no headers.
    Key,
}

/// What stands between messages and the handler.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Way {
    /// Nothing: the client alone.
    Bare,
    /// What one writes by hand: `SET … NX` awaited for each message.
    Naive {
        /// The Redis server.
        redis: String,
    },
    /// oncegate.
    Gated {
        /// Its store.
        store: Store,
        /// Whether each handler gets a task of its own, which is the default, or is polled where it
        /// stands.
        spawned: Spawned,
    },
}

/// Where handlers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Spawned {
    /// Each in a task of its own.
    Yes,
    /// Polled in place.
    No,
}

/// The store behind oncegate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Store {
    /// In memory.
    Memory {
        /// How many other ids are remembered before the first message.
        markers: usize,
    },
    /// A SQLite file, made when it is missing.
    Sqlite {
        /// Where.
        file: PathBuf,
    },
    /// A Redis server.
    Redis {
        /// Where.
        url: String,
        /// Before each key.
        prefix: String,
    },
}

/// What the handler does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// Nothing.
    Nothing,
    /// Waits for a millisecond, as for a service that answers quickly.
    Waits,
    /// Notes how long ago the message was sent; messages come at a steady 1,000 a second, which the
    /// side sends itself.
    NotesLatency,
}

/// How long a side may take at the most.
const PATIENCE: Duration = Duration::from_secs(600);

/// The argument that makes this program a side.
pub const SIDE: &str = "side";

impl Task {
    /// Does it in a process of its own, to the end.
    ///
    /// # Errors
    /// What that process said, if it failed.
    pub fn run_apart(&self) -> crate::Outcome<Took> {
        self.start()?.finish()
    }

    /// Begins it in a process of its own.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(&self) -> crate::Outcome<Side> {
        self.spawn(Command::new(std::env::current_exe()?))
    }

    /// Does it in a process that this program starts, to the end.
    ///
    /// # Errors
    /// If the program cannot be run, and what the process said, if it failed.
    pub fn run_under(&self, program: &str, arguments: &[&str]) -> crate::Outcome<Took> {
        let mut command = Command::new(program);
        command.args(arguments).arg(std::env::current_exe()?);
        self.spawn(command)?.finish()
    }

    fn spawn(&self, mut program: Command) -> crate::Outcome<Side> {
        program
            .args([SIDE, &serde_json::to_string(self)?])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let child = program.spawn().map_err(|error| {
            format!("{} cannot be run: {error}", program.get_program().display())
        })?;
        Ok(Side(child))
    }

    /// Does it here.
    ///
    /// # Errors
    /// What the client, the broker or the store said.
    pub async fn run(&self) -> crate::Outcome<Took> {
        match tokio::time::timeout(PATIENCE, self.take()).await {
            Ok(took) => took,
            Err(_) => Err(format!("it was not over after {PATIENCE:?}").into()),
        }
    }

    async fn take(&self) -> crate::Outcome<Took> {
        if self.work == Work::NotesLatency {
            return latency::run(self).await;
        }
        match (&self.from, &self.way) {
            (From::Nowhere, Way::Gated { store, .. }) => store::run(self, store).await,
            (From::Nowhere, _) => Err("without a broker only the store can be asked".into()),
            (_, Way::Gated { .. }) => gated::run(self).await,
            (From::Kafka { .. }, _) => kafka::run(self).await,
            (From::RabbitMq { .. }, _) => rabbitmq::run(self).await,
        }
    }
}

/// A side that runs.
pub struct Side(std::process::Child);

impl Side {
    /// Waits for its end.
    ///
    /// # Errors
    /// If it failed; what it said stands on the screen.
    pub fn finish(self) -> crate::Outcome<Took> {
        let output = self.0.wait_with_output()?;
        if !output.status.success() {
            return Err(format!(
                "a side failed ({}); what it said stands above",
                output.status
            )
            .into());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}
