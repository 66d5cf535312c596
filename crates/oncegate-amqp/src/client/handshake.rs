//! Connects with a timeout that covers the whole handshake.
//!
//! # Workaround
//! - *Symptom:* lapin's connection thread owns the socket and waits for the broker without a timeout,
//!   also when the connecting future is dropped. A load balancer that accepts and sends nothing leaks
//!   a thread and a socket with each attempt. *Version:* lapin 4.12.3.
//! - *Upstream:* `docs/upstream/lapin-handshake-thread.md`.
//! - *Test:* `recovery::a_broker_that_accepts_and_does_not_answer_leaks_no_threads` in `tests/amqp`.
//! - *May be removed* when lapin ends its thread when the connecting future is dropped.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use async_rs::Tokio;
use async_rs::traits::Reactor;
use lapin::tcp::RustlsConnector;
use lapin::uri::AMQPUri;
use lapin::{AsyncTcpStream, Connection, ConnectionProperties};

use crate::client::quiet_executor;
use crate::client::sanitized_stream::{self, SanitizedStream};
use crate::protocol::broker_version::{BrokerVersion, VersionCell};
use oncegate_core::internal::Lock;

/// When it is dropped, shuts down the socket of an unfinished handshake. Does nothing after
/// [`disarm`](Self::disarm).
#[derive(Default)]
struct HandshakeGuard(Arc<Lock<HandshakeState>>);

#[derive(Default)]
enum HandshakeState {
    #[default]
    /// There is no socket yet.
    Connecting,
    /// The socket is open, and the handshake runs. Contains a second handle to the socket.
    AwaitingBroker(TcpStream),
    /// The handshake has succeeded, or the guard was dropped: it failed, or its timeout is over.
    Finished,
}

/// Connects, with TLS if there is a connector; `None` after the timeout. Returns the version of the
/// broker, too, if that is RabbitMQ.
pub(crate) async fn connect(
    uri: AMQPUri,
    tls: Option<RustlsConnector>,
    properties: ConnectionProperties,
    timeout: Duration,
) -> Option<lapin::Result<(Connection, Option<BrokerVersion>)>> {
    let handshake = HandshakeGuard::default();
    let state = Arc::clone(&handshake.0);
    let version = VersionCell::default();
    let version_in_stream = Arc::clone(&version);
    let connecting = Connection::connector(
        uri,
        sanitized_stream::runtime(),
        async move |uri, runtime| {
            // lapin calls this on its connection thread.
            quiet_executor::drop_logs_of_this_thread();
            // lapin's `AMQPUriTcpExt` would not return the socket, to which the guard needs a second
            // handle.
            let connecting = async {
                let host = uri.authority.host.clone();
                let stream = Tokio::current()
                    .tcp_connect(runtime.to_socket_addrs((host, uri.authority.port)))
                    .await?;
                let socket = duplicate(stream.get_ref())?;
                let stream = match &tls {
                    Some(connector) => SanitizedStream::new(
                        connector.connect_async(&uri.authority.host, stream).await?,
                        Arc::clone(&version_in_stream),
                    ),
                    None => SanitizedStream::new(stream, Arc::clone(&version_in_stream)),
                };
                io::Result::Ok((stream, socket))
            };
            let (stream, socket) = tokio::time::timeout(timeout, connecting)
                .await
                .map_err(io::Error::from)??;
            let mut state = state.lock();
            if let HandshakeState::Finished = *state {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            *state = HandshakeState::AwaitingBroker(socket);
            drop(state);
            // With `Plain` lapin adds no TLS; the stream has it already if there is a connector.
            Ok(AsyncTcpStream::Plain(stream))
        },
        properties,
    );
    let connected = tokio::time::timeout(timeout, connecting).await.ok();
    if let Some(Ok(_)) = connected {
        handshake.disarm();
    }
    let version = version.get().copied().flatten();
    connected.map(|connected| connected.map(|connection| (connection, version)))
}

impl HandshakeGuard {
    /// Keeps the socket open, because the handshake has succeeded.
    fn disarm(&self) {
        *self.0.lock() = HandshakeState::Finished;
    }
}

impl Drop for HandshakeGuard {
    fn drop(&mut self) {
        if let HandshakeState::AwaitingBroker(socket) =
            std::mem::replace(&mut *self.0.lock(), HandshakeState::Finished)
        {
            // lapin's thread reads the end of the stream and ends.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(unix)]
fn duplicate(socket: &tokio::net::TcpStream) -> io::Result<TcpStream> {
    use std::os::fd::AsFd;
    Ok(socket.as_fd().try_clone_to_owned()?.into())
}

#[cfg(windows)]
fn duplicate(socket: &tokio::net::TcpStream) -> io::Result<TcpStream> {
    use std::os::windows::io::AsSocket;
    Ok(socket.as_socket().try_clone_to_owned()?.into())
}
