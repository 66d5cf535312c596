//! Bodies of requests and responses, read ahead up to a limit.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

/// A body whose beginning, or all of it, was read ahead: the body of a request that the inner
/// service receives, and that of a response.
///
/// It has the bytes, the trailers and the error of the body `B`, in frames of other sizes.
pub struct BufferedBody<B: Body> {
    /// What was read ahead and not returned yet.
    data: Bytes,
    rest: Rest<B>,
}

/// What follows the data that was read ahead.
enum Rest<B: Body> {
    Unread(Pin<Box<B>>),
    Failed(B::Error),
    Trailers(HeaderMap),
    Nothing,
}

/// A body after [`read`].
pub(crate) enum ReadBody<B: Body> {
    Complete(Bytes, Option<HeaderMap>),
    /// It has more bytes than the limit. Not all of it was read.
    TooLarge(BufferedBody<B>),
    /// It ended with an error, which it returns again.
    Failed(BufferedBody<B>),
}

/// Reads a body ahead, up to this number of bytes.
pub(crate) async fn read<B: Body<Data = Bytes>>(body: B, limit: usize) -> ReadBody<B> {
    let mut body = Box::pin(body);
    let mut data = Vec::new();
    let mut trailers = None;
    let rest = loop {
        let lower_bound = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if data.len().saturating_add(lower_bound) > limit {
            break Rest::Unread(body);
        }
        match std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            None => return ReadBody::Complete(data.into(), trailers),
            Some(Err(error)) => break Rest::Failed(error),
            Some(Ok(frame)) => match frame.into_data() {
                // Copied: a body of many small frames would otherwise need far more memory than
                // the limit.
                Ok(bytes) => data.extend_from_slice(&bytes),
                Err(frame) => trailers = frame.into_trailers().ok().or(trailers),
            },
        }
    };
    let is_failed = matches!(rest, Rest::Failed(_));
    let data = data.into();
    let body = BufferedBody { data, rest };
    if is_failed {
        ReadBody::Failed(body)
    } else {
        ReadBody::TooLarge(body)
    }
}

impl<B: Body> BufferedBody<B> {
    /// A body of which nothing was read.
    pub(crate) fn unread(body: B) -> Self {
        Self {
            data: Bytes::new(),
            rest: Rest::Unread(Box::pin(body)),
        }
    }

    /// A body that was read to its end.
    pub(crate) fn complete(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self {
            data,
            rest: trailers.map_or(Rest::Nothing, Rest::Trailers),
        }
    }
}

impl<B: Body<Data = Bytes>> Body for BufferedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if !self.data.is_empty() {
            let data = std::mem::take(&mut self.data);
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if let Rest::Unread(body) = &mut self.rest {
            let frame = ready!(body.as_mut().poll_frame(cx));
            return Poll::Ready(frame);
        }
        Poll::Ready(match std::mem::replace(&mut self.rest, Rest::Nothing) {
            Rest::Failed(error) => Some(Err(error)),
            Rest::Trailers(trailers) => Some(Ok(Frame::trailers(trailers))),
            Rest::Unread(_) | Rest::Nothing => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty()
            && match &self.rest {
                Rest::Unread(body) => body.is_end_stream(),
                Rest::Nothing => true,
                Rest::Failed(_) | Rest::Trailers(_) => false,
            }
    }

    fn size_hint(&self) -> SizeHint {
        let rest = match &self.rest {
            Rest::Unread(body) => body.size_hint(),
            Rest::Failed(_) => SizeHint::default(),
            Rest::Trailers(_) | Rest::Nothing => SizeHint::with_exact(0),
        };
        let read = self.data.len() as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(read.saturating_add(rest.lower()));
        if let Some(upper) = rest.upper() {
            hint.set_upper(read.saturating_add(upper));
        }
        hint
    }
}

// The body is boxed, and nothing else is pinned.
impl<B: Body> Unpin for BufferedBody<B> {}

impl<B: Body> fmt::Debug for BufferedBody<B> {
    /// Without the content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferedBody")
            .field("bytes_read", &self.data.len())
            .finish_non_exhaustive()
    }
}
