//! Copies the samples of the documentation, which name the addresses of a developer's machine, and
//! replaces these by environment variables. `src/bin/sample.rs` runs the copies.

use std::path::{Path, PathBuf};

/// The samples that run until a signal. `stop` is tried as it is, by the tests of its package. The test
/// `readme` of the facade checks that none is left out.
const SAMPLES: [&str; 7] = [
    "oncegate/examples/coming_from.rs",
    "oncegate/examples/kafka.rs",
    "oncegate/examples/rabbitmq.rs",
    "oncegate/examples/replies.rs",
    "oncegate/examples/trial.rs",
    "oncegate-admin/examples/admin.rs",
    "oncegate-postgres/examples/outbox.rs",
];

/// What is replaced, and the expression that takes its place.
const REPLACED: [(&str, &str); 19] = [
    (
        r#".brokers("localhost:9092")"#,
        r#".brokers(crate::variable("ONCEGATE_KAFKA")).create_topics(crate::ONE_BROKER)"#,
    ),
    (
        r#""amqp://guest:guest@localhost:5672/%2f""#,
        r#"crate::variable("ONCEGATE_RABBITMQ")"#,
    ),
    (
        r#""redis://localhost:6379""#,
        r#"crate::variable("ONCEGATE_REDIS")"#,
    ),
    (
        r#""postgres://ledger:secret@localhost/ledger""#,
        r#"crate::variable("ONCEGATE_POSTGRES").leak()"#,
    ),
    (
        r#"RabbitMq::queue("transfers")"#,
        r#"RabbitMq::queue(crate::variable("NAME"))"#,
    ),
    (
        r#"Outgoing::to("ledger.booked")"#,
        r#"Outgoing::to(crate::variable("NAME") + ".booked")"#,
    ),
    // Its handler returns at once: in the copy it can be interrupted.
    (
        r#"println!("{}", cx.id());"#,
        "crate::print_start_and_end(cx.id()).await;",
    ),
    (
        r#"Kafka::topic("payments")"#,
        r#"Kafka::topic(crate::variable("NAME"))"#,
    ),
    (
        r#"RabbitMq::queue("stock")"#,
        r#"RabbitMq::queue(crate::variable("NAME"))"#,
    ),
    (
        r#"RabbitMq::queue("charges")"#,
        r#"RabbitMq::queue(crate::variable("NAME"))"#,
    ),
    (r#".scope("till")"#, r#".scope(crate::variable("NAME"))"#),
    (r#".dead_letters("payments-dlt")"#, ""),
    (r#".group("ledger")"#, r#".group(crate::variable("NAME"))"#),
    (r#".scope("ledger")"#, r#".scope(crate::variable("NAME"))"#),
    (r#".scope("shelf")"#, r#".scope(crate::variable("NAME"))"#),
    ("async fn main()", "pub(crate) async fn main()"),
    (
        r#"IdSource::header("payment-id")"#,
        r#"IdSource::header("id")"#,
    ),
    ("IdSource::message_id()", r#"IdSource::header("id")"#),
    (".serve()?", ".listen(([127, 0, 0, 1], 0)).serve()?"),
];

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    for sample in SAMPLES {
        let path = Path::new("../crates").join(sample);
        println!("cargo::rerun-if-changed={}", path.display());
        let text = std::fs::read_to_string(&path).expect("a sample of the documentation");
        // A file that is included has no documentation of its own.
        let text: String = text
            .lines()
            .filter(|line| !line.starts_with("//!"))
            .flat_map(|line| [line, "\n"])
            .collect();
        let text = REPLACED
            .iter()
            .fold(text, |text, (from, to)| text.replace(from, to));
        assert!(
            !text.contains("localhost"),
            "{sample} has an address that is not replaced"
        );
        let name = path.file_name().expect("it is a file");
        std::fs::write(out.join(name), text).expect("the copy");
    }
}
