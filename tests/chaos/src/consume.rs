//! One consumer process. Its arguments name its source, its store and its guarantee.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use oncegate::source::Connect;
use oncegate::{
    Consumer, Context, Durability, Execution, Failure, FailureExt, Handler, IdSource, KafkaLogin,
    Order, Reconciled, Redis,
};
use oncegate_testkit::servers::SENTINEL_NAME;

use crate::Error;
use crate::ledger::{HandlerEnd, Log, What};
use crate::message::{HandlerBehavior, ID_HEADER, KEY_HEADER, Work};
use crate::recorded::Recorded;
use crate::sink::Sink;
use crate::worker::{Broker, CommonArguments, RecordedRun, Worker, reconcile};

/// The handler timeout: longer than the handling of any message that ends.
const TIMEOUT: Duration = Duration::from_secs(4);
/// The maximum number of attempts of a message.
pub const ATTEMPTS: u32 = 5;
/// The minimum delay of a sleeping thread that is recorded as a stall.
const STALL: Duration = Duration::from_millis(300);

/// The time limit of the replication of a claim.
const REPLICATED: Duration = Duration::from_millis(200);

/// The arguments of a consumer.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    common: CommonArguments,
    /// The login for Kafka: name, password, and the file with the authority's certificate.
    #[arg(long, num_args = 3)]
    login: Option<Vec<String>>,
    /// The URLs of the marker store: one Redis, or several Sentinels.
    #[arg(long, required = true, value_delimiter = ',')]
    redis: Vec<String>,
    /// How many replicas must acknowledge a claim.
    #[arg(long, default_value_t = 0)]
    replicas: u32,
    /// Declare the RabbitMQ queue with a single active consumer, and keep the order of each key.
    #[arg(long)]
    one_at_a_time: bool,
}

/// Consumes until SIGTERM, then drains. Ends at once when its standard input ends, since its parent
/// process has ended.
///
/// # Errors
/// The error of the consumer.
pub async fn run(arguments: Arguments) -> Result<(), Error> {
    let worker = Worker::begin(&arguments.common).await?;
    record_stalls(Arc::clone(&worker.log));
    match arguments.common.broker {
        Broker::Kafka => {
            let mut source = arguments
                .common
                .kafka()
                .property("session.timeout.ms", "6000")
                .property("heartbeat.interval.ms", "1000");
            if let Some([name, password, authority]) = arguments.login.as_deref() {
                source = source
                    .ca_certificate(authority)
                    .login(KafkaLogin::scram_sha_512(name, password));
            }
            consume(source, &arguments, worker).await
        }
        Broker::Rabbitmq if arguments.one_at_a_time => {
            let source = arguments
                .common
                .rabbit()
                .single_active_consumer()
                .key_header(KEY_HEADER);
            consume(source, &arguments, worker).await
        }
        Broker::Rabbitmq => consume(arguments.common.rabbit(), &arguments, worker).await,
    }
}

async fn consume(
    source: impl Connect + fmt::Debug,
    arguments: &Arguments,
    worker: Worker,
) -> Result<(), Error> {
    let Arguments {
        common,
        redis,
        replicas,
        ..
    } = arguments;
    let store = match redis.as_slice() {
        [one] => Redis::at(one),
        sentinels => Redis::sentinel(sentinels, SENTINEL_NAME),
    };
    let store = match *replicas {
        0 => store,
        count => store.durability(Durability::Replicas {
            count,
            timeout: REPLICATED,
        }),
    };
    // Logged so that the search for secrets covers the Debug output of source and store.
    eprintln!("source: {source:?}\nstore: {store:?}");
    let (log, sink) = (Arc::clone(&worker.log), worker.sink.clone());
    let consumer = Consumer::builder()
        .source(Recorded::new(source, Arc::clone(&log)))
        .store(Recorded::new(store, Arc::clone(&log)))
        .handler(SinkHandler {
            sink,
            log,
            runs: AtomicU64::new(0),
        })
        .guarantee(common.guarantee())
        .id(IdSource::header(ID_HEADER))
        .scope(&common.from)
        .lease(common.lease())
        .backoff(Duration::from_millis(50), Duration::from_millis(400))
        .max_attempts(ATTEMPTS)
        .max_crashes(ATTEMPTS)
        .max_inline_retries(1)
        .max_reconciles(3)
        .handler_timeout(TIMEOUT)
        .max_in_flight(common.in_flight)
        .execution(handlers(&common.name))
        .drain_timeout(common.drain());
    let consumer = if arguments.one_at_a_time {
        consumer.order(Order::ByKey)
    } else {
        consumer
    };
    worker
        .run(|terminated| consumer.run_until(terminated.wait()))
        .await
}

/// The execution mode of handlers: inline in every second process, to test both modes. It
/// alternates between consumers and between the successive processes of a consumer.
fn handlers(name: &str) -> Execution {
    let numbers = name
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse::<u64>().ok());
    if numbers.sum::<u64>().is_multiple_of(2) {
        Execution::Spawned
    } else {
        Execution::Inline
    }
}

/// A handler that applies the effect of a message at the sink, halfway through its running time.
struct SinkHandler {
    sink: Sink,
    log: Arc<Log>,
    runs: AtomicU64,
}

impl Handler for SinkHandler {
    type Payload = Work;

    async fn handle(&self, work: Work, cx: &Context) -> Result<(), Failure> {
        let (id, attempt) = (cx.id(), cx.attempt());
        let mut running =
            RecordedRun::begin(&self.log, cx, self.runs.fetch_add(1, Ordering::Relaxed));
        let half = Duration::from_millis(work.ms) / 2;
        tokio::time::sleep(half).await;
        running.how = HandlerEnd::Failed;
        match HandlerBehavior::of(id) {
            HandlerBehavior::Fail => Err("as its id says").retry()?,
            HandlerBehavior::Panic => panic!("as its id says"),
            HandlerBehavior::Hang => {
                running.how = HandlerEnd::Dropped;
                std::future::pending().await
            }
            HandlerBehavior::Abort => {
                self.log.write(What::Aborting { id: id.to_owned() });
                std::process::abort()
            }
            HandlerBehavior::Work => {}
        }
        running.how = HandlerEnd::Dropped;
        let applied = self.sink.apply(id, attempt).await;
        running.how = HandlerEnd::Failed;
        applied.in_doubt()?.in_doubt()?;
        running.how = HandlerEnd::Dropped;
        tokio::time::sleep(half).await;
        running.how = HandlerEnd::Ok;
        Ok(())
    }

    async fn reconcile(&self, _: Work, cx: &Context) -> Result<Reconciled, Failure> {
        reconcile(&self.sink, cx).await
    }
}

/// Records when this process was not scheduled, as on an overloaded machine.
fn record_stalls(log: Arc<Log>) {
    std::thread::spawn(move || {
        let every = Duration::from_millis(50);
        let mut last = Instant::now();
        loop {
            std::thread::sleep(every);
            let late = last.elapsed().saturating_sub(every);
            if late > STALL {
                log.write(What::Stalled {
                    ms: u64::try_from(late.as_millis()).unwrap_or(u64::MAX),
                });
            }
            last = Instant::now();
        }
    });
}
