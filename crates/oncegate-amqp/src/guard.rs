//! The connection as the client sees it: what comes in passes through [`Frames`] first.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_util::{AsyncRead, AsyncWrite, Stream};

use crate::frames::Frames;

/// The runtime that the client works on: tokio's, with guarded connections.
pub(crate) type GuardedRuntime = Runtime<RuntimeParts<Tokio, Guarding>>;

/// The runtime of the thread that asks.
pub(crate) fn runtime() -> GuardedRuntime {
    Runtime::new(RuntimeParts::new(
        Tokio::current(),
        Guarding(Tokio::current()),
    ))
}

/// Both directions of a connection.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

/// A connection whose incoming frames the client survives.
pub(crate) struct Guarded {
    stream: Box<dyn Duplex>,
    frames: Frames,
    buffer: Vec<u8>,
}

impl Guarded {
    pub(crate) fn new(stream: impl Duplex + 'static) -> Self {
        Self {
            stream: Box::new(stream),
            frames: Frames::default(),
            buffer: vec![0; 64 << 10],
        }
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if into.is_empty() {
            return Poll::Ready(Ok(0));
        }
        loop {
            let count = this.frames.hand_out(into);
            if count > 0 {
                return Poll::Ready(Ok(count));
            }
            match ready!(Pin::new(&mut this.stream).poll_read(context, &mut this.buffer))? {
                0 => {
                    this.frames.end();
                    return Poll::Ready(Ok(this.frames.hand_out(into)));
                }
                count => this.frames.take_in(&this.buffer[..count]),
            }
        }
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_close(context)
    }
}

/// Tokio's reactor, with guarded connections.
#[derive(Clone, Debug)]
pub(crate) struct Guarding(Tokio);

impl Reactor for Guarding {
    type TcpStream = Guarded;
    type Sleep = <Tokio as Reactor>::Sleep;

    /// Never asked for: connections are made by their address.
    fn register<H: io::Read + io::Write + Send + 'static>(
        &self,
        _: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<Guarded, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, time: Duration) -> Self::Sleep {
        self.0.sleep(time)
    }

    fn interval(&self, time: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(time)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Guarded>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async move { connecting.await.map(Guarded::new) }
    }
}
