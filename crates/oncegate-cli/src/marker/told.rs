//! A marker in plain words.

use std::time::Duration;

use oncegate::marker::{Doubt, Effect, Guarantee, Hold, Marker};
use oncegate::{Listed, Standing};
use serde::Serialize;

use crate::say::{ms, now_ms, span, utc};

/// The state of a marker, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    Absent,
    Cleared,
    InProgress,
    /// In progress, and its lease is over.
    Lapsed,
    InDoubt,
    Rejected,
    Done,
    /// No marker that this release can read.
    Unreadable,
}

impl State {
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

/// What is said of one marker.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Told {
    pub(crate) key: String,
    pub(crate) state: State,
    pub(crate) says: String,
    /// How many attempts count towards the budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) attempts: Option<u32>,
    /// The number of the last attempt: the fencing token.
    #[serde(skip_serializing_if = "Option::is_none")]
    fence: Option<u32>,
    /// The beginning of the token of the claim that holds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    claim: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    guarantee: Option<&'static str>,
    /// When it was written last; of what is done, rejected or cleared, as the configured window
    /// tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) written_at_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) expires_in_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<String>,
}

impl Told {
    pub(crate) fn of(key: &str, standing: &Standing, window: Duration) -> Self {
        let age = standing.age();
        let state = state(standing);
        let hold = match standing.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold),
            _ => None,
        };
        let by_window = || window.checked_sub(standing.expires_in?);
        let fingerprint = match standing.marker {
            Marker::Done(it)
            | Marker::Rejected {
                fingerprint: it, ..
            } => it,
            _ => hold.and_then(|hold| hold.fingerprint),
        };
        Self {
            key: key.to_owned(),
            state,
            says: says(standing),
            attempts: spent(&standing.marker),
            fence: attempt(&standing.marker),
            claim: hold.map(|hold| claim(&hold)),
            guarantee: hold.map(|hold| promise(hold.guarantee)),
            written_at_ms: age
                .or_else(by_window)
                .map(|age| now_ms().saturating_sub(ms(age))),
            lease_ms: hold.map(|hold| ms(hold.lease)),
            expires_in_ms: standing.expires_in.map(ms),
            fingerprint: fingerprint.map(|it| format!("{:018}", it.get())),
        }
    }

    pub(crate) fn of_listed(listed: &Listed, window: Duration) -> Self {
        match &listed.standing {
            Ok(standing) => Self::of(&listed.name, standing, window),
            Err(error) => Self {
                key: listed.name.clone(),
                state: State::Unreadable,
                says: error.to_string(),
                attempts: None,
                fence: None,
                claim: None,
                guarantee: None,
                written_at_ms: None,
                lease_ms: None,
                expires_in_ms: None,
                fingerprint: None,
            },
        }
    }

    /// A row of the list.
    pub(crate) fn cells(&self) -> [String; 7] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        [
            self.key.clone(),
            self.state.word().to_owned(),
            or_dash(self.attempts.map(|count| count.to_string())),
            or_dash(self.fence.map(|number| number.to_string())),
            or_dash(self.written_at_ms.map(utc)),
            or_dash(
                self.expires_in_ms
                    .map(|left| span(Duration::from_millis(left))),
            ),
            or_dash(self.fingerprint.clone()),
        ]
    }

    /// All of it.
    pub(crate) fn for_people(&self) -> String {
        let mut lines = vec![
            format!("{}: {}", self.key, self.state.word()),
            format!("  {}", self.says),
        ];
        let mut add = |name: &str, value: Option<String>| {
            lines.extend(value.map(|value| format!("  {name}: {value}")))
        };
        add("attempts", self.attempts.map(|count| count.to_string()));
        add("fence", self.fence.map(|number| number.to_string()));
        add("claim", self.claim.clone());
        add("promised", self.guarantee.map(str::to_owned));
        add("written", self.written_at_ms.map(utc));
        add(
            "expires in",
            self.expires_in_ms
                .map(|left| span(Duration::from_millis(left))),
        );
        add("fingerprint of the body", self.fingerprint.clone());
        lines.join("\n")
    }
}

/// The number of the last attempt, where the marker tells.
pub(crate) fn attempt(marker: &Marker) -> Option<u32> {
    match marker {
        Marker::Cleared { attempts, .. } => Some(attempts.number),
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold.attempts.number),
        Marker::Rejected { attempt, .. } => Some(*attempt),
        Marker::Absent | Marker::Done(_) => None,
    }
}

/// How many attempts count towards the budget, where the marker tells.
fn spent(marker: &Marker) -> Option<u32> {
    match marker {
        Marker::Cleared { attempts, .. } => Some(attempts.spent()),
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold.attempts.spent()),
        Marker::Absent | Marker::Rejected { .. } | Marker::Done(_) => None,
    }
}

/// In one word what stands there.
pub(crate) fn state(standing: &Standing) -> State {
    let over = |hold: &Hold| standing.age().is_some_and(|age| age > hold.lease);
    match standing.marker {
        Marker::Absent => State::Absent,
        Marker::Cleared { .. } => State::Cleared,
        Marker::InProgress(hold) if over(&hold) => State::Lapsed,
        Marker::InProgress(_) => State::InProgress,
        Marker::InDoubt(..) => State::InDoubt,
        Marker::Rejected { .. } => State::Rejected,
        Marker::Done(_) => State::Done,
    }
}

/// Whether somebody is finding out, at this moment, what happened.
pub(crate) fn is_being_reconciled(standing: &Standing) -> bool {
    match standing.marker {
        Marker::InDoubt(hold, Doubt::Reconciling) => {
            standing.age().is_none_or(|age| age <= hold.lease)
        }
        _ => false,
    }
}

fn claim(hold: &Hold) -> String {
    format!("{:032x}", hold.token.0)[..8].to_owned()
}

fn promise(guarantee: Guarantee) -> &'static str {
    match guarantee {
        Guarantee::AtMostOnce => "at most once",
        Guarantee::EffectivelyOnce => "effectively once",
        Guarantee::Bare => "bare",
    }
}

fn says(standing: &Standing) -> String {
    let since = |hold: &Hold| match standing.age() {
        Some(age) => format!("{} ago", span(age)),
        None => format!(
            "at a time that its expiry does not tell, for a lease of {}",
            span(hold.lease)
        ),
    };
    let over = |hold: &Hold| standing.age().and_then(|age| age.checked_sub(hold.lease));
    match standing.marker {
        Marker::Absent => {
            "Nothing stands under this id: it was never claimed, or failed in its first attempt and had done nothing, or was forgotten, or its \
             time is over."
                .into()
        }
        Marker::Cleared { attempts, effect } => format!(
            "Free to be claimed. The next attempt is {}; attempts used of the budget: {}.{}",
            attempts.number.saturating_add(1),
            attempts.spent(),
            match effect {
                Effect::Nothing => "",
                Effect::Unknown => " Whether an earlier attempt had an effect is unknown: in at most once the next claim finds it in doubt.",
            }
        ),
        Marker::InProgress(hold) => match over(&hold) {
            None => format!(
                "Claim {} holds it for attempt {}; written {}, at its beginning or a renewal. It stays theirs for a lease of {} from then.",
                claim(&hold),
                hold.attempts.number,
                since(&hold),
                span(hold.lease)
            ),
            Some(over) => format!(
                "Claim {} left it: its lease in attempt {} has been over for {}. Its process crashed, or cannot reach the store. {}",
                claim(&hold),
                hold.attempts.number,
                span(over),
                match hold.guarantee {
                    Guarantee::AtMostOnce => "The next delivery finds it in doubt.",
                    _ => "The next delivery runs it again.",
                }
            ),
        },
        Marker::InDoubt(hold, doubt) => format!(
            "Nobody knows whether it happened in attempt {}; written {}. {}",
            hold.attempts.number,
            since(&hold),
            match (doubt, is_being_reconciled(standing)) {
                (Doubt::Reconciling, true) => "Somebody is finding out.",
                (Doubt::Reconciling, false) => "Whoever was finding out let the lease end.",
                (Doubt::Waiting, _) => "It waits for a delivery that finds out, or for a person: `oncegate in-doubt resolve`.",
            }
        ),
        Marker::Rejected { attempt, .. } => {
            format!("It was rejected in attempt {attempt}, and nothing happened. It is dead-lettered until it is redriven or forgotten.")
        }
        Marker::Done(_) => "It was handled. Another message with this id is accepted without a run.".into(),
    }
}
