//! The service: one request with a key, from the key to the answer.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap};
use http::{Request, Response};
use http_body::Body;
use oncegate_core::internal::Lock;
use oncegate_core::{
    Failure, GateError, Guarantee, MessageId, MissingResult, Stored, UnstorableResult,
};
use tower_service::Service;
use tracing::Instrument;

use crate::body::{BufferedBody, ReadBody, read};
use crate::key;
use crate::layer::{GRPC_STATUS, LayerSettings, MissingKey};
use crate::outcome::ResponseOutcome;
use crate::problem::ProblemType;
use crate::stored_response::StoredResponse;

/// The service of an [`IdempotencyLayer`](crate::IdempotencyLayer).
///
/// It returns an error only if the inner service does: then it is unknown whether the request had
/// its effect, as after [`ResponseOutcome::MayHaveHappened`].
#[derive(Clone)]
pub struct IdempotencyService<S> {
    inner: S,
    settings: Arc<LayerSettings>,
}

impl<S> IdempotencyService<S> {
    pub(crate) fn new(inner: S, settings: Arc<LayerSettings>) -> Self {
        Self { inner, settings }
    }
}

impl<S: fmt::Debug> fmt::Debug for IdempotencyService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

/// The result of a service with responses of the body `R`.
type ServiceAnswer<R, E> = Result<Response<BufferedBody<R>>, E>;

impl<S, B, R> Service<Request<B>> for IdempotencyService<S>
where
    S: Service<Request<BufferedBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    type Response = Response<BufferedBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = ServiceAnswer<R, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The clone is not ready: the service that was polled is called.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);
        Box::pin(answer(inner, self.settings.clone(), request))
    }
}

/// Answers a request with a service that is ready.
async fn answer<S, B, R>(
    mut inner: S,
    settings: Arc<LayerSettings>,
    request: Request<B>,
) -> ServiceAnswer<R, S::Error>
where
    S: Service<Request<BufferedBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let is_counted = settings.methods.contains(request.method());
    let key = if is_counted {
        key::read(request.headers(), settings.max_key_bytes)
    } else {
        Ok(None)
    };
    let key = match key {
        Ok(Some(key)) => key,
        Ok(None) if is_counted && settings.missing_key == MissingKey::Refuse => {
            return Ok(ProblemType::MissingKey.answer(request.headers()));
        }
        Ok(None) => {
            let response = inner.call(request.map(BufferedBody::unread)).await?;
            return Ok(response.map(BufferedBody::unread));
        }
        Err(why) => {
            let detail = format!(
                "The key cannot be used: {why}. Send one key of visible ASCII characters, such as a UUID."
            );
            let headers = request.headers();
            return Ok(ProblemType::MalformedKey.answer_with(headers, Some(&detail), None));
        }
    };
    let (parts, body) = request.into_parts();
    let scope = match &settings.scope {
        Some(scope) => match scope(&parts).filter(|scope| !scope.is_empty()) {
            None => return Ok(ProblemType::MissingScope.answer(&parts.headers)),
            scope => scope,
        },
        None => None,
    };
    let Ok(permit) = Arc::clone(&settings.in_progress).try_acquire_owned() else {
        return Ok(ProblemType::TooManyRequests.answer(&parts.headers));
    };
    let (data, trailers) = match read(body, settings.max_request_bytes).await {
        ReadBody::Complete(data, trailers) => (data, trailers),
        ReadBody::TooLarge(_) => {
            let detail = format!(
                "The body has more than {} bytes. Send a smaller one.",
                settings.max_request_bytes
            );
            return Ok(ProblemType::RequestTooLarge.answer_with(
                &parts.headers,
                Some(&detail),
                None,
            ));
        }
        ReadBody::Failed(_) => return Ok(ProblemType::UnreadableBody.answer(&parts.headers)),
    };
    let run = KeyedRun {
        id: key::id(scope.as_deref(), key),
        fingerprint: key::fingerprint(&parts, &data),
        content_type: content_type(&parts.headers),
        settings,
    };
    let headers = run.content_type.clone();
    let request = Request::from_parts(parts, BufferedBody::complete(data, trailers));
    // A task of its own, because a client that disconnects drops this future.
    let answer = async move {
        let _permit = permit;
        run.answer(inner, request).await
    };
    match tokio::spawn(answer.in_current_span()).await {
        Ok(answer) => answer,
        // The runtime stops: the gate catches the panics of the service.
        Err(_) => Ok(ProblemType::OutcomeUnknown.answer(&headers)),
    }
}

/// The header that decides the form of a problem.
fn content_type(headers: &HeaderMap) -> HeaderMap {
    let content_type = headers.get(CONTENT_TYPE).cloned();
    content_type
        .map(|value| (CONTENT_TYPE, value))
        .into_iter()
        .collect::<HeaderMap<_>>()
}

/// The run of a request with a key.
struct KeyedRun {
    id: Vec<u8>,
    fingerprint: [u8; 32],
    /// The header `content-type` of the request alone.
    content_type: HeaderMap,
    settings: Arc<LayerSettings>,
}

impl KeyedRun {
    async fn answer<S, B, R>(
        self,
        inner: S,
        request: Request<BufferedBody<B>>,
    ) -> ServiceAnswer<R, S::Error>
    where
        S: Service<Request<BufferedBody<B>>, Response = Response<R>> + Send,
        S::Future: Send,
        S::Error: Send,
        B: Body<Data = Bytes> + Send,
        B::Error: Send,
        R: Body<Data = Bytes> + Send,
        R::Error: Send,
    {
        let mut first_run = Some((inner, request));
        // Of the first run: the answer for its caller, and what the gate stores.
        let (own_answer, own_result) = (Lock::new(None), Lock::new(None));
        let work = || {
            let first_run = first_run.take();
            let (own_answer, own_result) = (&own_answer, &own_result);
            let settings = &self.settings;
            async move {
                let Some((mut inner, request)) = first_run else {
                    // The store lost the claim before the outcome was recorded, and granted another.
                    let stored: Option<Option<StoredResponse>> = own_result.lock().clone();
                    return stored.ok_or_else(may_have_happened);
                };
                let (answer, result) = match inner.call(request).await {
                    Ok(response) => {
                        let (response, outcome, stored) = settings.recorded(response).await;
                        let result = match outcome {
                            ResponseOutcome::Store => Ok(stored),
                            ResponseOutcome::NothingHappened => Err(Failure::Retry(
                                "the response says that nothing happened".into(),
                            )),
                            ResponseOutcome::MayHaveHappened => Err(may_have_happened()),
                        };
                        (Ok(response), result)
                    }
                    Err(error) => (Err(error), Err(may_have_happened())),
                };
                *own_answer.lock() = Some(answer);
                if let Ok(stored) = &result {
                    *own_result.lock() = Some(stored.clone());
                }
                result
            }
        };
        let outcome = self
            .settings
            .gate
            .request(&self.id)
            .body(self.fingerprint)
            .max_inline_retries(0) // the request was consumed
            .unstorable_result(UnstorableResult::CompleteWithout)
            .run_stored(work)
            .await;
        let own_answer = own_answer.lock().take();
        self.answer_to(outcome, own_answer)
    }

    /// The answer after the run: of the service, of an earlier run, or of the layer.
    fn answer_to<R: Body<Data = Bytes>, E>(
        &self,
        outcome: Result<Stored<Option<StoredResponse>>, GateError>,
        own_answer: Option<ServiceAnswer<R, E>>,
    ) -> ServiceAnswer<R, E> {
        let is_unknown = matches!(
            (&outcome, &own_answer),
            (Err(GateError::InDoubt(_)), _) | (Err(GateError::NotRecorded), None)
        );
        let is_in_doubt = is_unknown && self.settings.gate.guarantee() == Guarantee::AtMostOnce;
        if let Err(error) = &outcome
            && is_in_doubt
        {
            self.log(|id, suppressed_lines| tracing::error!(id, %error, suppressed_lines, "request in doubt, repeats with its key are refused; find out whether it had its effect, and resolve the id"));
        }
        let problem = match (outcome, own_answer) {
            (_, Some(Err(error))) => return Err(error),
            (Ok(Stored::Replayed(Some(stored))), _) => {
                return Ok(stored
                    .replay()
                    .unwrap_or_else(|| self.problem(ProblemType::ResponseNotStored)));
            }
            (Ok(Stored::Missing(MissingResult::Undecodable(error))), _) => {
                self.log(|id, suppressed_lines| tracing::error!(id, %error, suppressed_lines, "stored response unreadable, repeats get 409; check the result codec, and whether another release wrote it"));
                ProblemType::ResponseNotStored
            }
            (Ok(Stored::Replayed(None) | Stored::Missing(_)), _) => ProblemType::ResponseNotStored,
            // Also if this run lost its claim: a repeat gets the response that is recorded.
            (Ok(Stored::HeldElsewhere) | Err(GateError::HeldElsewhere), _) => {
                ProblemType::InProgress
            }
            (outcome, Some(Ok(response))) => {
                if let Err(error @ (GateError::NotRecorded | GateError::Store(_))) = outcome {
                    self.log(|id, suppressed_lines| tracing::warn!(id, %error, suppressed_lines, "outcome of a request not recorded, its response is sent; when the lease ends, the outcome counts as unknown"));
                }
                return Ok(response);
            }
            (Err(GateError::OtherBody | GateError::Refused(_)), None) => ProblemType::OtherRequest,
            (Err(GateError::Store(error)), None) => {
                self.log(|id, suppressed_lines| tracing::error!(id, %error, suppressed_lines, "request refused with 503, its key cannot be claimed or its response cannot be read; check the store of the gate"));
                ProblemType::StoreUnavailable
            }
            (Err(_), None) if is_in_doubt => ProblemType::InDoubt,
            // A panic, a timeout or a lost lease: all other outcomes have a response.
            (Err(error), None) => {
                self.log(|id, suppressed_lines| tracing::warn!(id, %error, suppressed_lines, "outcome of a request unknown, a repeat with its key is processed again"));
                ProblemType::OutcomeUnknown
            }
            (Ok(Stored::Executed(_)), None) => ProblemType::OutcomeUnknown, // does not occur
        };
        Ok(self.problem(problem))
    }

    fn problem<R: Body>(&self, problem: ProblemType) -> Response<BufferedBody<R>> {
        let id = MessageId::new(&self.id).filter(|_| problem == ProblemType::InDoubt);
        problem.answer_with(&self.content_type, None, id.as_ref().map(MessageId::as_str))
    }

    fn log(&self, line: impl FnOnce(&str, u64)) {
        let due = self.settings.log.lock().due(Instant::now());
        if let (Some(suppressed_lines), Some(id)) = (due, MessageId::new(&self.id)) {
            line(id.as_str(), suppressed_lines);
        }
    }
}

fn is_event_stream(content_type: &[u8]) -> bool {
    const EVENT_STREAM: &[u8] = b"text/event-stream";
    let start = content_type.get(..EVENT_STREAM.len());
    start.is_some_and(|start| start.eq_ignore_ascii_case(EVENT_STREAM))
}

fn may_have_happened() -> Failure {
    Failure::InDoubt("the response does not say whether the request had its effect".into())
}

impl LayerSettings {
    /// Reads a response as far as it is stored. Returns the response for the caller, what it says
    /// about the effect, and what is stored.
    async fn recorded<R: Body<Data = Bytes>>(
        &self,
        response: Response<R>,
    ) -> (
        Response<BufferedBody<R>>,
        ResponseOutcome,
        Option<StoredResponse>,
    ) {
        let (parts, body) = response.into_parts();
        let outcome = self.outcome(&parts);
        let is_stream = parts
            .headers
            .get(CONTENT_TYPE)
            .is_some_and(|it| is_event_stream(it.as_bytes()));
        if is_stream || !matches!(outcome, None | Some(ResponseOutcome::Store)) {
            let response = Response::from_parts(parts, BufferedBody::unread(body));
            return (response, outcome.unwrap_or(ResponseOutcome::Store), None);
        }
        let (body, outcome, stored) = match read(body, self.gate.max_result_bytes()).await {
            ReadBody::Complete(data, trailers) => {
                let grpc_status = trailers.as_ref().and_then(|it| it.get(GRPC_STATUS));
                let outcome = outcome
                    .unwrap_or_else(|| ResponseOutcome::by_status(parts.status, grpc_status));
                let stored = StoredResponse::new(&parts, &data, trailers.as_ref());
                (
                    BufferedBody::complete(data, trailers),
                    outcome,
                    Some(stored),
                )
            }
            ReadBody::TooLarge(body) => (body, ResponseOutcome::Store, None),
            ReadBody::Failed(body) => (body, ResponseOutcome::MayHaveHappened, None),
        };
        (Response::from_parts(parts, body), outcome, stored)
    }
}
