//! A topic or queue of its own, and a consumer that charges payments from it.

mod brokers;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::FieldTable;
use oncegate::{Consumer, Context, Failure, Guarantee, Handler, IdSource, Kafka, RabbitMq, Store};
use oncegate_testkit::operations::SECOND;
use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

pub(crate) use brokers::{
    admin, bodies, config, create_topics, declare, declare_at, declare_like_the_source, delete,
    groups, kafka, open, publish_properties, rabbitmq, take_all, text,
};

use crate::cli::{CommandOutput, TestCli};

/// The time limit of each wait: long, since other tests share the machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(90);

/// The body limit of the consumer, in bytes.
pub(crate) const BODY_LIMIT: usize = 10_000;

pub(crate) const COUNTS_ACCEPTED: &str = "delivery-counts = \"accepted\"\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broker {
    Kafka,
    RabbitMq,
}

/// How the provider replies to a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PaymentProvider {
    /// It accepts every payment.
    Works,
    /// It rejects the card `declined`, and does not reply for the card `silent`.
    Judges,
}

#[derive(serde::Deserialize)]
struct Payment {
    card: String,
}

struct Charge {
    provider: PaymentProvider,
    charged: Arc<Mutex<Vec<String>>>,
}

impl Handler for Charge {
    type Payload = Payment;

    async fn handle(&self, payment: Payment, cx: &Context) -> Result<(), Failure> {
        match (self.provider, payment.card.as_str()) {
            (PaymentProvider::Judges, "declined") => {
                Err(Failure::Reject("the card was declined".into()))
            }
            (PaymentProvider::Judges, "silent") => {
                Err(Failure::InDoubt("no answer from the provider".into()))
            }
            _ => {
                self.charged
                    .lock()
                    .expect("the lock is not poisoned")
                    .push(cx.id().to_owned());
                Ok(())
            }
        }
    }
}

pub(crate) struct BrokerFixture {
    pub(crate) cli: TestCli,
    pub(crate) broker: Broker,
    charged: Arc<Mutex<Vec<String>>>,
}

impl BrokerFixture {
    /// Creates topics or queues as a source does, and a configuration for them.
    pub(crate) async fn on(broker: Broker) -> Self {
        Self::at(TestCli::new(), broker).await
    }

    /// Like [`Self::on`], with this command line.
    pub(crate) async fn at(cli: TestCli, broker: Broker) -> Self {
        let fixture = Self {
            cli,
            broker,
            charged: Arc::default(),
        };
        let name = &fixture.cli.name;
        match broker {
            Broker::Kafka => {
                let keeping = |name| {
                    NewTopic::new(name, 2, TopicReplication::Fixed(1)).set("retention.ms", "-1")
                };
                let destinations = [format!("{name}.dead-letters"), format!("{name}.in-doubt")];
                create_topics(&[
                    NewTopic::new(name, 2, TopicReplication::Fixed(1)),
                    keeping(&destinations[0]),
                    keeping(&destinations[1]),
                ])
                .await;
            }
            Broker::RabbitMq => declare_like_the_source(name).await,
        }
        fixture.cli.configure(&fixture.settings());
        fixture
    }

    pub(crate) fn settings(&self) -> String {
        let name = &self.cli.name;
        let gate = "[gate]\nguarantee = \"at-most-once\"\nid = \"header payment-id\"\n";
        match self.broker {
            Broker::Kafka => format!(
                "{gate}[kafka]\nbrokers = \"{}\"\ntopic = \"{name}\"\n",
                kafka()
            ),
            // A test may read its messages more than five times.
            Broker::RabbitMq => {
                format!(
                    "{gate}[rabbitmq]\nurl = \"{}\"\nqueue = \"{name}\"\n{COUNTS_ACCEPTED}",
                    rabbitmq()
                )
            }
        }
    }

    pub(crate) fn broker_name(&self) -> &'static str {
        match self.broker {
            Broker::Kafka => "kafka",
            Broker::RabbitMq => "rabbitmq",
        }
    }

    /// Runs the program on a blocking thread.
    pub(crate) async fn run(self: &Arc<Self>, arguments: &[&str]) -> CommandOutput {
        let (fixture, arguments) = (
            Arc::clone(self),
            arguments
                .iter()
                .map(|it| (*it).to_owned())
                .collect::<Vec<_>>(),
        );
        let run = move || {
            fixture
                .cli
                .run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
        };
        tokio::task::spawn_blocking(run)
            .await
            .expect("the task does not panic")
    }

    pub(crate) async fn json(self: &Arc<Self>, arguments: &[&str]) -> serde_json::Value {
        let arguments: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
        self.run(&arguments).await.exits_with(0).json()
    }

    /// Publishes payments: id and card.
    pub(crate) async fn publish(&self, payments: &[(&str, &str)]) {
        for (id, card) in payments {
            let body = serde_json::json!({ "id": id, "card": card, "amount": 1_995 }).to_string();
            self.publish_to(&self.cli.name, id, &body, &[]).await;
        }
    }

    /// Publishes payments with these ids and waits for all confirmations together.
    pub(crate) async fn publish_many(&self, ids: impl Iterator<Item = String>) {
        let (name, body) = (&self.cli.name, r#"{"card":"works"}"#);
        match self.broker {
            Broker::Kafka => {
                let producer: FutureProducer =
                    config().set("acks", "all").create().expect("a producer");
                let sent: Vec<_> = ids
                    .map(|id| {
                        let headers = OwnedHeaders::new().insert(Header {
                            key: "payment-id",
                            value: Some(&id),
                        });
                        let record = FutureRecord::to(name)
                            .key(&id)
                            .payload(body)
                            .headers(headers);
                        producer
                            .send_result(record)
                            .unwrap_or_else(|(error, _)| panic!("{error}"))
                    })
                    .collect();
                for sent in sent {
                    sent.await.expect("an answer").expect("confirmed");
                }
            }
            Broker::RabbitMq => {
                let (connection, channel) = open().await;
                channel
                    .confirm_select(ConfirmSelectOptions::default())
                    .await
                    .expect("confirms");
                for id in ids {
                    let table: BTreeMap<_, _> = [("payment-id".into(), text(&id))].into();
                    let properties = BasicProperties::default()
                        .with_headers(table.into())
                        .with_delivery_mode(2);
                    let options = BasicPublishOptions::default();
                    channel
                        .basic_publish(
                            "".into(),
                            name.as_str().into(),
                            options,
                            body.as_bytes(),
                            properties,
                        )
                        .await
                        .expect("a channel");
                }
                assert!(
                    channel
                        .wait_for_confirms()
                        .await
                        .expect("an answer")
                        .is_empty(),
                    "none is returned"
                );
                connection
                    .close(200, "OK".into())
                    .await
                    .expect("a clean end");
            }
        }
    }

    pub(crate) async fn publish_to(
        &self,
        name: &str,
        id: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) {
        let headers: Vec<(&str, &str)> = headers
            .iter()
            .copied()
            .chain([("payment-id", id)])
            .collect();
        self.publish_with(name, body, &headers).await;
    }

    /// Publishes a message with exactly these headers.
    pub(crate) async fn publish_with(&self, name: &str, body: &str, headers: &[(&str, &str)]) {
        match self.broker {
            Broker::Kafka => {
                let producer: FutureProducer =
                    config().set("acks", "all").create().expect("a producer");
                let all = OwnedHeaders::new();
                let written = headers.iter().fold(all, |all, (key, value)| {
                    all.insert(Header {
                        key,
                        value: Some(*value),
                    })
                });
                let key = headers
                    .iter()
                    .find(|(name, _)| *name == "payment-id")
                    .map_or("", |(_, id)| id);
                let record = FutureRecord::to(name)
                    .key(key)
                    .payload(body)
                    .headers(written);
                producer
                    .send(record, TEST_TIMEOUT)
                    .await
                    .expect("confirmed");
            }
            Broker::RabbitMq => {
                let table: BTreeMap<_, _> = headers
                    .iter()
                    .map(|(name, value)| ((*name).into(), text(value)))
                    .collect();
                publish_properties(
                    &rabbitmq(),
                    name,
                    body,
                    BasicProperties::default().with_headers(table.into()),
                )
                .await;
            }
        }
    }

    /// Consumes until this many payments are charged, dead-lettered and in doubt.
    pub(crate) async fn consume(
        &self,
        provider: PaymentProvider,
        charged: usize,
        dead_letters: u64,
        in_doubt: u64,
    ) {
        let until = async {
            let started = Instant::now();
            loop {
                let is = (
                    self.charged().len(),
                    self.count(".dead-letters").await,
                    self.count(".in-doubt").await,
                );
                if is == (charged, dead_letters, in_doubt) {
                    return;
                }
                assert!(
                    started.elapsed() < TEST_TIMEOUT,
                    "{is:?}, not {:?}",
                    (charged, dead_letters, in_doubt)
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        match (self.cli.sqlite(), self.cli.postgres()) {
            (Some(sqlite), _) => self.consume_through(sqlite, provider, until).await,
            (None, Some(postgres)) => self.consume_through(postgres, provider, until).await,
            (None, None) => {
                self.consume_through(self.cli.store().allow_volatile_store(), provider, until)
                    .await
            }
        }
    }

    async fn consume_through(
        &self,
        store: impl Store + 'static,
        provider: PaymentProvider,
        until: impl Future<Output = ()>,
    ) {
        let charge = Charge {
            provider,
            charged: Arc::clone(&self.charged),
        };
        self.handle_through(store, Guarantee::AtMostOnce, charge, until)
            .await;
    }

    /// Handles messages until this future completes.
    pub(crate) async fn handle(
        &self,
        guarantee: Guarantee,
        handler: impl Handler,
        until: impl Future<Output = ()>,
    ) {
        self.handle_through(
            self.cli.store().allow_volatile_store(),
            guarantee,
            handler,
            until,
        )
        .await;
    }

    async fn handle_through(
        &self,
        store: impl Store + 'static,
        guarantee: Guarantee,
        handler: impl Handler,
        until: impl Future<Output = ()>,
    ) {
        let name = &self.cli.name;
        let consumer = Consumer::builder()
            .store(store)
            .allow_volatile_store()
            .guarantee(guarantee)
            .id(IdSource::header("payment-id"))
            .lease(10 * SECOND)
            .max_reconciles(1)
            .backoff(Duration::from_millis(1), Duration::from_millis(10))
            .handler(handler);
        let ended = match self.broker {
            Broker::Kafka => {
                consumer
                    .source(
                        Kafka::topic(name)
                            .brokers(kafka())
                            .group(name)
                            .body_limit(BODY_LIMIT),
                    )
                    .run_until(until)
                    .await
            }
            Broker::RabbitMq => {
                consumer
                    .source(RabbitMq::queue(name).url(rabbitmq()).body_limit(BODY_LIMIT))
                    .run_until(until)
                    .await
            }
        };
        ended.expect("a consumer that ends well");
    }

    pub(crate) fn charged(&self) -> Vec<String> {
        self.charged
            .lock()
            .expect("the lock is not poisoned")
            .clone()
    }

    /// The number of messages in the topic or queue with this suffix; on RabbitMQ without
    /// unacknowledged ones.
    pub(crate) async fn count(&self, suffix: &str) -> u64 {
        self.count_in(format!("{}{suffix}", self.cli.name)).await
    }

    async fn count_in(&self, name: String) -> u64 {
        match self.broker {
            Broker::Kafka => tokio::task::spawn_blocking(move || {
                let consumer: BaseConsumer = config()
                    .set("group.id", "counting")
                    .create()
                    .expect("a consumer");
                let ends = (0..2).map(|partition| {
                    consumer
                        .fetch_watermarks(&name, partition, TEST_TIMEOUT)
                        .expect("watermarks")
                });
                ends.map(|(low, high)| u64::try_from(high - low).expect("not negative"))
                    .sum()
            })
            .await
            .expect("the task does not panic"),
            Broker::RabbitMq => {
                let (connection, channel) = open().await;
                let passive = QueueDeclareOptions {
                    passive: true,
                    ..QueueDeclareOptions::default()
                };
                let count = channel
                    .queue_declare(name.into(), passive, FieldTable::default())
                    .await
                    .expect("the queue")
                    .message_count();
                connection
                    .close(200, "OK".into())
                    .await
                    .expect("a clean end");
                count.into()
            }
        }
    }

    /// Waits for this number of messages: the count lags behind.
    pub(crate) async fn until_there_are(&self, count: u64, suffix: &str) {
        self.until(&format!("{}{suffix}", self.cli.name), count)
            .await;
    }

    /// Like [`Self::until_there_are`], by name.
    pub(crate) async fn until(&self, name: &str, count: u64) {
        let started = Instant::now();
        loop {
            let is = self.count_in(name.to_owned()).await;
            if is == count {
                return;
            }
            assert!(
                started.elapsed() < TEST_TIMEOUT,
                "{is} in {name}, not {count}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn end(&self) {
        let names =
            ["", ".dead-letters", ".in-doubt"].map(|suffix| format!("{}{suffix}", self.cli.name));
        match self.broker {
            // Leftovers are harmless: names are not reused.
            Broker::Kafka => drop(
                admin()
                    .delete_topics(&names.each_ref().map(String::as_str), &AdminOptions::new())
                    .await,
            ),
            Broker::RabbitMq => {
                let (connection, channel) = open().await;
                let delays = [1_000, 5_000, 30_000, 120_000, 600_000]
                    .map(|delay| format!("{}.delay.{delay}", self.cli.name));
                for name in names.into_iter().chain(delays) {
                    channel
                        .queue_delete(name.into(), QueueDeleteOptions::default())
                        .await
                        .expect("deleting is idempotent");
                }
                connection
                    .close(200, "OK".into())
                    .await
                    .expect("a clean end");
            }
        }
    }
}
