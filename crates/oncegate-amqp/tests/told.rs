//! What a source says while there is no broker. Alone in its process, because it listens to all that is logged.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_amqp::RabbitMq;
use oncegate_core::source::Open;
use oncegate_testkit::Lines;

#[tokio::test]
async fn without_a_broker_one_line_comes_soon_and_names_setting_problem_and_remedy() {
    let lines = Lines::of_this_process();
    let begun = Instant::now();
    let opening = RabbitMq::queue("q").url("amqp://someone:canary@127.0.0.1:1/%2f").open();
    // Long enough for six attempts.
    assert!(tokio::time::timeout(Duration::from_secs(5), opening).await.is_err());
    let lines = lines.take();
    let [(at, line)] = lines.as_slice() else { panic!("{} lines: {lines:#?}", lines.len()) };
    assert!(at.duration_since(begun) < Duration::from_secs(2), "after {:?}", at.duration_since(begun));
    for part in
        ["WARN", "url: amqp://someone@127.0.0.1:1/%2f cannot be reached (", "refused", "is RabbitMQ running, are host and port right"]
    {
        assert!(line.contains(part), "{part}: {line}");
    }
}
