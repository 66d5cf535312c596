//! What a source logs without a broker. In a test binary of its own, because it captures the log of
//! the process.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_amqp::RabbitMq;
use oncegate_core::source::Open;
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, Raw, async_trait};
use oncegate_testkit::Lines;

/// One after the other, because the process has one log.
#[tokio::test]
async fn what_a_source_logs_without_a_broker() {
    let lines = Lines::of_this_process();
    without_a_broker_one_line_with_setting_problem_and_remedy_is_logged(&lines).await;
    a_consumer_that_may_exceed_the_consumer_timeout_logs_a_warning_at_start(&lines).await;
}

async fn without_a_broker_one_line_with_setting_problem_and_remedy_is_logged(lines: &Lines) {
    let begun = Instant::now();
    let opening = RabbitMq::queue("q")
        .url("amqp://someone:canary@127.0.0.1:1/%2f")
        .open();
    // Long enough for six attempts to connect.
    assert!(
        tokio::time::timeout(Duration::from_secs(5), opening)
            .await
            .is_err()
    );
    let lines = lines.take();
    let [(at, line)] = lines.as_slice() else {
        panic!("{} lines: {lines:#?}", lines.len())
    };
    assert!(
        at.duration_since(begun) < Duration::from_secs(2),
        "after {:?}",
        at.duration_since(begun)
    );
    for part in [
        "WARN",
        "url: amqp://someone@127.0.0.1:1/%2f cannot be reached (",
        "refused",
        "check that RabbitMQ is running, that host and port are correct",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

/// A handler that never runs.
struct UncalledHandler;

#[async_trait]
impl Handler for UncalledHandler {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

async fn a_consumer_that_may_exceed_the_consumer_timeout_logs_a_warning_at_start(lines: &Lines) {
    for (minutes, may_exceed) in [(5, false), (10, true)] {
        let queue = format!("slow-{minutes}");
        let mut logged = Vec::new();
        let until_it_looks_for_its_broker = async {
            while !logged
                .iter()
                .any(|line: &String| line.contains("cannot be reached") && line.contains(&queue))
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
                logged.extend(lines.take().into_iter().map(|(_, line)| line));
            }
        };
        let consumer = Consumer::builder()
            .source(RabbitMq::queue(&queue).url("amqp://127.0.0.1:1/%2f"))
            .store(MemoryStore::new())
            .id(IdSource::message_id())
            .handler(UncalledHandler)
            .handler_timeout(Duration::from_secs(60 * minutes));
        consumer
            .run_until(until_it_looks_for_its_broker)
            .await
            .expect("no configuration error");
        let warned = logged.iter().any(|line| {
            line.contains("WARN")
                && line.contains("consumer_timeout: a delivery may be unsettled for 2500s")
        });
        assert_eq!(warned, may_exceed, "{minutes} min: {logged:#?}");
    }
}
