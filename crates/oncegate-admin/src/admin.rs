//! The admin port: its builder, its HTTP server and its routes.

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

use crate::connections::serve_connections;
use crate::last_errors::LastErrors;
use crate::scrape::Metrics;
use crate::status::{StatusPage, WatchedConsumer, WatchedSource, log_lines};

/// The default port, on 127.0.0.1.
pub const PORT: u16 = 9623;

/// The interval of [`Metrics::run_upkeep`], which limits the memory of recorded samples.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Configures the admin port. Nothing listens before [`Admin::serve`].
#[derive(Clone, Debug, Default)]
#[must_use = "nothing listens before `serve`"]
pub struct Admin {
    address: Option<SocketAddr>,
    state: AdminState,
}

#[derive(Clone, Debug, Default)]
struct AdminState {
    consumers: Vec<WatchedConsumer>,
    sources: Vec<WatchedSource>,
    errors: LastErrors,
    metrics: Option<Metrics>,
}

/// A running admin port. Dropping it closes the port.
#[derive(Debug)]
#[must_use = "dropping it closes the port"]
pub struct AdminServer {
    address: SocketAddr,
    shutdown: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The admin port could not be opened.
#[derive(Debug, thiserror::Error)]
#[error(
    "the admin port {address} cannot be opened: {source}; if it is in use, choose another address"
)]
pub struct ServeError {
    address: SocketAddr,
    source: std::io::Error,
}

impl Admin {
    /// An admin port without consumers, on 127.0.0.1 and [`PORT`]. Without a consumer, `/ready`
    /// returns 503.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the address. With port 0 the system chooses one, which [`AdminServer::address`]
    /// returns.
    ///
    /// There is no authentication, and the pages contain message ids: everyone who can reach the
    /// address can read them.
    pub fn listen(mut self, address: impl Into<SocketAddr>) -> Self {
        self.address = Some(address.into());
        self
    }

    /// Adds a consumer. Pass clones of the same readiness and status to the builder of the
    /// consumer. `/ready` requires all consumers to be ready.
    pub fn consumer(
        mut self,
        name: impl Into<String>,
        readiness: Readiness,
        status: ConsumerStatus,
    ) -> Self {
        self.state.consumers.push(WatchedConsumer {
            name: name.into(),
            readiness,
            status,
        });
        self
    }

    /// Adds a Kafka source: its partitions, their offsets, and the offset that blocks the commit of
    /// each.
    #[cfg(feature = "kafka")]
    pub fn kafka(mut self, name: impl Into<String>, status: oncegate::KafkaStatus) -> Self {
        self.state
            .sources
            .push(WatchedSource::Kafka(name.into(), status));
        self
    }

    /// Adds a RabbitMQ source: its unacknowledged deliveries and its connections.
    #[cfg(feature = "rabbitmq")]
    pub fn rabbitmq(mut self, name: impl Into<String>, status: oncegate::RabbitMqStatus) -> Self {
        self.state
            .sources
            .push(WatchedSource::RabbitMq(name.into(), status));
        self
    }

    /// Adds the last warnings and errors to `/status`.
    pub fn last_errors(mut self, errors: LastErrors) -> Self {
        self.state.errors = errors;
        self
    }

    /// Serves `/metrics`, which otherwise returns 404.
    pub fn metrics(mut self, metrics: Metrics) -> Self {
        self.state.metrics = Some(metrics);
        self
    }

    /// Opens the port and serves it on its own thread, so that it responds even while handlers
    /// block all other threads.
    ///
    /// # Errors
    /// The address cannot be bound, for example because the port is in use, or no thread can be
    /// started.
    pub fn serve(self) -> Result<AdminServer, ServeError> {
        let address = self
            .address
            .unwrap_or_else(|| (Ipv4Addr::LOCALHOST, PORT).into());
        self.open(address)
            .map_err(|source| ServeError { address, source })
    }

    fn open(self, address: SocketAddr) -> std::io::Result<AdminServer> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (shutdown, shutdown_requested) = oneshot::channel();
        let metrics = self.state.metrics.clone();
        let listener = {
            let _guard = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let router = router(self.state);
        let serve = async move {
            tokio::select! {
                () = serve_connections(listener, router) => {}
                () = run_upkeep(metrics) => {}
                _ = shutdown_requested => {} // the server was dropped
            }
        };
        let thread = std::thread::Builder::new()
            .name("oncegate-admin".to_owned())
            .spawn(move || runtime.block_on(serve))?;
        Ok(AdminServer {
            address,
            shutdown: Some(shutdown),
            thread: Some(thread),
        })
    }
}

async fn run_upkeep(metrics: Option<Metrics>) {
    let Some(metrics) = metrics else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval(UPKEEP_INTERVAL);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
    }
}

impl AdminServer {
    /// The address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        drop(self.shutdown.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // fails only after a panic, which the panic hook has reported
        }
    }
}

fn router(state: AdminState) -> Router {
    let mut router = Router::new()
        .route("/", get(index))
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/status", get(status));
    if state.metrics.is_some() {
        router = router.route("/metrics", get(metrics));
    }
    router.with_state(Arc::new(state))
}

impl AdminState {
    fn is_ready(&self) -> bool {
        !self.consumers.is_empty()
            && self
                .consumers
                .iter()
                .all(|consumer| consumer.readiness.is_ready())
    }
}

/// The index page.
async fn index(State(state): State<Arc<AdminState>>) -> String {
    let metrics = if state.metrics.is_some() {
        "all metrics of the process in the Prometheus text format"
    } else {
        "not available: the admin port was started without metrics"
    };
    format!(
        "oncegate admin port\n\n\
         /live     200 while the process responds\n\
         /ready    200 once every consumer has connected, while its store answers and it does not drain, 503 otherwise\n\
         /status   consumers, sources and the last warnings and errors as JSON\n\
         /metrics  {metrics}\n"
    )
}

async fn live() -> &'static str {
    "live\n"
}

async fn ready(State(state): State<Arc<AdminState>>) -> impl IntoResponse {
    if state.is_ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
    }
}

async fn status(State(state): State<Arc<AdminState>>) -> impl IntoResponse {
    let page = StatusPage {
        ready: state.is_ready(),
        consumers: state.consumers.iter().map(WatchedConsumer::view).collect(),
        sources: state.sources.iter().map(WatchedSource::view).collect(),
        last_errors: log_lines(&state.errors),
    };
    ([(header::CACHE_CONTROL, "no-store")], Json(page))
}

async fn metrics(State(state): State<Arc<AdminState>>) -> impl IntoResponse {
    let text = state
        .metrics
        .as_ref()
        .map(Metrics::text)
        .unwrap_or_default(); // there are metrics, as `/metrics` is routed
    (
        [(
            header::CONTENT_TYPE,
            "text/plain; version=0.0.4; charset=utf-8",
        )],
        text,
    )
}
