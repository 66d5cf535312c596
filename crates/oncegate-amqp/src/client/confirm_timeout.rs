//! Limits the time for publisher confirms.
//!
//! # Workaround
//! - *Symptom:* a node may accept messages and never confirm or refuse them after the queue's leader
//!   moved. *Version:* RabbitMQ 3.10.8, quorum queues.
//! - *Upstream:* `docs/upstream/rabbitmq-missing-confirms.md`.
//! - *Test:* `a_dead_letter_that_is_never_confirmed_is_published_again` in `tests/faults`.
//! - *May be removed* when RabbitMQ confirms or nacks each message.

use std::time::Duration;

/// A channel with unconfirmed copies counts as failed if no confirm arrives for this long.
pub(crate) const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);
