//! The TCP options of each connection.
//!
//! # Workaround
//! *Symptom:* without `TCP_NODELAY`, small pipelines wait for the delayed acknowledgement of the
//! previous one. *Version:* redis 1.8.1, where it is off by default. *Upstream:*
//! <https://github.com/redis-rs/redis-rs/issues/2195>, fixed in 2.0. *Test:* none, it changes only the
//! latency. *May be removed* with redis 2.0.

use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2};

/// `TCP_USER_TIMEOUT`: how long sent data may stay unacknowledged. The keepalive does not apply while
/// data is unacknowledged.
#[cfg(target_os = "linux")]
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// The idle time before the first TCP keepalive probe.
const KEEPALIVE: Duration = Duration::from_secs(15);

pub(crate) fn tcp_settings() -> TcpSettings {
    let tcp = TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(socket2::TcpKeepalive::new().with_time(KEEPALIVE));
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(USER_TIMEOUT);
    tcp
}
