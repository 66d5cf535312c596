use oncegate_core::source::Connect as _;
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, Raw};

use super::*;

fn valid_settings() -> Kafka {
    Kafka::topic("payments")
        .brokers("localhost:9092")
        .group("ledger")
}

fn setting(kafka: Kafka) -> String {
    match kafka.check() {
        Err(SourceError::Misconfigured { setting, .. }) => setting,
        other => format!("{other:?}"),
    }
}

#[test]
fn an_id_that_kafka_does_not_have_is_refused() {
    struct Nothing;
    impl Handler for Nothing {
        type Payload = Raw;
        async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
            Ok(())
        }
    }
    for id in [IdSource::message_id(), IdSource::message_id().hashed()] {
        let built = Consumer::builder()
            .source(valid_settings())
            .store(MemoryStore::new())
            .handler(Nothing)
            .id(id)
            .build();
        let error = built.expect_err("no such property").to_string();
        assert!(error.contains("use IdSource::header"), "{error}");
    }
    for id in [IdSource::key(), IdSource::position()] {
        valid_settings().check_id(&id).expect("Kafka has it");
    }
}

#[test]
fn a_topic_gets_a_replica_per_broker_and_at_most_three() {
    let replicas = [0, 1, 2, 3, 5].map(Kafka::replicas);
    assert_eq!(replicas, [1, 1, 2, 3, 3]);
}

#[test]
fn missing_and_forbidden_settings_are_named() {
    let kafka =
        |topic: &str, brokers: &str, group: &str| Kafka::topic(topic).brokers(brokers).group(group);
    let without_partitions = TopicCreation::Create {
        partitions: 0,
        replication: 1,
    };
    let no_topics = Kafka::topics(Vec::<String>::new());
    let is_rejected = [
        ("topic", kafka("", "b", "g")),
        ("topic", no_topics.brokers("b").group("g")),
        ("topic", kafka("^pay.*", "b", "g")),
        (
            "topic",
            kafka("^pay.*", "b", "g").group_protocol(GroupProtocol::Consumer),
        ),
        ("brokers", Kafka::topic("t").group("g")),
        ("brokers", kafka("t", "http://x y", "g")),
        ("brokers", kafka("t", "localhost:99999", "g")),
        ("brokers", kafka("t", "a:9092,,b:9092", "g")),
        ("group", kafka("t", "b", " ")),
        ("dead_letters", valid_settings().dead_letters("payments")),
        ("in_doubt", valid_settings().in_doubt("")),
        (
            "in_doubt",
            valid_settings().dead_letters("bad").in_doubt("bad"),
        ),
        ("topic", kafka("a b", "b", "g")),
        ("topic", kafka("..", "b", "g")),
        ("topic", kafka(&"t".repeat(250), "b", "g")),
        ("dead_letters", kafka(&"t".repeat(249), "b", "g")),
        ("dead_letters", valid_settings().dead_letters("é")),
        (
            "sasl.password",
            valid_settings().property("sasl.password", "x"),
        ),
        (
            "sasl.username",
            valid_settings()
                .property("sasl.username", "x")
                .property("security.protocol", "ssl"),
        ),
        (
            "create_topics",
            valid_settings().create_topics(without_partitions),
        ),
        (
            "ca_certificate",
            valid_settings().ca_certificate("/no/such/file"),
        ),
        (
            "stalled_after",
            valid_settings().stalled_after(Duration::from_millis(999)),
        ),
    ];
    for (expected, kafka) in is_rejected {
        assert_eq!(setting(kafka), expected);
    }
    for (key, value) in [
        ("auto.commit.interval.ms", "0"),
        ("enable.ssl.certificate.verification", "false"),
        ("enable.auto.commit", "x"),
        ("enable.auto.offset.store", "x"),
        ("group.id", "x"),
        ("group.protocol", "x"),
        ("bootstrap.servers", "x"),
        ("auto.offset.reset", "x"),
        ("acks", "x"),
        ("isolation.level", "x"),
        ("allow.auto.create.topics", "x"),
        ("statistics.interval.ms", "x"),
    ] {
        assert_eq!(setting(valid_settings().property(key, value)), key);
    }
    assert!(valid_settings().check().is_ok());
    let with_sasl = valid_settings()
        .property("sasl.password", "x")
        .property("security.protocol", "SASL_PLAINTEXT");
    assert!(with_sasl.check().is_ok());
    let with_interval = valid_settings().property("auto.commit.interval.ms", "100");
    assert!(with_interval.check().is_ok());
}

#[test]
fn required_properties_override_the_users_which_override_defaults() {
    let properties = [
        ("fetch.queue.backoff.ms", "50"),
        ("security.protocol", "ssl"),
        ("batch.num.messages", "500"),
    ];
    let kafka = properties
        .iter()
        .fold(valid_settings(), |kafka, (key, value)| {
            kafka.property(*key, *value)
        });
    let consumer = kafka.consumer_config();
    assert_eq!(consumer.get("fetch.queue.backoff.ms"), Some("50"));
    assert_eq!(consumer.get("fetch.message.max.bytes"), Some("262144"));
    let with_alias = valid_settings()
        .property("max.partition.fetch.bytes", "1")
        .consumer_config();
    assert_eq!(
        (
            with_alias.get("fetch.message.max.bytes"),
            with_alias.get("max.partition.fetch.bytes")
        ),
        (None, Some("1"))
    );
    assert_eq!(
        (
            consumer.get("reconnect.backoff.max.ms"),
            kafka.reconnect_backoff_max()
        ),
        (Some("1000"), Duration::from_secs(1))
    );
    let slow = valid_settings().property("reconnect.backoff.ms", "2000");
    assert_eq!(slow.reconnect_backoff_max(), Duration::from_secs(2));
    slow.consumer_config()
        .create::<rdkafka::consumer::BaseConsumer>()
        .expect("librdkafka accepts the settings");
    let with_maximum = valid_settings().property("reconnect.backoff.max.ms", "3000");
    assert_eq!(
        (
            with_maximum
                .consumer_config()
                .get("reconnect.backoff.max.ms"),
            with_maximum.reconnect_backoff_max()
        ),
        (Some("3000"), Duration::from_secs(3))
    );
    assert_eq!(consumer.get("enable.auto.offset.store"), Some("false"));
    assert_eq!(consumer.get("auto.offset.reset"), Some("earliest"));
    assert_eq!(
        kafka.producer_config().get("security.protocol"),
        Some("ssl")
    );
    assert_eq!(kafka.producer_config().get("acks"), Some("all"));
    assert_eq!(
        kafka.producer_config().get("allow.auto.create.topics"),
        Some("false")
    );
    assert_eq!(
        kafka.producer_config().get("batch.num.messages"),
        Some("500")
    );
}

#[test]
fn the_default_assignor_is_cooperative_sticky() {
    let strategy = |kafka: Kafka| {
        kafka
            .consumer_config()
            .get("partition.assignment.strategy")
            .map(str::to_owned)
    };
    assert_eq!(
        strategy(valid_settings()).as_deref(),
        Some("cooperative-sticky")
    );
    assert_eq!(
        strategy(valid_settings().property("partition.assignment.strategy", "range")).as_deref(),
        Some("range")
    );
    // librdkafka rejects the property with `GroupProtocol::Consumer`.
    assert_eq!(
        strategy(valid_settings().group_protocol(GroupProtocol::Consumer)),
        None
    );
}

#[test]
fn properties_of_the_other_group_protocol_are_refused() {
    use GroupProtocol::{Classic, Consumer};
    for (key, value, refused_by) in [
        ("session.timeout.ms", "6000", Consumer),
        ("heartbeat.interval.ms", "1000", Consumer),
        ("partition.assignment.strategy", "range", Consumer),
        ("group.protocol.type", "consumer", Consumer),
        ("group.remote.assignor", "range", Classic),
    ] {
        for protocol in [Classic, Consumer] {
            let kafka = valid_settings()
                .group_protocol(protocol)
                .property(key, value);
            match kafka.check_settings() {
                Err(error) if protocol == refused_by => {
                    let text = error.to_string();
                    assert!(
                        text.starts_with(&format!("{key}: ")) && !text.contains('\n'),
                        "{text}"
                    );
                }
                // `check_settings` also checks that librdkafka accepts the property.
                checked => assert!(
                    checked.is_ok() && protocol != refused_by,
                    "{key}: {checked:?}"
                ),
            }
        }
    }
    // The clients that do not join the group have no group protocol.
    let kafka = valid_settings().group_protocol(Consumer);
    for config in [kafka.watch_config(), kafka.producer_config()] {
        assert_eq!(config.get("group.protocol"), None);
    }
}

#[test]
fn start_at_error_implies_out_of_range_error() {
    assert_eq!(valid_settings().out_of_range_policy(), OutOfRange::Earliest);
    assert_eq!(
        valid_settings()
            .out_of_range(OutOfRange::Error)
            .out_of_range_policy(),
        OutOfRange::Error
    );
    assert_eq!(
        valid_settings().start(StartAt::Error).out_of_range_policy(),
        OutOfRange::Error
    );
    for kafka in [
        valid_settings().start(StartAt::Error),
        valid_settings().out_of_range(OutOfRange::Error),
    ] {
        assert_eq!(
            kafka.consumer_config().get("auto.offset.reset"),
            Some("error")
        );
    }
}

#[test]
fn the_revoke_drain_timeout_is_below_the_poll_interval() {
    assert_eq!(
        valid_settings().revoke_drain_timeout(),
        Duration::from_secs(10)
    );
    assert_eq!(
        valid_settings()
            .property("max.poll.interval.ms", "6000")
            .revoke_drain_timeout(),
        Duration::from_secs(2)
    );
}

#[test]
fn debug_shows_no_property_value() {
    let shown = format!(
        "{:?}",
        valid_settings().property("sasl.password", "secret-canary")
    );
    assert!(shown.contains("sasl.password") && !shown.contains("canary"));
}

#[test]
fn the_session_timeout_is_the_one_that_librdkafka_uses() {
    let shown = |kafka: Kafka| kafka.session_timeout().to_string();
    assert_eq!(
        shown(valid_settings()),
        "45s by default, session.timeout.ms"
    );
    for set in ["12000", " 12000", "0x2ee0"] {
        assert_eq!(
            shown(valid_settings().property("session.timeout.ms", set)),
            "12s, session.timeout.ms",
            "{set}"
        );
    }
    assert_eq!(
        shown(valid_settings().group_protocol(GroupProtocol::Consumer)),
        "45s by default, group.consumer.session.timeout.ms of the broker"
    );
}
