//! The memory of a source does not grow with the number of messages it has handled.

use std::time::{Duration, Instant};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use oncegate_amqp::{RabbitMq, RabbitMqStatus};
use oncegate_core::source::{Connect, ConnectOptions, Incoming, Limit, Settled, Source};
use oncegate_testkit::laws::source::accepted;
use oncegate_testkit::servers::RabbitServer;

const PREFETCH: u32 = 256;
const BODY: usize = 4_096;

/// The resident memory of this process.
fn resident_kilobytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .expect("a line");
    line.trim()
        .trim_end_matches(" kB")
        .parse()
        .expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; cargo xtask faults runs it"]
async fn memory_does_not_grow_over_two_hundred_thousand_messages() {
    const ALL: usize = 200_000;
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let status = RabbitMqStatus::new();
    let source = RabbitMq::queue("flat")
        .url(server.url())
        .prefetch(PREFETCH)
        .status(status.clone())
        .connect(ConnectOptions::default())
        .await
        .expect("opened");
    let mut source: Box<dyn Source> = Box::new(source);
    let url = server.url();
    let publishing = tokio::spawn(async move {
        let connection = Connection::connect(&url, ConnectionProperties::default())
            .await
            .expect("a connection");
        let channel = connection.create_channel().await.expect("a channel");
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await
            .expect("confirms");
        let body = vec![b'x'; BODY];
        for _ in 0..ALL / 200 {
            let mut window = Vec::with_capacity(200);
            for _ in 0..200 {
                let sent = channel.basic_publish(
                    "".into(),
                    "flat".into(),
                    BasicPublishOptions::default(),
                    &body,
                    BasicProperties::default(),
                );
                window.push(sent.await.expect("sent"));
            }
            for confirm in window {
                confirm.await.expect("confirmed");
            }
        }
    });
    let (mut seen, mut early, mut max_unacked, started) = (0, 0, 0, Instant::now());
    while seen < ALL {
        let mut into = Vec::new();
        let receiving = tokio::time::timeout(
            Duration::from_secs(60),
            source.receive(Limit::new(64, 1 << 20), &mut into),
        );
        receiving.await.expect("in time").expect("received");
        let taken = into.into_iter().map(|incoming| match incoming {
            Incoming::Delivery(delivery) => Settled::new(delivery, accepted()),
            Incoming::Revoked(epoch) => panic!("{epoch} was lost"),
        });
        let mut settled: Vec<_> = taken.collect();
        seen += settled.len();
        source.settle(&mut settled).await.expect("settled");
        max_unacked = max_unacked.max(status.snapshot().unacked);
        if early == 0 && seen > ALL / 10 {
            early = resident_kilobytes();
        }
    }
    let late = resident_kilobytes();
    publishing.await.expect("no panic");
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed");
    crate::assert_no_refused_acks(&server);
    println!(
        "{ALL} messages of {BODY} bytes in {:.1?}: {early} kB after a tenth, {late} kB at the end; unacknowledged at most {max_unacked}",
        started.elapsed()
    );
    assert!(max_unacked <= PREFETCH.into());
    assert!(late < early + 8 * 1_024, "{early} kB grew to {late} kB");
}
