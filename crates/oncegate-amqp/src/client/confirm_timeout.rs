//! Limits the time for publisher confirms.
//!
//! # Workaround
//! - *Symptom:* a node may accept messages and never confirm or refuse them after the queue's leader
//!   moved. *Version:* RabbitMQ 3.10.8, quorum queues.
//! - *Upstream:* `docs/upstream/rabbitmq-missing-confirms.md`.
//! - *Test:* `a_dead_letter_that_is_never_confirmed_is_published_again` in `tests/faults`.
//! - *May be removed* when RabbitMQ confirms or nacks each message.

use std::time::Duration;

use lapin::Connection;

/// How long the confirms of a batch may take.
pub(crate) const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);

/// Waits for confirms; `None` after [`CONFIRM_TIMEOUT`]. If the connection is blocked then, the timeout
/// starts again.
pub(crate) async fn await_confirms<T>(
    connection: &Connection,
    confirms: impl Future<Output = T>,
) -> Option<T> {
    let mut confirms = std::pin::pin!(confirms);
    loop {
        match tokio::time::timeout(CONFIRM_TIMEOUT, &mut confirms).await {
            Ok(confirms) => return Some(confirms),
            Err(_) if connection.status().blocked() => {}
            Err(_) => return None,
        }
    }
}
