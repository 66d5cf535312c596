//! A build without Kafka and SQLite: what it lacks it says in one line, and all else works.
//!
//! `cargo test -p oncegate-cli --no-default-features --features rabbitmq,redis --test slim`
#![cfg(all(not(feature = "kafka"), not(feature = "sqlite")))]

use std::process::Command;

/// Runs the program with these variables; its exit code, and what it wrote to standard error.
fn run(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut program = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let ended = program
        .args(arguments)
        .env("ONCEGATE_CONFIG", "/dev/null")
        .envs(variables.iter().copied())
        .output()
        .expect("it was built");
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
    ] {
        let (code, said) = run(arguments, variables);
        assert_eq!(code, Some(6), "{arguments:?}: {said}");
        let one_line = said.lines().count() == 1
            && said.starts_with(&format!(
                "oncegate: this oncegate was built without {lacks}; install"
            ));
        assert!(one_line, "{arguments:?}: {said}");
    }
}

#[test]
fn other_commands_work() {
    let (code, said) = run(&["config", "check"], &KAFKA);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = run(&["plan", "--rate", "1000"], &[]);
    assert_eq!(code, Some(0), "{said}");
    // Who cannot be asked is named, and keeps nobody from hearing what else was found.
    let (code, said) = run(&["doctor"], &KAFKA);
    assert_eq!(code, Some(6), "{said}");
}
