//! A consumer with an invalid configuration fails before it connects, with the key and a remedy.
#![cfg(all(
    feature = "run",
    feature = "kafka",
    feature = "rabbitmq",
    feature = "redis",
    feature = "sqlite"
))]
#![forbid(unsafe_code)]

use oncegate::{Context, Failure, Handler, Raw};
use oncegate_config::{Config, Error};

struct Nothing;

impl Handler for Nothing {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

const RABBITMQ: &str = "[rabbitmq]\nurl = \"amqp://localhost:1/%2f\"\nqueue = \"q\"\n";
const KAFKA: &str = "[kafka]\nbrokers = \"localhost:1\"\ntopic = \"t\"\ngroup = \"g\"\n";

/// The error with which a consumer with this file fails at start.
async fn startup_error(text: &str, variables: &[(&str, &str)]) -> String {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("oncegate.toml");
    std::fs::write(&file, text).expect("written");
    let variables = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let config = match Config::read(Some(&file), variables) {
        Ok(config) => config,
        Err(error) => return error.to_string(),
    };
    let error = config
        .run_until(Nothing, std::future::pending::<()>())
        .await
        .expect_err("the configuration is invalid");
    assert!(matches!(error, Error::Misconfigured(_)), "{error}");
    error.to_string()
}

#[tokio::test]
async fn errors_name_the_key() {
    let good = "[store]\nurl = \"memory:\"\n[gate]\nid = \"message-id\"\n";
    let for_kafka = good.replace("message-id", "key");
    for (text, words) in [
        (
            String::new(),
            &["no store", "store.url", "ONCEGATE_STORE_URL"][..],
        ),
        (
            good.to_owned(),
            &["no broker", "kafka.group", "rabbitmq.queue"],
        ),
        (format!("{good}{KAFKA}{RABBITMQ}"), &["gate.broker"]),
        (
            format!("{good}guarantee = \"at-most-once\"\n{RABBITMQ}"),
            &["gate.guarantee", "store.volatile = \"accepted\""],
        ),
        (
            format!("{good}guarantee = \"at-most-once\"\nmode = \"shadow\"\n{RABBITMQ}"),
            &[
                "gate.mode: ",
                // As in the error of the core.
                "a shadow lets every message run, and in at most once no effect may happen twice",
            ],
        ),
        (
            format!("{good}lease = \"25h\"\n{RABBITMQ}"),
            &["gate.lease: ", "window", "shorten the lease"],
        ),
        (
            format!("{good}max-age = \"25h\"\n{RABBITMQ}"),
            &["gate.max-age: "],
        ),
        (
            format!("{good}shortest-lease = \"1m\"\n{RABBITMQ}"),
            &["gate.shortest-lease is longer than gate.lease"],
        ),
        (
            format!("{good}max-attempts = 0\n{RABBITMQ}"),
            &["gate.max-attempts: it is 0; set at least 1"],
        ),
        (
            format!("{good}max-attempts = 5000000000\n{RABBITMQ}"),
            &["gate.max-attempts: 5000000000 is too large"],
        ),
        (
            format!("{good}outage = \"pass-through\"\nguarantee = \"bare\"\n{RABBITMQ}"),
            &["gate.outage: "],
        ),
        (
            format!("{good}{RABBITMQ}prefetch = 0\n"),
            &["rabbitmq.prefetch: "],
        ),
        (
            format!("{good}{KAFKA}"),
            &["gate.id: message-id ", "Kafka", "use header NAME, key, "],
        ),
        (
            format!("{}{KAFKA}", good.replace("message-id", "message-id hashed")),
            &["gate.id: message-id "],
        ),
        (
            format!("{}{RABBITMQ}", good.replace("message-id", "position")),
            &["gate.id: position ", "RabbitMQ", "use message-id, "],
        ),
        (
            format!("{good}{RABBITMQ}dead-letters = \"q\"\n"),
            &["rabbitmq.dead-letters: ", "name another queue"],
        ),
        (
            format!("{for_kafka}{KAFKA}stalled-after = \"1ms\"\n"),
            &["kafka.stalled-after: "],
        ),
        (
            format!("{for_kafka}{KAFKA}properties = {{ \"enable.auto.commit\" = \"true\" }}\n"),
            &["kafka.properties: enable.auto.commit: "],
        ),
        (
            format!("{good}{RABBITMQ}[log]\nfilter = \"=\"\n"),
            &["log.filter: "],
        ),
        (
            format!("{good}{RABBITMQ}[store2]\n"),
            &["[store2]", "did you mean store?"],
        ),
        (
            good.replace("memory:", "mongodb://root:s3cret@x") + RABBITMQ,
            &["store.url is not valid", "redis://", "sqlite:"],
        ),
        (
            good.replace("memory:", "sqlite:") + RABBITMQ,
            &["store.url", "has no file"],
        ),
        (
            good.replace("memory:", "redis://x:notaport") + RABBITMQ,
            &["store.url: ", "not a Redis URL"],
        ),
        (
            good.replace("memory:", "sqlite::memory:") + RABBITMQ,
            &["store.url: sqlite::memory: is no file", "memory:"],
        ),
    ] {
        let startup_error = startup_error(&text, &[]).await;
        assert!(
            words.iter().all(|word| startup_error.contains(word)),
            "{startup_error:?} lacks one of {words:?}, of:\n{text}"
        );
        assert!(!startup_error.contains("s3cret"), "{startup_error}");
    }
}

#[tokio::test]
async fn variables_take_precedence_and_are_named() {
    let good = format!("[store]\nurl = \"memory:\"\n[gate]\nid = \"message-id\"\n{RABBITMQ}");
    for (name, value, words) in [
        (
            "ONCEGATE_GATE_LEASE",
            "soon",
            "ONCEGATE_GATE_LEASE: gate.lease: \"soon\" is not a duration",
        ),
        ("ONCEGATE_GATE_LEASE", "25h", "gate.lease: "),
        ("ONCEGATE_GATE_ORDER", "by-kye", "did you mean by-key?"),
        (
            "ONCEGATE_GATE_LAESE",
            "30s",
            "did you mean ONCEGATE_GATE_LEASE?",
        ),
        (
            "ONCEGATE_RABBITMQ_URL_FILE",
            "/no/such/file",
            "ONCEGATE_RABBITMQ_URL_FILE: /no/such/file",
        ),
        (
            "ONCEGATE_ADMIN_LISTEN",
            "localhost",
            "admin.listen: \"localhost\" is not an address",
        ),
    ] {
        let startup_error = startup_error(&good, &[(name, value)]).await;
        assert!(
            startup_error.contains(words),
            "{startup_error:?} lacks {words:?}"
        );
    }
}

#[test]
fn debug_shows_keys_and_no_value() {
    let variables = [
        ("ONCEGATE_STORE_URL", "redis://:s3cret@x"),
        ("ONCEGATE_KAFKA_PASSWORD", "s3cret"),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let config =
        Config::read(Some(std::path::Path::new("/dev/null")), variables).expect("two keys");
    let shown = format!(
        "{config:?} {:?}",
        config.configured_values().collect::<Vec<_>>()
    );
    assert!(
        shown.contains("store.url")
            && shown.contains("ONCEGATE_KAFKA_PASSWORD")
            && !shown.contains("s3cret"),
        "{shown}"
    );
}

#[test]
fn an_id_is_the_first_of_several_or_all_of_them() {
    let id_source = |id: &str| {
        let variables = [("ONCEGATE_GATE_ID".to_owned(), id.to_owned())];
        let config = Config::read(Some(std::path::Path::new("/dev/null")), variables);
        config.and_then(|config| config.id_source())
    };
    let message = oncegate::Message::new(r#"{"id":7}"#)
        .with_header("tenant", "t-1")
        .with_key("key-1");
    for (setting, expected) in [
        ("header payment-id or json /id", "7"),
        ("header tenant and json /id", "t-1/7"),
        (
            "header payment-id and json /id or header tenant and key",
            "t-1/key-1",
        ),
    ] {
        let source = id_source(setting).expect(setting).expect("an id source");
        assert_eq!(
            source.read(&message).expect(setting).as_str(),
            expected,
            "{setting}"
        );
    }
    let inner = "header a hashed or header b";
    for wrong in ["key or", "key or tenant", "key and ", "or key", inner] {
        assert!(id_source(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn ids_are_hashed_if_configured() {
    let read = |id: &str| {
        let variables = [("ONCEGATE_GATE_ID".to_owned(), id.to_owned())];
        Config::read(Some(std::path::Path::new("/dev/null")), variables).expect("one key")
    };
    let (plain, hashed) = (read("header payment-id"), read("header payment-id hashed"));
    let message = oncegate::Message::new("x").with_header("payment-id", "pay-1");
    let read_id = |config: &Config| {
        config
            .id_source()
            .expect("a valid id source")
            .expect("gate.id is set")
            .read(&message)
            .expect("an id")
    };
    assert_eq!(read_id(&plain).as_str(), "pay-1");
    assert!(read_id(&hashed).as_str().starts_with("h:"));
    for config in [plain, hashed] {
        let given = config.message_id("pay-1").expect("an id");
        assert_eq!(given, read_id(&config), "the id as the producer wrote it");
        assert_eq!(
            config.message_id(given.as_str()),
            Some(given),
            "the id as keys and logs show it"
        );
    }
}

#[test]
fn a_configured_store_keeps_results() {
    use oncegate::Store;

    let url = ("ONCEGATE_STORE_URL".to_owned(), "memory:".to_owned());
    let config = Config::read(None, [url]).expect("the configuration is valid");
    assert!(config.store().expect("a store").results().is_some());
}
