//! Each server keeps its port and its data over stop, kill and start again.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use oncegate_testkit::servers::{
    KafkaServer, ProcessId, RabbitServer, RedisOptions, RedisPersistence, RedisServer, ServerError,
    fetch_kafka,
};

#[test]
fn redis_keeps_port_and_data() {
    let options = RedisOptions::new()
        .persistence(RedisPersistence::EverySecond)
        .password("secret");
    let mut redis = RedisServer::start(options).unwrap();
    let url = redis.url();
    let first = ProcessId::running(redis.pid()).unwrap();
    assert_eq!(tell_redis(&redis, "SET kept 1"), "+OK");

    redis.kill();
    assert!(!first.is_running());
    assert!(TcpStream::connect(("127.0.0.1", redis.port())).is_err());
    redis.start_again().unwrap();
    assert_eq!(redis.url(), url);
    assert_eq!(tell_redis(&redis, "GET kept"), "$1");

    redis.stop();
    redis.start_again().unwrap();
    assert_eq!(tell_redis(&redis, "GET kept"), "$1");

    redis.freeze();
    let mut stream = connect(&redis);
    stream.write_all(b"PING\r\n").unwrap();
    stream
        .set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    assert!(
        stream.read(&mut [0; 16]).is_err(),
        "a frozen server answered"
    );
    redis.thaw();
    assert_eq!(tell_redis(&redis, "GET kept"), "$1");

    let last = ProcessId::running(redis.pid()).unwrap();
    let directory = redis.directory().to_path_buf();
    drop(redis);
    assert!(!last.is_running());
    assert!(!directory.exists());
}

#[test]
fn a_failed_start_shows_the_log() {
    let error = RedisServer::start(RedisOptions::new().setting("no-such-setting", "1"))
        .err()
        .expect("it started");
    let text = error.to_string();
    assert!(matches!(error, ServerError::DidNotStart { .. }), "{text}");
    assert!(
        text.contains("no-such-setting") && text.contains("cargo xtask setup"),
        "{text}"
    );
}

#[test]
fn rabbitmq_keeps_port_and_data() {
    let mut rabbitmq = RabbitServer::start().unwrap();
    let url = rabbitmq.url();
    rabbitmq.control(&["add_vhost", "kept"]).unwrap();

    rabbitmq.stop();
    assert!(TcpStream::connect(("127.0.0.1", rabbitmq.port())).is_err());
    rabbitmq.start_again().unwrap();
    rabbitmq.kill();
    rabbitmq.start_again().unwrap();

    assert_eq!(rabbitmq.url(), url);
    assert!(
        rabbitmq
            .control(&["-q", "list_vhosts"])
            .unwrap()
            .lines()
            .any(|line| line == "kept")
    );
    assert!(matches!(
        rabbitmq.control(&["no_such_command"]),
        Err(ServerError::ProgramFailed { .. })
    ));
}

#[test]
fn kafka_keeps_port_and_data() {
    let mut kafka = KafkaServer::start().unwrap();
    let brokers = kafka.brokers();
    topics(
        &kafka,
        &["--create", "--topic", "kept", "--partitions", "3"],
    );

    kafka.stop();
    assert!(TcpStream::connect(("127.0.0.1", kafka.port())).is_err());
    kafka.start_again().unwrap();
    kafka.kill();
    kafka.start_again().unwrap();

    assert_eq!(kafka.brokers(), brokers);
    assert_eq!(topics(&kafka, &["--list"]).lines().last(), Some("kept"));
}

fn connect(redis: &RedisServer) -> TcpStream {
    TcpStream::connect(("127.0.0.1", redis.port())).unwrap()
}

/// The first line of Redis's answer.
fn tell_redis(redis: &RedisServer, command: &str) -> String {
    let mut stream = connect(redis);
    write!(stream, "AUTH secret\r\n{command}\r\nQUIT\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().nth(1).unwrap_or_default().to_owned()
}

fn topics(kafka: &KafkaServer, arguments: &[&str]) -> String {
    let output = Command::new("java")
        .arg("-cp")
        .arg(fetch_kafka().unwrap().join("*"))
        .args([
            "org.apache.kafka.tools.TopicCommand",
            "--bootstrap-server",
            &kafka.brokers(),
        ])
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}
