//! Serves the connections of the admin port, with limits for their number and their duration.

use std::collections::VecDeque;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

/// The maximum number of open connections. At the limit a new one closes the oldest, so that
/// clients that send no complete request cannot block a probe of `/live`.
const MAX_CONNECTIONS: usize = 64;

/// How long the headers of a request may take.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may last, including its request and its response.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// The pause after a connection cannot be accepted, usually for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves one request on each connection. Does not return.
pub(crate) async fn serve_connections(listener: TcpListener, router: Router) {
    let (mut open, mut is_failing) = (VecDeque::<AbortHandle>::new(), false);
    loop {
        let accepted = listener.accept().await;
        open.retain(|connection| !connection.is_finished());
        if (open.len() >= MAX_CONNECTIONS || accepted.is_err())
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        match accepted {
            Ok((stream, _)) => {
                let connection = tokio::spawn(serve_connection(stream, router.clone()));
                open.push_back(connection.abort_handle());
                is_failing = false;
                // Lets the new connection be served before later connections may close it.
                tokio::task::yield_now().await;
            }
            Err(error) => {
                if !is_failing {
                    tracing::warn!(%error, "admin port cannot accept a connection, trying again; raise the limit of file descriptors if it is reached");
                }
                is_failing = true;
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, router: Router) {
    let connection = http1::Builder::new()
        .keep_alive(false)
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "admin port connection failed"),
        Err(_) => tracing::debug!("admin port connection timed out"),
    }
}
