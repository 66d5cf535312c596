//! A build without Kafka and SQLite: commands that need them fail with one line, the others work.
//!
//! `cargo test -p oncegate-cli --no-default-features --features rabbitmq,redis --test slim`
#![cfg(all(not(feature = "kafka"), not(feature = "sqlite")))]

use std::process::Command;

/// Runs the program with these variables. Returns its exit code and standard error.
fn run(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut program = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let ended = program
        .args(arguments)
        .env("ONCEGATE_CONFIG", "/dev/null")
        .envs(variables.iter().copied())
        .output()
        .expect("the program was built");
    (
        ended.status.code(),
        String::from_utf8(ended.stderr).expect("text"),
    )
}

const KAFKA: [(&str, &str); 3] = [
    ("ONCEGATE_KAFKA_BROKERS", "127.0.0.1:1"),
    ("ONCEGATE_KAFKA_TOPIC", "payments"),
    ("ONCEGATE_GATE_ID", "header payment-id"),
];

#[test]
fn missing_features_have_an_error_and_an_exit_code() {
    let audited = [KAFKA.as_slice(), &[("ONCEGATE_AUDIT_FILE", "/dev/null")]].concat();
    let sqlite = [("ONCEGATE_STORE_URL", "sqlite:markers.db")];
    for (arguments, variables, lacks) in [
        (&["dead-letters", "list"][..], audited.as_slice(), "Kafka"),
        (
            &["dead-letters", "redrive", "--all", "--yes"],
            &audited,
            "Kafka",
        ),
        (&["in-doubt", "show", "payment-1"], &audited, "Kafka"),
        (&["explain", "payment-1", "--copies"], &audited, "Kafka"),
        (&["marker", "show", "payment-1"], &sqlite, "SQLite"),
        (&["config", "check"], &KAFKA, "Kafka"),
        (&["config", "check"], &sqlite, "SQLite"),
    ] {
        let (code, output) = run(arguments, variables);
        assert_eq!(code, Some(6), "{arguments:?}: {output}");
        let one_line = output.lines().count() == 1
            && output.starts_with(&format!(
                "oncegate: this oncegate was built without {lacks}; install"
            ));
        assert!(one_line, "{arguments:?}: {output}");
    }
}

#[test]
fn other_commands_work() {
    let rabbitmq = [("ONCEGATE_RABBITMQ_PREFETCH", "8")];
    let (code, output) = run(&["config", "check"], &rabbitmq);
    assert_eq!(code, Some(0), "{output}");
    let chosen = [KAFKA.as_slice(), &[("ONCEGATE_GATE_BROKER", "rabbitmq")]].concat();
    let (code, output) = run(&["config", "check"], &chosen);
    assert_eq!(code, Some(0), "{output}");
    let (code, output) = run(&["plan", "--rate", "1000"], &[]);
    assert_eq!(code, Some(0), "{output}");
    // The broker that cannot be checked is named, and the other findings are printed.
    let (code, output) = run(&["doctor"], &KAFKA);
    assert_eq!(code, Some(6), "{output}");
}
