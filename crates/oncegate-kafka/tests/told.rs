//! What a source says while there is no broker. Alone in its process, because it listens to all that is logged.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::source::Open;
use oncegate_kafka::Kafka;

/// Lines, and when each came.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<(Instant, String)>>>);

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let said = String::from_utf8_lossy(line).into_owned();
        self.0.lock().expect("nobody panics with it").push((Instant::now(), said));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_broker_one_line_comes_soon_and_names_setting_problem_and_remedy() {
    let lines = Lines::default();
    let writer = lines.clone();
    tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::INFO).with_writer(move || writer.clone()).init();
    let begun = Instant::now();
    let opening = Kafka::topic("t").brokers("127.0.0.1:1").group("g").open();
    assert!(tokio::time::timeout(Duration::from_secs(7), opening).await.is_err());
    let lines = lines.0.lock().expect("nobody panics with it");
    let [(at, line)] = lines.as_slice() else { panic!("{} lines in 7 s: {lines:#?}", lines.len()) };
    assert!(at.duration_since(begun) < Duration::from_secs(2), "after {:?}", at.duration_since(begun));
    for part in ["WARN", "brokers: 127.0.0.1:1 cannot be reached", "Connect", "refused", "is Kafka running, and are host, port"] {
        assert!(line.contains(part), "{part}: {line}");
    }
}
