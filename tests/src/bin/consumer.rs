//! A consumer process for the tests. Its arguments name its source, store and guarantee. It records
//! runs and effects in its diary. SIGTERM drains it.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use oncegate::source::Connect;
use oncegate::{
    Builder, Consumer, Decode, Error, GroupProtocol, Guarantee, Handler, IdSource, Kafka, RabbitMq,
    Redis, TopicCreation, Topology, shutdown_signal,
};
use oncegate_tests::counters::DeliveryRecorder;
use oncegate_tests::diary::Diary;
use oncegate_tests::scripted::Scripted;

#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    broker: Broker,
    /// Kafka's bootstrap servers, or RabbitMQ's URL.
    #[arg(long)]
    url: String,
    /// The topic or the queue.
    #[arg(long)]
    from: String,
    /// Kafka's consumer group.
    #[arg(long)]
    group: String,
    /// What to do if queues or topics are missing.
    #[arg(long, default_value = "declare")]
    missing: Missing,
    /// A property of librdkafka, as `key=value`; may be given several times.
    #[arg(long = "property")]
    properties: Vec<String>,
    #[arg(long)]
    redis: String,
    #[arg(long)]
    guarantee: Promise,
    #[arg(long)]
    scope: String,
    #[arg(long)]
    diary: PathBuf,
    #[arg(long, default_value_t = 2_000)]
    lease_ms: u64,
    #[arg(long, default_value_t = 50)]
    backoff_ms: u64,
    #[arg(long, default_value_t = 3)]
    retries: u32,
    #[arg(long, default_value_t = 64)]
    in_flight: usize,
    #[arg(long, default_value_t = 64)]
    prefetch: u32,
    #[arg(long, default_value_t = 10_000)]
    drain_ms: u64,
    #[arg(long, default_value_t = 1_000_000)]
    body_limit: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum Broker {
    Kafka,
    Rabbitmq,
}

#[derive(Clone, Copy, ValueEnum)]
enum Missing {
    Declare,
    Refuse,
}

#[derive(Clone, Copy, ValueEnum)]
enum Promise {
    AtMostOnce,
    EffectivelyOnce,
    Bare,
}

#[tokio::main]
async fn main() -> ExitCode {
    let filter =
        tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    match consume(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("consumer: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn consume(arguments: Arguments) -> Result<(), Error> {
    let diary =
        Arc::new(Diary::open(&arguments.diary).expect("the tests name a file that can be written"));
    metrics::set_global_recorder(DeliveryRecorder::new(Arc::clone(&diary)))
        .expect("it is the only recorder");
    let guarantee = match arguments.guarantee {
        Promise::AtMostOnce => Guarantee::AtMostOnce,
        Promise::EffectivelyOnce => Guarantee::EffectivelyOnce,
        Promise::Bare => Guarantee::Bare,
    };
    let backoff = Duration::from_millis(arguments.backoff_ms);
    let consumer = Consumer::builder()
        .store(Redis::at(&arguments.redis))
        .handler(Scripted::new(diary))
        .guarantee(guarantee)
        .id(IdSource::header("id"))
        .scope(arguments.scope)
        .lease(Duration::from_millis(arguments.lease_ms))
        .backoff(backoff, backoff * 8)
        .max_inline_retries(arguments.retries)
        .max_reconciles(2)
        .max_in_flight(arguments.in_flight)
        .drain_timeout(Duration::from_millis(arguments.drain_ms));
    match arguments.broker {
        Broker::Kafka => {
            let creation = match arguments.missing {
                Missing::Declare => TopicCreation::Create {
                    partitions: 1,
                    replication: 1,
                },
                Missing::Refuse => TopicCreation::Never,
            };
            let kafka = Kafka::topic(arguments.from)
                .brokers(arguments.url)
                .group(arguments.group)
                .body_limit(arguments.body_limit)
                .create_topics(creation);
            // Of the classic group protocol. The other has the session timeout of the broker.
            let mut properties = vec![
                ("session.timeout.ms", "6000"),
                ("heartbeat.interval.ms", "1000"),
            ];
            let given = arguments.properties.iter();
            properties.extend(given.filter_map(|property| property.split_once('=')));
            let kafka = match std::env::var("ONCEGATE_GROUP_PROTOCOL").as_deref() {
                Ok("consumer") => {
                    properties.retain(|(key, _)| {
                        !["session.timeout.ms", "heartbeat.interval.ms"].contains(key)
                    });
                    kafka.group_protocol(GroupProtocol::Consumer)
                }
                Err(_) | Ok("" | "classic") => kafka,
                Ok(other) => panic!("ONCEGATE_GROUP_PROTOCOL={other}: use classic or consumer"),
            };
            let with = |kafka: Kafka, (key, value)| kafka.property(key, value);
            run(consumer.source(properties.into_iter().fold(kafka, with))).await
        }
        Broker::Rabbitmq => {
            let topology = match arguments.missing {
                Missing::Declare => Topology::Declare,
                Missing::Refuse => Topology::Check,
            };
            run(consumer.source(
                RabbitMq::queue(arguments.from)
                    .url(arguments.url)
                    .prefetch(arguments.prefetch)
                    .body_limit(arguments.body_limit)
                    .topology(topology),
            ))
            .await
        }
    }
}

async fn run<S: Connect, H: Handler, D: Decode>(
    consumer: Builder<S, Redis, H, D>,
) -> Result<(), Error> {
    consumer.run_until(shutdown_signal()).await
}
