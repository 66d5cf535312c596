//! Redriven messages run exactly once, with an attempt above every earlier one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use oncegate::{Context, Failure, FailureExt, Guarantee, Handler, Reconciled, async_trait};
use serde_json::Value;

use crate::destinations::on_both_brokers;
use crate::fixture::{Broker, BrokerFixture, PATIENCE};

on_both_brokers!(
    dead_letters_of_unknown_outcomes_are_redriven_effectively_once,
    dead_letters_of_unknown_outcomes_are_redriven_at_most_once,
    messages_that_did_not_happen_are_handled_effectively_once,
    messages_that_did_not_happen_are_handled_at_most_once,
);

const MESSAGES: usize = 1_000;

/// Copies of each message in doubt.
const COPIES: usize = 11;

/// A provider that does not reply until it recovers, and books what it receives.
#[derive(Clone, Default)]
struct RecoveringProvider(Arc<BookedCharges>);

#[derive(Default)]
struct BookedCharges {
    healed: AtomicBool,
    /// Whether it can be asked for the outcome.
    tells: AtomicBool,
    charges: Mutex<HashMap<String, Account>>,
}

/// The bookings of one id.
#[derive(Clone, Debug, Default)]
struct Account {
    /// The booked attempts.
    booked: Vec<u32>,
    /// The highest attempt without a reply.
    unanswered: u32,
    /// Attempts up to this one are rejected.
    voided: u32,
}

impl RecoveringProvider {
    fn charges(&self) -> MutexGuard<'_, HashMap<String, Account>> {
        self.0.charges.lock().expect("nobody panicked")
    }

    fn booked(&self) -> usize {
        self.charges()
            .values()
            .map(|account| account.booked.len())
            .sum()
    }
}

#[async_trait]
impl Handler for RecoveringProvider {
    type Payload = Value;

    async fn handle(&self, _: Value, cx: &Context) -> Result<(), Failure> {
        let mut charges = self.charges();
        let account = charges.entry(cx.id().to_owned()).or_default();
        if !self.0.healed.load(Ordering::Relaxed) {
            account.unanswered = account.unanswered.max(cx.attempt());
            return Err("no answer").in_doubt();
        }
        if cx.attempt() <= account.voided {
            return Err(format!("attempt {} was voided", cx.attempt())).reject();
        }
        account.booked.push(cx.attempt());
        Ok(())
    }

    async fn reconcile(&self, _: Value, cx: &Context) -> Result<Reconciled, Failure> {
        if !self.0.tells.load(Ordering::Relaxed) {
            return Ok(Reconciled::Unknown);
        }
        let mut charges = self.charges();
        let account = charges.entry(cx.id().to_owned()).or_default();
        if !account.booked.is_empty() {
            return Ok(Reconciled::Happened);
        }
        account.voided = account.voided.max(cx.attempt());
        Ok(Reconciled::DidNotHappen)
    }
}

fn id(number: usize) -> String {
    format!("pay-{number:04}")
}

async fn fixture(broker: Broker, guarantee: Guarantee) -> Arc<BrokerFixture> {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    if guarantee == Guarantee::EffectivelyOnce {
        fixture.cli.configure(
            &fixture
                .settings()
                .replace("at-most-once", "effectively-once"),
        );
    }
    fixture
}

async fn until(what: &str, is: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !is().await {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Each id was booked once, by an attempt above every voided or unanswered one.
fn each_was_booked_once(provider: &RecoveringProvider) {
    let charges = provider.charges();
    assert_eq!(charges.len(), MESSAGES);
    for (id, account) in charges.iter() {
        let above = account.unanswered.max(account.voided);
        assert!(
            matches!(account.booked[..], [attempt] if attempt > above),
            "{id}: {account:?}"
        );
    }
}

/// A thousand messages fail with unknown effect until their attempts are exhausted; the provider
/// recovers; they are redriven.
async fn redriven(broker: Broker, guarantee: Guarantee) {
    let (fixture, provider) = (
        fixture(broker, guarantee).await,
        RecoveringProvider::default(),
    );
    provider.0.tells.store(true, Ordering::Relaxed);
    fixture.publish_many((0..MESSAGES).map(id)).await;
    fixture
        .handle(
            guarantee,
            provider.clone(),
            fixture.until_there_are(MESSAGES as u64, ".dead-letters"),
        )
        .await;
    let listed = fixture
        .json(&[
            "dead-letters",
            "list",
            "--limit",
            "1",
            "--reason",
            "attempts-spent",
        ])
        .await;
    assert_eq!(
        listed["letters"].as_array().map(Vec::len),
        Some(1),
        "{listed}"
    );
    assert_eq!(provider.booked(), 0);

    provider.0.healed.store(true, Ordering::Relaxed);
    let redriven = fixture
        .json(&["dead-letters", "redrive", "--all", "--yes"])
        .await;
    assert_eq!(
        (&redriven["done"], &redriven["left"]),
        (&Value::from(MESSAGES), &0.into())
    );
    let all_booked = async || {
        provider.booked() >= MESSAGES && (broker == Broker::Kafka || fixture.count("").await == 0)
    };
    fixture
        .handle(
            guarantee,
            provider.clone(),
            until("all are booked", all_booked),
        )
        .await;
    each_was_booked_once(&provider);
    let stays = if broker == Broker::Kafka {
        MESSAGES as u64
    } else {
        0
    };
    assert_eq!(
        (
            fixture.count(".dead-letters").await,
            fixture.count(".in-doubt").await
        ),
        (stays, 0),
        "none failed again"
    );
    fixture.end().await;
}

async fn dead_letters_of_unknown_outcomes_are_redriven_effectively_once(broker: Broker) {
    redriven(broker, Guarantee::EffectivelyOnce).await;
}

async fn dead_letters_of_unknown_outcomes_are_redriven_at_most_once(broker: Broker) {
    redriven(broker, Guarantee::AtMostOnce).await;
}

/// A thousand messages with ten duplicates each end in doubt; an operator records that none
/// happened; the provider recovers. Consumers with either guarantee may handle what was in doubt.
async fn resolved(broker: Broker, guarantee: Guarantee) {
    let (fixture, provider) = (
        fixture(broker, guarantee).await,
        RecoveringProvider::default(),
    );
    fixture
        .publish_many((0..MESSAGES * COPIES).map(|number| id(number % MESSAGES)))
        .await;
    let all = (MESSAGES * COPIES) as u64;
    fixture
        .handle(
            Guarantee::AtMostOnce,
            provider.clone(),
            fixture.until_there_are(all, ".in-doubt"),
        )
        .await;
    assert_eq!(provider.booked(), 0);

    provider.0.healed.store(true, Ordering::Relaxed);
    let ids: Vec<String> = (0..MESSAGES).map(id).collect();
    let resolve = ["in-doubt", "resolve"]
        .into_iter()
        .chain(ids.iter().map(String::as_str))
        .chain(["--did-not-happen", "--yes"]);
    let resolved = fixture.json(&resolve.collect::<Vec<_>>()).await;
    assert_eq!(
        (&resolved["done"], &resolved["left"]),
        (&Value::from(all), &0.into())
    );
    let all_booked = async || {
        provider.booked() >= MESSAGES && (broker == Broker::Kafka || fixture.count("").await == 0)
    };
    fixture
        .handle(
            guarantee,
            provider.clone(),
            until("all are booked", all_booked),
        )
        .await;
    each_was_booked_once(&provider);
    let stays = if broker == Broker::Kafka { all } else { 0 };
    assert_eq!(
        (
            fixture.count(".in-doubt").await,
            fixture.count(".dead-letters").await
        ),
        (stays, 0),
        "none failed again"
    );
    fixture.end().await;
}

async fn messages_that_did_not_happen_are_handled_effectively_once(broker: Broker) {
    resolved(broker, Guarantee::EffectivelyOnce).await;
}

async fn messages_that_did_not_happen_are_handled_at_most_once(broker: Broker) {
    resolved(broker, Guarantee::AtMostOnce).await;
}
