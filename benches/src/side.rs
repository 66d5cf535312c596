//! One side of a comparison: a process that handles messages and prints its measurements.

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

pub use meter::{Measurement, Meter, ThreadTime, cpu_of};
pub(crate) use store::operation;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    /// The source of messages.
    pub from: MessageSource,
    /// What runs between source and handler.
    pub method: DedupMethod,
    /// The handler.
    pub work: HandlerWork,
    /// The number of messages.
    pub messages: usize,
    /// The server processes whose CPU time is measured, too.
    pub servers: Vec<u32>,
    /// How long to stay in the group after the last message, to avoid a rebalance while other
    /// processes still handle theirs.
    pub linger: Duration,
}

/// Where messages come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum MessageSource {
    /// A topic, as a member of a group.
    Kafka {
        /// `host:port`.
        brokers: String,
        /// The existing, filled topic.
        topic: String,
        /// The consumer group; a new one reads from the start.
        group: String,
        /// Where the id is.
        id: Id,
    },
    /// An existing, filled queue.
    RabbitMq {
        /// The broker.
        url: String,
        /// The queue.
        queue: String,
        /// The prefetch count.
        prefetch: u16,
    },
    /// No broker: the store is called as fast as it replies.
    None,
}

/// The position of the id of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Id {
    /// In the header `id`; the message has no key.
    Header,
    /// In the record key; the message has no headers.
    Key,
}

/// What runs between source and handler.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum DedupMethod {
    /// Nothing: the plain client.
    Bare,
    /// Hand-written deduplication: `SET … NX`, awaited for each message.
    Naive {
        /// The Redis server.
        redis: String,
    },
    /// oncegate.
    Gated {
        /// Its store.
        store: GateStore,
        /// Whether each handler runs in its own task (the default) or inline.
        spawned: Spawned,
    },
}

/// The execution mode of handlers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Spawned {
    /// Each in its own task.
    Yes,
    /// Inline.
    No,
}

/// The store of oncegate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum GateStore {
    /// In memory.
    Memory {
        /// The number of other ids in the store before the first message.
        markers: usize,
    },
    /// An SQLite file, created if missing.
    Sqlite {
        /// Where.
        file: PathBuf,
    },
    /// A Redis server.
    Redis {
        /// Where.
        url: String,
        /// The key prefix.
        prefix: String,
    },
}

/// What the handler does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandlerWork {
    /// Nothing.
    Nothing,
    /// Waits for a millisecond, as for a fast service.
    Waits,
    /// Measures the latency; the side itself sends 1,000 messages per second.
    NotesLatency,
}

/// The time limit of a side.
const SIDE_TIMEOUT: Duration = Duration::from_secs(600);

/// The argument that makes this program run a side.
pub const SIDE: &str = "side";

impl Task {
    /// Runs the task in a separate process, to the end.
    ///
    /// # Errors
    /// The process failed.
    pub fn run_in_process(&self) -> crate::BenchResult<Measurement> {
        self.start()?.finish()
    }

    /// Starts the task in a separate process.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(&self) -> crate::BenchResult<RunningSide> {
        self.spawn(Command::new(std::env::current_exe()?))
    }

    /// Runs the task under another program, such as `perf`, to the end.
    ///
    /// # Errors
    /// The program cannot be run, or the process failed.
    pub fn run_under(&self, program: &str, arguments: &[&str]) -> crate::BenchResult<Measurement> {
        let mut command = Command::new(program);
        command.args(arguments).arg(std::env::current_exe()?);
        self.spawn(command)?.finish()
    }

    fn spawn(&self, mut program: Command) -> crate::BenchResult<RunningSide> {
        program
            .args([SIDE, &serde_json::to_string(self)?])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let child = program.spawn().map_err(|error| {
            format!("{} cannot be run: {error}", program.get_program().display())
        })?;
        Ok(RunningSide(child))
    }

    /// Runs the task in this process.
    ///
    /// # Errors
    /// The error of the client, the broker or the store.
    pub async fn run(&self) -> crate::BenchResult<Measurement> {
        match tokio::time::timeout(SIDE_TIMEOUT, self.take()).await {
            Ok(took) => took,
            Err(_) => Err(format!("it was not over after {SIDE_TIMEOUT:?}").into()),
        }
    }

    async fn take(&self) -> crate::BenchResult<Measurement> {
        if self.work == HandlerWork::NotesLatency {
            return latency::run(self).await;
        }
        match (&self.from, &self.method) {
            (MessageSource::None, DedupMethod::Gated { store, .. }) => {
                store::run(self, store).await
            }
            (MessageSource::None, _) => {
                Err("without a broker only the store can be measured".into())
            }
            (_, DedupMethod::Gated { .. }) => gated::run(self).await,
            (MessageSource::Kafka { .. }, _) => kafka::run(self).await,
            (MessageSource::RabbitMq { .. }, _) => rabbitmq::run(self).await,
        }
    }
}

/// A running side.
pub struct RunningSide(std::process::Child);

impl RunningSide {
    /// Waits for its result.
    ///
    /// # Errors
    /// It failed; its output was printed.
    pub fn finish(self) -> crate::BenchResult<Measurement> {
        let output = self.0.wait_with_output()?;
        if !output.status.success() {
            return Err(format!(
                "a side failed ({}); its output is printed above",
                output.status
            )
            .into());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}
