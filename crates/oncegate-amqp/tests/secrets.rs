//! No line at any level holds a password. Alone in its process, because it listens to all that is logged.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Mutex};

use oncegate_amqp::RabbitMq;
use oncegate_core::source::{Open, SourceError};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("nobody panics with it").extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn no_line_at_any_level_holds_a_password() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::TRACE).with_writer(move || writer.clone()).init();
    let broker = oncegate_testkit::rabbitmq_url().expect("a RabbitMQ to test against");
    // It knows no such user; the whole handshake is gone through all the same.
    let url = broker.replacen("guest:guest", "someone:canary%21", 1);
    let refused = RabbitMq::queue("q").urls([url.as_str(), "amqp://someone:canary%21@127.0.0.1:1/%2f"]).open().await;
    match refused {
        Err(error @ SourceError::Misconfigured { .. }) => assert!(!format!("{error:?}").contains("canary"), "{error:?}"),
        other => panic!("{other:?}"),
    }
    let log = String::from_utf8_lossy(&log.0.lock().expect("nobody panics with it")).into_owned();
    assert!(log.contains("TRACE") && log.contains("lapin"), "nothing was listened to: {log}");
    let leak = log.lines().find(|line| line.contains("canary"));
    assert!(leak.is_none(), "{leak:?}");
}
