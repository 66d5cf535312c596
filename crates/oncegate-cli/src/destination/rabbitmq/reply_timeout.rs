//! The time limit of a request.
//!
//! # Workaround
//! - *Symptom:* when a connection ends, a request that was just sent may stay without a result.
//!   *Version:* lapin 4.12.3.
//! - *Upstream:* amqp-rs/lapin#409 (open), for `basic.publish`.
//! - *Test:* `a_request_without_a_reply_fails_at_the_time_limit`.
//! - *May be removed* when #409 is fixed for all requests.

use super::REQUEST_TIMEOUT;

/// The reply to a request, within [`REQUEST_TIMEOUT`].
///
/// # Errors
/// lapin's; or there was no reply in time.
pub(super) async fn within_limit<T>(
    request: impl Future<Output = lapin::Result<T>>,
) -> lapin::Result<T> {
    let limited = tokio::time::timeout(REQUEST_TIMEOUT, request).await;
    limited.unwrap_or_else(|_| {
        let text = format!("RabbitMQ did not reply within {REQUEST_TIMEOUT:?}");
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text).into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_without_a_reply_fails_at_the_time_limit() {
        let started = tokio::time::Instant::now();
        let error = within_limit(std::future::pending::<lapin::Result<()>>())
            .await
            .expect_err("there is no reply");
        assert!(started.elapsed() >= REQUEST_TIMEOUT);
        assert!(
            error.to_string().contains("did not reply within 15s"),
            "{error}"
        );
    }
}
