//! The admin port.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use oncegate::{ConsumerStatus, Readiness};
use tokio::sync::oneshot;

use crate::last_errors::LastErrors;
use crate::scrape::Metrics;
use crate::status::{Page, Reads, Watched, said};

/// Where it listens unless told otherwise: this port of 127.0.0.1.
pub const PORT: u16 = 9623;

/// How often what was measured moves into its histograms.
const TIDIES_EVERY: Duration = Duration::from_secs(5);

/// What the admin port shows, and where. Nothing listens before [`Admin::serve`].
#[derive(Clone, Debug, Default)]
#[must_use = "nothing listens before `serve`"]
pub struct Admin {
    address: Option<SocketAddr>,
    shown: Shown,
}

#[derive(Clone, Debug, Default)]
struct Shown {
    consumers: Vec<Watched>,
    sources: Vec<Reads>,
    errors: LastErrors,
    metrics: Option<Metrics>,
}

/// The admin port, open. Dropping this closes it.
#[derive(Debug)]
#[must_use = "dropping it closes the port"]
pub struct Serving {
    address: SocketAddr,
    closes: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Why the admin port could not be opened.
#[derive(Debug, thiserror::Error)]
#[error(
    "the admin port {address} cannot be opened: {source}; choose another with `.listen(address)`"
)]
pub struct ServeError {
    address: SocketAddr,
    source: std::io::Error,
}

impl Admin {
    /// Of no consumer, on 127.0.0.1 and [`PORT`]. Without a consumer it is never ready.
    pub fn new() -> Self {
        Self::default()
    }

    /// Where to listen; with port 0 the system chooses, and [`Serving::address`] says which.
    ///
    /// There is no login, and the page shows ids: whoever can reach the address can read them.
    pub fn listen(mut self, address: impl Into<SocketAddr>) -> Self {
        self.address = Some(address.into());
        self
    }

    /// Shows one more consumer. Give the same two values to the consumer itself. Of several, all
    /// must be ready.
    pub fn consumer(
        mut self,
        name: impl Into<String>,
        readiness: Readiness,
        status: ConsumerStatus,
    ) -> Self {
        self.shown.consumers.push(Watched {
            name: name.into(),
            readiness,
            status,
        });
        self
    }

    /// Shows one more Kafka source: its partitions, how far each is, and what holds it up.
    #[cfg(feature = "kafka")]
    pub fn kafka(mut self, name: impl Into<String>, status: oncegate::KafkaStatus) -> Self {
        self.shown.sources.push(Reads::Kafka(name.into(), status));
        self
    }

    /// Shows one more RabbitMQ source: what it holds, and what its connections do.
    #[cfg(feature = "rabbitmq")]
    pub fn rabbitmq(mut self, name: impl Into<String>, status: oncegate::RabbitMqStatus) -> Self {
        self.shown
            .sources
            .push(Reads::RabbitMq(name.into(), status));
        self
    }

    /// Shows the last warnings.
    pub fn last_errors(mut self, errors: LastErrors) -> Self {
        self.shown.errors = errors;
        self
    }

    /// Answers `/metrics`, which is not there otherwise.
    pub fn metrics(mut self, metrics: Metrics) -> Self {
        self.shown.metrics = Some(metrics);
        self
    }

    /// Opens the port and answers on a thread of its own, so that it answers also while handlers
    /// block all others.
    ///
    /// # Errors
    /// If the port is taken, or there is no thread to be had.
    pub fn serve(self) -> Result<Serving, ServeError> {
        let address = self
            .address
            .unwrap_or_else(|| (Ipv4Addr::LOCALHOST, PORT).into());
        self.open(address)
            .map_err(|source| ServeError { address, source })
    }

    fn open(self, address: SocketAddr) -> std::io::Result<Serving> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (closes, closed) = oneshot::channel();
        let metrics = self.shown.metrics.clone();
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let router = router(self.shown);
        let serve = async move {
            tokio::select! {
                ended = axum::serve(listener, router) => tracing::error!(?ended, "the admin port has ended"),
                () = tidy(metrics) => {}
                _ = closed => {} // told to close, or dropped
            }
        };
        let thread = std::thread::Builder::new()
            .name("oncegate-admin".to_owned())
            .spawn(move || runtime.block_on(serve))?;
        Ok(Serving {
            address,
            closes: Some(closes),
            thread: Some(thread),
        })
    }
}

async fn tidy(metrics: Option<Metrics>) {
    let Some(metrics) = metrics else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval(TIDIES_EVERY);
    loop {
        ticks.tick().await;
        metrics.tidy();
    }
}

impl Serving {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.closes.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it says nothing; a panic inside it was told when it happened
        }
    }
}

fn router(shown: Shown) -> Router {
    let mut router = Router::new()
        .route("/", get(start))
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/status", get(status));
    if shown.metrics.is_some() {
        router = router.route("/metrics", get(metrics));
    }
    router.with_state(Arc::new(shown))
}

impl Shown {
    fn is_ready(&self) -> bool {
        !self.consumers.is_empty() && self.consumers.iter().all(|it| it.readiness.is_ready())
    }
}

/// The start page: what there is to ask.
async fn start(State(shown): State<Arc<Shown>>) -> String {
    let metrics = if shown.metrics.is_some() {
        "all metrics of the process, as Prometheus reads them"
    } else {
        "not there: no metrics were installed"
    };
    format!(
        "oncegate admin port\n\n\
         /live     200 while the process answers\n\
         /ready    200 while every consumer takes messages, 503 otherwise\n\
         /status   what each consumer and source holds and waits for, and the last warnings, as JSON\n\
         /metrics  {metrics}\n"
    )
}

async fn live() -> &'static str {
    "live\n"
}

async fn ready(State(shown): State<Arc<Shown>>) -> impl IntoResponse {
    if shown.is_ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "takes no messages\n")
    }
}

async fn status(State(shown): State<Arc<Shown>>) -> impl IntoResponse {
    let page = Page {
        ready: shown.is_ready(),
        consumers: shown.consumers.iter().map(Watched::now).collect(),
        sources: shown.sources.iter().map(Reads::now).collect(),
        last_errors: said(&shown.errors),
    };
    ([(header::CACHE_CONTROL, "no-store")], Json(page))
}

async fn metrics(State(shown): State<Arc<Shown>>) -> impl IntoResponse {
    let text = shown
        .metrics
        .as_ref()
        .map(Metrics::text)
        .unwrap_or_default(); // without metrics it has no route
    (
        [(
            header::CONTENT_TYPE,
            "text/plain; version=0.0.4; charset=utf-8",
        )],
        text,
    )
}
