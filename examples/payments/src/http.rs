//! The provider over HTTP: the server around the bank, and the client that the handler calls.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::post;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};

use crate::bank::{Bank, Card, ProviderError};
use crate::real::traces::{self, TRACEPARENT};

/// How long a client waits; longer than the server takes to say that it timed out.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize, Deserialize)]
struct CardRequest {
    number: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct ChargeRequest {
    card: String,
    amount: u64,
    id: String,
    attempt: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct FindRequest {
    id: String,
    attempt: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Found {
    happened: bool,
}

/// The server's routes.
pub(crate) fn router(bank: Arc<Bank>) -> Router {
    Router::new()
        .route("/cards", post(card))
        .route("/charges", post(charge))
        .route("/charges/find-or-void", post(find_or_void))
        .route("/health", axum::routing::get(|| async { "ok" }))
        .layer(axum::middleware::from_fn(traced))
        .with_state(bank)
}

/// Answers within the trace of who asks.
async fn traced(request: Request, next: Next) -> Response {
    let asker = request
        .headers()
        .get(TRACEPARENT)
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned);
    let path = request.uri().path().to_owned();
    traces::answered(&path, asker.as_deref(), next.run(request)).await
}

type Answer<T> = Result<Json<T>, (StatusCode, String)>;

async fn card(State(bank): State<Arc<Bank>>, Json(asked): Json<CardRequest>) -> Answer<()> {
    bank.card(&asked.number)
        .await
        .map(|_| Json(()))
        .map_err(refusal)
}

async fn charge(State(bank): State<Arc<Bank>>, Json(asked): Json<ChargeRequest>) -> Answer<()> {
    bank.charge(Card(asked.card), asked.amount, &asked.id, asked.attempt)
        .await
        .map(Json)
        .map_err(refusal)
}

async fn find_or_void(
    State(bank): State<Arc<Bank>>,
    Json(asked): Json<FindRequest>,
) -> Answer<Found> {
    let found = bank
        .find_or_void(&asked.id, asked.attempt)
        .await
        .map_err(refusal)?;
    Ok(Json(Found {
        happened: found.is_some(),
    }))
}

fn refusal(error: ProviderError) -> (StatusCode, String) {
    let status = match error {
        ProviderError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        ProviderError::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        ProviderError::Refused(_) => StatusCode::CONFLICT,
    };
    (status, error.to_string())
}

/// Calls the provider.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    http: reqwest::Client,
    url: String,
}

impl Client {
    /// A client of the provider at this URL, such as `http://localhost:8080`.
    ///
    /// # Errors
    /// If no HTTP client can be made.
    pub(crate) fn at(url: &str) -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder().timeout(PATIENCE).build()?;
        Ok(Self {
            http,
            url: url.trim_end_matches('/').to_owned(),
        })
    }

    pub(crate) async fn card(&self, number: &str) -> Result<Card, ProviderError> {
        self.ask(
            "cards",
            &CardRequest {
                number: number.to_owned(),
            },
        )
        .await?;
        Ok(Card(number.to_owned()))
    }

    pub(crate) async fn charge(
        &self,
        card: Card,
        amount: u64,
        id: &str,
        attempt: u32,
    ) -> Result<(), ProviderError> {
        self.ask(
            "charges",
            &ChargeRequest {
                card: card.0,
                amount,
                id: id.to_owned(),
                attempt,
            },
        )
        .await
        .map(drop)
    }

    pub(crate) async fn find_or_void(
        &self,
        id: &str,
        attempt: u32,
    ) -> Result<Option<()>, ProviderError> {
        let answer = self
            .ask(
                "charges/find-or-void",
                &FindRequest {
                    id: id.to_owned(),
                    attempt,
                },
            )
            .await?;
        let found: Found = answer
            .json()
            .await
            .map_err(|error| ProviderError::Unavailable(error.to_string()))?;
        Ok(found.happened.then_some(()))
    }

    async fn ask(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<reqwest::Response, ProviderError> {
        let sent = traces::asked(path, |header| {
            let post = self.http.post(format!("{}/{path}", self.url)).json(request);
            header
                .into_iter()
                .fold(post, |post, header| post.header(TRACEPARENT, header))
                .send()
        });
        let answer = sent.await.map_err(|error| match error.is_timeout() {
            true => ProviderError::TimedOut,
            false => ProviderError::Unavailable(error.to_string()),
        })?;
        match answer.status() {
            status if status.is_success() => Ok(answer),
            StatusCode::GATEWAY_TIMEOUT => Err(ProviderError::TimedOut),
            StatusCode::CONFLICT => Err(ProviderError::Refused(
                answer.text().await.unwrap_or_default(),
            )),
            status => Err(ProviderError::Unavailable(status.to_string())),
        }
    }
}
