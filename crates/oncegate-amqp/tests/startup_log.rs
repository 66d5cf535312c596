//! What a source says while there is no broker. Alone in its process, because it listens to all
//! that is logged.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_amqp::RabbitMq;
use oncegate_core::source::Open;
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, Raw, async_trait};
use oncegate_testkit::Lines;

/// One after the other: there is one place where lines are heard.
#[tokio::test]
async fn what_a_source_says_while_there_is_no_broker() {
    let lines = Lines::of_this_process();
    without_a_broker_one_line_comes_soon_and_names_setting_problem_and_remedy(&lines).await;
    a_consumer_whose_handlers_may_outlast_the_consumer_timeout_is_warned_at_start(&lines).await;
}

async fn without_a_broker_one_line_comes_soon_and_names_setting_problem_and_remedy(lines: &Lines) {
    let begun = Instant::now();
    let opening = RabbitMq::queue("q")
        .url("amqp://someone:canary@127.0.0.1:1/%2f")
        .open();
    // Long enough for six attempts.
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
struct Slow;

#[async_trait]
impl Handler for Slow {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

async fn a_consumer_whose_handlers_may_outlast_the_consumer_timeout_is_warned_at_start(
    lines: &Lines,
) {
    for (minutes, outlasts) in [(5, false), (10, true)] {
        let queue = format!("slow-{minutes}");
        let mut said = Vec::new();
        let until_it_looks_for_its_broker = async {
            while !said
                .iter()
                .any(|line: &String| line.contains("cannot be reached") && line.contains(&queue))
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
                said.extend(lines.take().into_iter().map(|(_, line)| line));
            }
        };
        let consumer = Consumer::builder()
            .source(RabbitMq::queue(&queue).url("amqp://127.0.0.1:1/%2f"))
            .store(MemoryStore::new())
            .id(IdSource::message_id())
            .handler(Slow)
            .handler_timeout(Duration::from_secs(60 * minutes));
        consumer
            .run_until(until_it_looks_for_its_broker)
            .await
            .expect("nothing that a person has to change");
        let warned = said.iter().any(|line| {
            line.contains("WARN")
                && line.contains("consumer_timeout: a delivery may be unsettled for 2500s")
        });
        assert_eq!(warned, outlasts, "{minutes} min: {said:#?}");
    }
}
