//! Errors of the demo when a server cannot be reached.
#![cfg(feature = "real")]
#![forbid(unsafe_code)]

use std::process::Command;

/// The standard error of a demo that fails at start.
fn error(broker: &str, redis: &str, rabbitmq: &str) -> String {
    let temporary = tempfile::tempdir().expect("a directory");
    let mut demo = Command::new(env!("CARGO_BIN_EXE_payments"));
    demo.args(["--broker", broker, "--payments", "10"]);
    demo.env("ONCEGATE_REDIS", redis)
        .env("ONCEGATE_RABBITMQ", rabbitmq);
    let output = demo.arg("--run-dir").arg(temporary.path()).output();
    let output = output.expect("it ran");
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn a_server_that_cannot_be_reached_is_named_without_its_password() {
    let unreachable = "amqp://someone:canary@127.0.0.1:1/%2f";
    let of_redis = error("rabbitmq", "redis://:canary@127.0.0.1:1", unreachable);
    assert!(
        of_redis.contains("Redis at 127.0.0.1:1"),
        "no address in {of_redis}"
    );
    let redis = oncegate_testkit::redis_url().expect("ONCEGATE_REDIS is set");
    let of_rabbitmq = error("rabbitmq", &redis, unreachable);
    assert!(
        of_rabbitmq.contains("127.0.0.1:1/%2f cannot be reached"),
        "no address in {of_rabbitmq}"
    );
    assert!(!of_redis.contains("canary") && !of_rabbitmq.contains("canary"));
}
