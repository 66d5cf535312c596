//! The servers of a run.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use oncegate_testkit::servers::{KafkaServer, RabbitServer, RedisOptions, RedisServer};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::BenchResult;
use crate::load::{
    BenchQueue, BenchQueueKind, BenchTopic, Ids, MessagePersistence, UncommittedTopic,
};
use crate::side::{DedupMethod, GateStore, HandlerWork, Id, MessageSource, Spawned, Task, cpu_of};

/// The servers of a run, and unused names of topics, queues and keys.
pub struct BenchServers {
    /// The Kafka broker.
    pub kafka: KafkaServer,
    /// The RabbitMQ node.
    pub rabbitmq: RabbitServer,
    /// The Redis server, which writes nothing to disk.
    pub redis: RedisServer,
    /// The directory of SQLite files.
    files: TempDir,
    runtime: Runtime,
    names: AtomicUsize,
    stopping: Arc<AtomicBool>,
}

impl BenchServers {
    /// Starts the servers.
    ///
    /// # Errors
    /// A server does not start.
    pub fn set() -> BenchResult<Self> {
        let stopping = Arc::<AtomicBool>::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, stopping.clone())?;
        }
        let (kafka, rabbitmq) = std::thread::scope(|scope| {
            let (kafka, rabbitmq) = (
                scope.spawn(KafkaServer::start),
                scope.spawn(RabbitServer::start),
            );
            let says = "starting a server reports its failures and does not panic";
            (kafka.join().expect(says), rabbitmq.join().expect(says))
        });
        Ok(Self {
            kafka: kafka?,
            rabbitmq: rabbitmq?,
            redis: RedisServer::start(
                RedisOptions::new().setting("maxmemory-policy", "noeviction"),
            )?,
            files: tempfile::Builder::new()
                .prefix("oncegate-bench-")
                .tempdir()?,
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?,
            names: AtomicUsize::new(0),
            stopping,
        })
    }

    /// Checks that no signal requested a stop.
    ///
    /// # Errors
    /// Ctrl-C, SIGTERM or SIGHUP arrived.
    pub fn go_on(&self) -> BenchResult<()> {
        if self.stopping.load(Ordering::Relaxed) {
            Err("stopped by a signal".into())
        } else {
            Ok(())
        }
    }

    /// An unused name.
    pub fn name(&self, what: &str) -> String {
        format!("{what}-{}", self.names.fetch_add(1, Ordering::Relaxed))
    }

    /// Fills a topic with ascending ids.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn topic(
        &self,
        partitions: i32,
        messages: usize,
        body: usize,
        id: Id,
    ) -> BenchResult<BenchTopic> {
        self.topic_of(Ids::InOrder, partitions, messages, body, id)
    }

    /// Fills a topic with ids in this order.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn topic_of(
        &self,
        ids: Ids,
        partitions: i32,
        messages: usize,
        body: usize,
        id: Id,
    ) -> BenchResult<BenchTopic> {
        let topic = BenchTopic {
            name: self.name("topic"),
            partitions,
            messages,
            body,
            id,
            ids,
        };
        self.runtime.block_on(topic.fill(&self.kafka.brokers()))?;
        Ok(topic)
    }

    /// Fills a topic in an open transaction.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn topic_held_back(
        &self,
        partitions: i32,
        messages: usize,
    ) -> BenchResult<(BenchTopic, UncommittedTopic)> {
        let topic = BenchTopic {
            name: self.name("topic"),
            partitions,
            messages,
            body: 100,
            id: Id::Header,
            ids: Ids::InOrder,
        };
        let held_back = self
            .runtime
            .block_on(topic.fill_held_back(&self.kafka.brokers()))?;
        Ok((topic, held_back))
    }

    /// Creates a topic, and leaves it empty.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn create(&self, topic: &BenchTopic) -> BenchResult<()> {
        self.runtime.block_on(topic.create(&self.kafka.brokers()))
    }

    /// Waits for this.
    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Fills a queue, and waits until RabbitMQ is idle.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn queue(
        &self,
        kind: BenchQueueKind,
        persistence: MessagePersistence,
        messages: usize,
        body: usize,
    ) -> BenchResult<BenchQueue> {
        let queue = BenchQueue {
            name: self.name("queue"),
            kind,
            messages,
            body,
            persistence,
        };
        self.runtime.block_on(queue.fill(&self.rabbitmq.url()))?;
        self.let_rabbitmq_rest();
        Ok(queue)
    }

    /// Waits at most ten seconds until the node is idle: its pending writes would slow down the
    /// first side.
    fn let_rabbitmq_rest(&self) {
        const LOOK: Duration = Duration::from_millis(200);
        let until = Instant::now() + Duration::from_secs(10);
        let mut before = cpu_of(self.rabbitmq.pid());
        while Instant::now() < until {
            std::thread::sleep(LOOK);
            let after = cpu_of(self.rabbitmq.pid());
            if after
                .zip(before)
                .is_none_or(|(after, before)| after.saturating_sub(before) <= LOOK / 10)
            {
                return;
            }
            before = after;
        }
    }

    /// Deletes a queue.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn delete(&self, queue: &BenchQueue) -> BenchResult<()> {
        self.runtime.block_on(queue.delete(&self.rabbitmq.url()))
    }

    /// A task on a topic, in a new group.
    pub fn on_kafka(&self, topic: &BenchTopic, method: DedupMethod, messages: usize) -> Task {
        let (brokers, group) = (self.kafka.brokers(), self.name("group"));
        let from = MessageSource::Kafka {
            brokers,
            topic: topic.name.clone(),
            group,
            id: topic.id,
        };
        Task {
            from,
            method,
            work: HandlerWork::Nothing,
            messages: messages.min(topic.messages),
            servers: self.processes(),
            linger: Duration::ZERO,
        }
    }

    /// A task on a queue.
    pub fn on_rabbitmq(&self, queue: &BenchQueue, prefetch: u16, method: DedupMethod) -> Task {
        let from = MessageSource::RabbitMq {
            url: self.rabbitmq.url(),
            queue: queue.name.clone(),
            prefetch,
        };
        Task {
            from,
            method,
            work: HandlerWork::Nothing,
            messages: queue.messages,
            servers: self.processes(),
            linger: Duration::ZERO,
        }
    }

    /// oncegate with the memory store.
    pub fn memory(&self, spawned: Spawned) -> DedupMethod {
        DedupMethod::Gated {
            store: GateStore::Memory { markers: 0 },
            spawned,
        }
    }

    /// oncegate with a new SQLite file.
    pub fn sqlite(&self, spawned: Spawned) -> DedupMethod {
        DedupMethod::Gated {
            store: GateStore::Sqlite { file: self.file() },
            spawned,
        }
    }

    /// oncegate with Redis and an unused prefix.
    pub fn redis(&self, spawned: Spawned) -> DedupMethod {
        DedupMethod::Gated {
            store: GateStore::Redis {
                url: self.redis.url(),
                prefix: self.name("oncegate") + ":",
            },
            spawned,
        }
    }

    /// Hand-written deduplication with Redis.
    pub fn naive(&self) -> DedupMethod {
        DedupMethod::Naive {
            redis: self.redis.url(),
        }
    }

    fn file(&self) -> PathBuf {
        self.files.path().join(self.name("markers.db"))
    }

    /// Empties Redis.
    ///
    /// # Errors
    /// The connection's.
    pub fn empty_redis(&self) -> BenchResult<()> {
        // Synchronously: a deletion in the background would disturb the next measurement.
        self.redis.command("FLUSHALL SYNC")?;
        Ok(())
    }

    /// The processes of the servers.
    pub fn processes(&self) -> Vec<u32> {
        vec![self.kafka.pid(), self.rabbitmq.pid(), self.redis.pid()]
    }

    /// The rate of `SET … NX EX` commands of `redis-benchmark` with 50 connections and pipelines of
    /// 64.
    ///
    /// # Errors
    /// It cannot be run, or prints no rate.
    pub fn redis_benchmark(&self, requests: usize) -> BenchResult<f64> {
        let port = self.redis.port().to_string();
        let requests = requests.to_string();
        let output = Command::new("redis-benchmark")
            .args([
                "-p",
                &port,
                "-c",
                "50",
                "-P",
                "64",
                "-n",
                &requests,
                "-r",
                "1000000000",
                "--csv",
            ])
            .args(["SET", "bench:__rand_int__", "1", "NX", "EX", "86400"])
            .output()?;
        let printed = String::from_utf8_lossy(&output.stdout);
        // A line of headings, then one with the test's name and its rate, all in quotes.
        let rate = printed.lines().last().and_then(|line| {
            line.rsplit("\",\"")
                .nth(6)
                .and_then(|rate| rate.parse().ok())
        });
        rate.ok_or_else(|| format!("redis-benchmark printed no rate: {printed}").into())
    }
}
