//! The program reaches brokers as a consumer does: it refuses the same settings, and survives the
//! same messages.

use std::collections::BTreeMap;
use std::sync::Arc;

use lapin::BasicProperties;
use lapin::types::AMQPValue;
use oncegate::{Kafka, Open, RabbitMq};
use oncegate_testkit::proxy::{Fate, Proxy};

use crate::desk::Desk;
use crate::letters::ids;
use crate::world::{Broker, Provider, World, kafka, publish_properties, rabbitmq, text};

/// All that asks a broker.
const COMMANDS: [&[&str]; 5] = [
    &["dead-letters", "list"],
    &["dead-letters", "show", "a"],
    &["dead-letters", "redrive", "--all", "--yes"],
    &["dead-letters", "drop", "--all", "--yes"],
    &["in-doubt", "list"],
];

/// Those that say what they can of the rest, and why they could not ask.
const REPORTS: [&[&str]; 2] = [&["explain", "a"], &["doctor"]];

fn refuses(desk: &Desk, words: &str) {
    for command in COMMANDS {
        desk.run(command).ended(2).says(words);
    }
    for command in REPORTS {
        let said = desk.run(command).says(words);
        assert_ne!(said.code, 0, "{said:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_settings_are_refused_in_the_words_of_a_consumer() {
    let desk = Desk::new();
    for (property, value) in [
        ("enable.ssl.certificate.verification", "false"),
        ("ssl.endpoint.identification.algorithm", "none"),
        ("bootstrap.servers", "elsewhere:9092"),
    ] {
        let consumer = Kafka::topic("t")
            .brokers(kafka())
            .group("g")
            .property(property, value)
            .open()
            .await;
        let words = consumer.expect_err("it is refused").to_string();
        let brokers = format!("[kafka]\nbrokers = \"{}\"\ntopic = \"t\"\n", kafka());
        desk.configure(&format!(
            "{brokers}password = \"canary\"\nproperties = {{ \"{property}\" = \"{value}\" }}\n"
        ));
        refuses(&desk, &words);
        assert!(!format!("{:?}", desk.run(COMMANDS[0])).contains("canary"));
    }
    desk.configure("[kafka]\nbrokers = \"http://x\"\ntopic = \"t\"\n");
    refuses(&desk, "kafka.brokers: `http://x` begins with http://");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_settings_are_refused_in_the_words_of_a_consumer() {
    let desk = Desk::new();
    for url in [
        rabbitmq() + "?verify=verify_none",
        "amqp://guest:can/ary@localhost:5672/%2f".to_owned(),
    ] {
        let words = RabbitMq::queue("q")
            .url(&url)
            .open()
            .await
            .expect_err("it is refused")
            .to_string();
        desk.configure(&format!("[rabbitmq]\nurl = \"{url}\"\nqueue = \"q\"\n"));
        refuses(&desk, &words);
    }
    desk.configure("[rabbitmq]\nurl = \"amqp://guest:canary@127.0.0.1:1/%2f\"\nqueue = \"q\"\n");
    let said = desk
        .run(COMMANDS[0])
        .ended(3)
        .says("amqp://guest@127.0.0.1:1/%2f")
        .says("check that RabbitMQ is running");
    assert!(!said.err.contains("canary"), "{said:?}");
    desk.configure(&format!(
        "[rabbitmq]\nurl = \"{}\"\nqueue = \"q\"\n",
        rabbitmq().replace("guest:guest", "guest:canary")
    ));
    let said = desk
        .run(COMMANDS[0])
        .ended(3)
        .says("ACCESS_REFUSED")
        .says("check the user and the password");
    assert!(!said.err.contains("canary"), "{said:?}");
}

/// A table in a table in a table, as it travels: a name of one letter, `F`, a length, and what is
/// inside.
fn nested(depth: usize) -> Vec<u8> {
    let mut bytes = vec![0; depth * 7];
    for (level, part) in bytes.chunks_exact_mut(7).enumerate() {
        let inside = u32::try_from((depth - level - 1) * 7).expect("a frame holds it");
        part[..3].copy_from_slice(b"\x01aF");
        part[3..].copy_from_slice(&inside.to_be_bytes());
    }
    bytes
}

/// A way to the broker on which the text under `nested` becomes a table (both have a length and so
/// many bytes), and `@@@@` bytes that are no UTF-8.
fn spoiling() -> (Proxy, String) {
    let url = rabbitmq();
    let at = url.rfind(':').expect("a port") + 1;
    let port: String = url[at..].chars().take_while(char::is_ascii_digit).collect();
    let proxy = Proxy::to(port.parse().expect("a port")).expect("a free port");
    proxy.judge(|passing| {
        if let Some(found) = passing.windows(7).position(|seven| seven == b"nestedS") {
            passing[found + 6] = b'F';
        }
        while let Some(found) = passing.windows(4).position(|four| four == b"@@@@") {
            passing[found..found + 4].fill(0xff);
        }
        Fate::Pass
    });
    let by_proxy = url.replacen(&format!(":{port}"), &format!(":{}", proxy.port()), 1);
    (proxy, by_proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_headers_stop_neither_list_nor_redrive() {
    let world = Arc::new(World::on(Broker::RabbitMq).await);
    let (name, (_proxy, url)) = (&world.desk.name, spoiling());
    let body = r#"{"card":"works"}"#;
    for (id, odd, value) in [
        (
            "deep",
            "nested",
            AMQPValue::LongString(nested(15_000).into()),
        ),
        ("odd", "a@@@@", text("value")),
        ("sound", "plain", text("value")),
    ] {
        let table = BTreeMap::from([("payment-id".into(), text(id)), (odd.into(), value)]);
        // No client takes it from the queue: the broker dead-letters it by itself.
        let properties = BasicProperties::default()
            .with_headers(table.into())
            .with_expiration("1".into());
        publish_properties(&url, name, body, properties).await;
        world.until_there_are(0, "").await;
    }
    world.until_there_are(3, ".dead-letters").await;
    assert_eq!(
        ids(&world.json(&["dead-letters", "list"]).await),
        ["deep", "odd", "sound"]
    );
    world
        .run(&["dead-letters", "show", "deep", "--body"])
        .await
        .ended(0)
        .says("payment-id: deep")
        .says(body);
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(0)
        .says("3 redriven");
    // The consumer dead-letters a message with a header name that is not UTF-8.
    world.consume(Provider::Works, 2, 1, 0).await;
    let mut charged = world.charged();
    charged.sort();
    assert_eq!(charged, ["deep", "sound"]);
    assert_eq!(
        world.json(&["dead-letters", "list"]).await["letters"][0]["reason"],
        "unreadable"
    );
    world.end().await;
}
