//! Describes a marker as text and JSON.

use std::time::Duration;

use oncegate::Key;
use oncegate::marker::{Attempts, Doubt, Effect, Guarantee, Hold, Marker};
use oncegate::store::{ListedKey, MarkerWithExpiry};
use serde::Serialize;

use crate::config::Config;
use crate::marker_store::UnreadableValue;
use crate::output::{duration_text, ms, now_ms, utc_text};

/// The state of a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MarkerState {
    Absent,
    Cleared,
    InProgress,
    /// In progress, and the lease has expired.
    Lapsed,
    InDoubt,
    Rejected,
    Done,
    /// The value is not a marker that this release can read.
    Unreadable,
}

impl MarkerState {
    /// The state in text output.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Cleared => "cleared",
            Self::InProgress => "in progress",
            Self::Lapsed => "lapsed",
            Self::InDoubt => "in doubt",
            Self::Rejected => "rejected",
            Self::Done => "done",
            Self::Unreadable => "unreadable",
        }
    }
}

/// A marker as text and JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MarkerDescription {
    pub(crate) key: String,
    pub(crate) state: MarkerState,
    #[serde(rename = "description")]
    pub(crate) text: String,
    /// The number of attempts that count towards `max_attempts` and have a recorded outcome.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) attempts: Option<u32>,
    /// The number of attempts whose lease expired without an outcome.
    #[serde(skip_serializing_if = "Option::is_none")]
    crashes: Option<u32>,
    /// Whether an attempt may have had an effect, although none is recorded as handled.
    #[serde(skip)]
    pub(crate) may_have_effect: bool,
    /// The number of the last attempt, which is its fencing token.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_attempt: Option<u32>,
    /// The first digits of the token of the current claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    claim: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    guarantee: Option<&'static str>,
    /// When the marker was last written, in milliseconds since 1970. For done, rejected and cleared
    /// markers, which do not store it, computed from the expiry and the configured dedup window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) written_at_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) expires_in_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<String>,
}

impl MarkerDescription {
    pub(crate) fn of(key: &str, stored: &MarkerWithExpiry, window: Duration) -> Self {
        let age = stored.age();
        let state = state(stored);
        let hold = match stored.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold),
            _ => None,
        };
        let age_by_window = || window.checked_sub(stored.expires_in?);
        let fingerprint = match stored.marker {
            Marker::Done(it)
            | Marker::Rejected {
                fingerprint: it, ..
            } => it,
            _ => hold.and_then(|hold| hold.fingerprint),
        };
        let running = u32::from(matches!(stored.marker, Marker::InProgress(_)));
        Self {
            key: key.to_owned(),
            state,
            text: describe(stored),
            attempts: attempt_counts(&stored.marker).map(|it| it.spent().saturating_sub(running)),
            crashes: attempt_counts(&stored.marker).map(|it| it.crashes),
            may_have_effect: match stored.marker {
                Marker::Cleared { effect, .. } => effect == Effect::Unknown,
                Marker::InProgress(_) | Marker::InDoubt(..) => true,
                _ => false,
            },
            last_attempt: last_attempt(&stored.marker),
            claim: hold.map(|hold| claim(&hold)),
            guarantee: hold.map(|hold| guarantee_name(hold.guarantee)),
            written_at_ms: age
                .or_else(age_by_window)
                .map(|age| now_ms().saturating_sub(ms(age))),
            lease_ms: hold.map(|hold| ms(hold.lease)),
            expires_in_ms: stored.expires_in.map(ms),
            fingerprint: fingerprint.map(|it| format!("{:018}", it.get())),
        }
    }

    pub(crate) fn of_listed(listed: &ListedKey, window: Duration) -> Self {
        match &listed.marker {
            Ok(stored) => Self::of(&listed.name, stored, window),
            Err(error) => Self::unreadable(&listed.name, error.to_string()),
        }
    }

    /// The description of a value that is not a marker; `text` says what it is.
    pub(crate) fn unreadable(key: &str, text: String) -> Self {
        Self {
            key: key.to_owned(),
            state: MarkerState::Unreadable,
            text,
            attempts: None,
            crashes: None,
            may_have_effect: false,
            last_attempt: None,
            claim: None,
            guarantee: None,
            written_at_ms: None,
            lease_ms: None,
            expires_in_ms: None,
            fingerprint: None,
        }
    }

    /// The cells of a table row.
    pub(crate) fn cells(&self) -> [String; 7] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        [
            self.key.clone(),
            self.state.word().to_owned(),
            or_dash(self.attempts.map(|count| count.to_string())),
            or_dash(self.last_attempt.map(|number| number.to_string())),
            or_dash(self.written_at_ms.map(utc_text)),
            or_dash(
                self.expires_in_ms
                    .map(|left| duration_text(Duration::from_millis(left))),
            ),
            or_dash(self.fingerprint.clone()),
        ]
    }

    /// All fields, one a line.
    pub(crate) fn to_text(&self) -> String {
        let mut lines = vec![
            format!("{}: {}", self.key, self.state.word()),
            format!("  {}", self.text),
        ];
        let mut add = |name: &str, value: Option<String>| {
            lines.extend(value.map(|value| format!("  {name}: {value}")))
        };
        add("attempts", self.attempts.map(|count| count.to_string()));
        add("crashes", self.crashes.map(|count| count.to_string()));
        add(
            "last attempt",
            self.last_attempt.map(|number| number.to_string()),
        );
        add("claim", self.claim.clone());
        add("guarantee", self.guarantee.map(str::to_owned));
        add("written", self.written_at_ms.map(utc_text));
        add(
            "expires in",
            self.expires_in_ms
                .map(|left| duration_text(Duration::from_millis(left))),
        );
        add("fingerprint of the body", self.fingerprint.clone());
        lines.join("\n")
    }
}

/// Describes a value in the place of a marker that this release cannot read, with the remedy.
pub(crate) fn foreign_value_text(config: &Config, key: &Key, value: &UnreadableValue) -> String {
    let (at, remedy) = match config.store_kind() {
        Ok(Some(oncegate_config::StoreKind::Sqlite(_))) => (
            format!("row {}", key.as_str()),
            "restore the file, or correct store.url".to_owned(),
        ),
        Ok(Some(oncegate_config::StoreKind::Postgres)) => (
            format!("row {} of oncegate_markers", key.as_str()),
            "upgrade oncegate here if a newer release wrote the row; otherwise restore the table, or correct store.url".to_owned(),
        ),
        _ => {
            let key = format!("{}{}", config.prefix(), key.as_str());
            let remedy = format!(
                "set store.prefix (`.prefix(…)`) to one that no other program uses; or run `DEL {key}` in Redis once the effect is checked: \
                 the next message with this id is handled then, even if it was handled before"
            );
            (format!("key {key}"), remedy)
        }
    };
    let value = match value {
        UnreadableValue::Foreign(value) => value,
        UnreadableValue::NewerRelease(error) => {
            return format!(
                "The {at} has an {error}. Consumers of this release send each message with this id to the in-doubt destination. Whether it was \
                 handled is known to the newer release."
            );
        }
    };
    format!(
        "The value of the {at} is not one that oncegate writes: {value}. Another program wrote it, or it was changed by hand. Consumers do not change it \
         and send each message with this id to the in-doubt destination. Find out who writes it; {remedy}."
    )
}

/// The number of the last attempt, which is the fencing token, if the marker stores it.
pub(crate) fn last_attempt(marker: &Marker) -> Option<u32> {
    match marker {
        Marker::Rejected { attempt, .. } => Some(*attempt),
        marker => attempt_counts(marker).map(|it| it.number),
    }
}

/// The counts of attempts and crashes.
fn attempt_counts(marker: &Marker) -> Option<Attempts> {
    match marker {
        Marker::Cleared { attempts, .. } => Some(*attempts),
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold.attempts),
        Marker::Absent | Marker::Rejected { .. } | Marker::Done(_) => None,
    }
}

/// The state of a marker. [`MarkerState::Lapsed`] only if its age is known.
pub(crate) fn state(stored: &MarkerWithExpiry) -> MarkerState {
    let overdue = |hold: &Hold| stored.age().is_some_and(|age| age > hold.lease);
    match stored.marker {
        Marker::Absent => MarkerState::Absent,
        Marker::Cleared { .. } => MarkerState::Cleared,
        Marker::InProgress(hold) if overdue(&hold) => MarkerState::Lapsed,
        Marker::InProgress(_) => MarkerState::InProgress,
        Marker::InDoubt(..) => MarkerState::InDoubt,
        Marker::Rejected { .. } => MarkerState::Rejected,
        Marker::Done(_) => MarkerState::Done,
    }
}

/// Whether a consumer is reconciling the marker's id, by an unexpired lease; true if the age is
/// unknown.
pub(crate) fn is_being_reconciled(stored: &MarkerWithExpiry) -> bool {
    match stored.marker {
        Marker::InDoubt(hold, Doubt::Reconciling) => {
            stored.age().is_none_or(|age| age <= hold.lease)
        }
        _ => false,
    }
}

/// The first 8 hexadecimal digits of the token of a claim.
fn claim(hold: &Hold) -> String {
    format!("{:032x}", hold.token.0)[..8].to_owned()
}

fn guarantee_name(guarantee: Guarantee) -> &'static str {
    match guarantee {
        Guarantee::AtMostOnce => "at most once",
        Guarantee::EffectivelyOnce => "effectively once",
        Guarantee::Bare => "bare",
    }
}

/// The meaning of a marker, in sentences.
fn describe(stored: &MarkerWithExpiry) -> String {
    let since = |hold: &Hold| match stored.age() {
        Some(age) => format!("{} ago", duration_text(age)),
        None => format!(
            "at an unknown time, for a lease of {}",
            duration_text(hold.lease)
        ),
    };
    let overdue = |hold: &Hold| stored.age().and_then(|age| age.checked_sub(hold.lease));
    match stored.marker {
        Marker::Absent => {
            "The store has no marker for this id: it was never claimed, or its first attempt failed without an effect, or it was forgotten, or the \
             marker expired, or the store has lost its markers."
                .into()
        }
        Marker::Cleared { attempts, effect } => format!(
            "Free to be claimed. The next attempt is {}; attempts that count towards max_attempts: {}.{}",
            attempts.number.saturating_add(1),
            attempts.spent(),
            match effect {
                Effect::Nothing => "",
                Effect::Unknown => " Whether an earlier attempt had an effect is unknown: in at most once the next claim puts the id in doubt.",
            }
        ),
        Marker::InProgress(hold) => match overdue(&hold) {
            None => format!(
                "Claim {} holds it for attempt {}; written {}, when it was granted or renewed. It is valid for a lease of {} from then.",
                claim(&hold),
                hold.attempts.number,
                since(&hold),
                duration_text(hold.lease)
            ),
            Some(overdue) => format!(
                "The lease of claim {}, attempt {}, ended {} ago. Its process crashed or cannot reach the store. {}",
                claim(&hold),
                hold.attempts.number,
                duration_text(overdue),
                match hold.guarantee {
                    Guarantee::AtMostOnce => "The next delivery puts the id in doubt.",
                    _ => "The next delivery runs it again.",
                }
            ),
        },
        Marker::InDoubt(hold, doubt) => format!(
            "Whether an attempt up to number {} had an effect is unknown; crashes: {}; written {}. {}",
            hold.attempts.number,
            hold.attempts.crashes,
            since(&hold),
            match (doubt, is_being_reconciled(stored)) {
                (Doubt::Reconciling, true) => "A consumer is reconciling it.",
                (Doubt::Reconciling, false) => "The lease of the reconciling consumer has expired.",
                (Doubt::Waiting, _) => "It waits for a delivery that reconciles it, or for an operator: `oncegate in-doubt resolve`.",
            }
        ),
        Marker::Rejected { attempt, .. } => {
            format!("It was rejected (attempt number {attempt}), and nothing happened. It is dead-lettered until it is redriven or forgotten.")
        }
        Marker::Done(_) => "It was handled. Another message with this id is accepted without a run.".into(),
    }
}
