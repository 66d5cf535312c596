//! Giving up a connection that is not there yet.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_rs::Tokio;
use async_rs::traits::Reactor;
use lapin::tcp::RustlsConnector;
use lapin::uri::AMQPUri;
use lapin::{AsyncTcpStream, Connection, ConnectionProperties};

use crate::guard::{self, Guarded};

/// Ends the client's attempt when it is dropped before it was [`done`](Self::done).
///
/// The client's thread owns the socket until the broker answers, and waits for that without end: a
/// load balancer that accepts and says nothing would cost a thread and a socket with each attempt.
#[derive(Default)]
struct Handshake(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    #[default]
    Connecting,
    /// A second handle to the connection's socket.
    Waiting(TcpStream),
    Over,
}

/// Connects, encrypted where there is something to do so with, and gives up after so long; `None`
/// then.
pub(crate) async fn connect(
    uri: AMQPUri,
    tls: Option<RustlsConnector>,
    properties: ConnectionProperties,
    patience: Duration,
) -> Option<lapin::Result<Connection>> {
    let handshake = Handshake::default();
    let state = Arc::clone(&handshake.0);
    let connecting = Connection::connector(
        uri,
        guard::runtime(),
        async move |uri, runtime| {
            // By hand, because the client's own way traces the password.
            let connecting = async {
                let host = uri.authority.host.clone();
                let stream = Tokio::current()
                    .tcp_connect(runtime.to_socket_addrs((host, uri.authority.port)))
                    .await?;
                let socket = duplicate(stream.get_ref())?;
                let stream = match &tls {
                    Some(connector) => {
                        Guarded::new(connector.connect_async(&uri.authority.host, stream).await?)
                    }
                    None => Guarded::new(stream),
                };
                io::Result::Ok((stream, socket))
            };
            let (stream, socket) = tokio::time::timeout(patience, connecting)
                .await
                .map_err(io::Error::from)??;
            let mut state = lock(&state);
            if let State::Over = *state {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            *state = State::Waiting(socket);
            drop(state);
            Ok(AsyncTcpStream::Plain(stream))
        },
        properties,
    );
    let connected = tokio::time::timeout(patience, connecting).await.ok();
    if let Some(Ok(_)) = connected {
        handshake.done();
    }
    connected
}

impl Handshake {
    fn done(&self) {
        *lock(&self.0) = State::Over;
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        if let State::Waiting(socket) = std::mem::replace(&mut *lock(&self.0), State::Over) {
            // The client reads the end of the stream, and its thread ends.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // Nothing panics while it is held.
    state.lock().unwrap_or_else(PoisonError::into_inner)
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
