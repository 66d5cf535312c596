//! A byte stream for the AMQP client (lapin) in which a [`FrameSanitizer`] rewrites the frames that
//! lapin cannot parse or must not log, and a runtime with this type of stream.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_util::{AsyncRead, AsyncWrite, Stream};

use crate::client::frame_sanitizer::FrameSanitizer;
use crate::client::quiet_executor::QuietExecutor;
use crate::protocol::broker_version::VersionCell;

/// The runtime for lapin: tokio's, with [`SanitizedStream`] as its type of TCP streams.
pub(crate) type SanitizedRuntime = Runtime<RuntimeParts<QuietExecutor, SanitizingReactor>>;

/// A [`SanitizedRuntime`] on the current tokio runtime.
pub(crate) fn runtime() -> SanitizedRuntime {
    Runtime::new(RuntimeParts::new(
        QuietExecutor::current(),
        SanitizingReactor(Tokio::current()),
    ))
}

/// A byte stream that can be read and written: TCP without or with TLS.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

/// Maximum number of bytes per read from the socket.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// A byte stream whose incoming frames are rewritten. Outgoing bytes are unchanged.
pub(crate) struct SanitizedStream {
    stream: Box<dyn Duplex>,
    sanitizer: FrameSanitizer,
    /// The buffer for reads from `stream`.
    buffer: Vec<u8>,
}

impl SanitizedStream {
    pub(crate) fn new(stream: impl Duplex + 'static, version: VersionCell) -> Self {
        Self {
            stream: Box::new(stream),
            sanitizer: FrameSanitizer::with_version(version),
            buffer: vec![0; READ_BUFFER_BYTES],
        }
    }
}

impl AsyncRead for SanitizedStream {
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
            let count = this.sanitizer.read(into);
            if count > 0 {
                return Poll::Ready(Ok(count));
            }
            match ready!(Pin::new(&mut this.stream).poll_read(context, &mut this.buffer))? {
                0 => {
                    this.sanitizer.finish();
                    return Poll::Ready(Ok(this.sanitizer.read(into)));
                }
                count => this.sanitizer.push(&this.buffer[..count]),
            }
        }
    }
}

impl AsyncWrite for SanitizedStream {
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

/// Tokio's reactor, whose TCP connections are [`SanitizedStream`]s.
#[derive(Clone, Debug)]
pub(crate) struct SanitizingReactor(Tokio);

impl Reactor for SanitizingReactor {
    type TcpStream = SanitizedStream;
    type Sleep = <Tokio as Reactor>::Sleep;

    /// Unsupported: lapin does not register sockets of its own.
    fn register<H: io::Read + io::Write + Send + 'static>(
        &self,
        _: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<SanitizedStream, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, time: Duration) -> Self::Sleep {
        self.0.sleep(time)
    }

    fn interval(&self, time: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(time)
    }

    /// Required by the trait: `handshake` connects by itself.
    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<SanitizedStream>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async move {
            let stream = connecting.await?;
            Ok(SanitizedStream::new(stream, VersionCell::default()))
        }
    }
}
