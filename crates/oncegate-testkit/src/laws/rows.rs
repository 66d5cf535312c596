//! Rows of the operation table: a marker, a question, its answer, and the marker afterwards.

use oncegate_core::marker::{Ask, Doubt, Effect, Finding, Hold, Marker, Operation, Terms, Token, Verdict};
use oncegate_core::{Key, Store};

use super::ask::{AT_MOST_ONCE, Asker, DONE_THOUGH_LOST, EFFECTIVELY_ONCE, LONG, SHORT, SLACK, granted, key, terms, verdicts};

/// One row. A marker whose lease is [`SHORT`] is asked about when its lease is over.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// As the table calls it.
    pub(crate) name: &'static str,
    pub(crate) given: Marker,
    pub(crate) asker: Asker,
    pub(crate) ask: Ask,
    pub(crate) verdict: Verdict,
    pub(crate) becomes: Marker,
}

/// A row in the order in which the table has it.
pub(crate) fn row(name: &'static str, given: Marker, (asker, ask): (Asker, Ask), verdict: Verdict, becomes: Marker) -> Row {
    Row { name, given, asker, ask, verdict, becomes }
}

/// A question together with its answer.
type Exchange = (Operation, Verdict);

/// What one part of a row asks of a key.
type Part = fn(&Row, &Key) -> Vec<Exchange>;

/// Nobody else has these tokens.
const MAKER: Token = Token(u128::MAX);
const VISITOR: Token = Token(u128::MAX - 1);

/// So many rows of a law are asked one by one as well.
const ALONE: usize = 30;

/// Holds the rows: all at once, each step one batch for all of them, and some one by one.
pub(crate) async fn keep(store: &dyn Store, rows: &[Row]) {
    let some = rows.len().div_ceil(ALONE);
    let exchanges = |way: &str, some: usize, of: Part| -> Vec<(String, Vec<Exchange>)> {
        let rows = rows.iter().enumerate().step_by(some);
        rows.map(|(it, row)| (row.to_string(), of(row, &key(format!("{way}-{it}"))))).collect()
    };
    let steps: [(&str, Part); 3] = [
        ("bringing the marker about", |row, key| bring_about(key, &row.given)),
        ("the question", |row, key| vec![(row.asker.asks(row.ask, key), row.verdict)]),
        ("looking at what it became", |row, key| questions(key, &row.becomes)),
    ];
    for (step, of) in steps {
        if step == "the question" && rows.iter().any(Row::waits) {
            tokio::time::sleep(SHORT + SLACK).await;
        }
        exchange(store, step, &exchanges("together", 1, of)).await;
        for one in exchanges("alone", some, of) {
            exchange(store, step, &[one]).await;
        }
    }
}

/// Asks all questions in one batch.
async fn exchange(store: &dyn Store, step: &str, of: &[(String, Vec<Exchange>)]) {
    let operations: Vec<Operation> = of.iter().flat_map(|(_, exchanges)| exchanges).map(|(asked, _)| asked.clone()).collect();
    let mut heard = verdicts(store, &operations).await.into_iter();
    for (name, exchanges) in of {
        for (asked, expected) in exchanges {
            let heard = heard.next().expect("one answer for each operation");
            assert!(alike(heard, *expected), "{name}: {step}: {heard:?}, not {expected:?}, to {asked:?}");
        }
    }
}

/// Whether a verdict is the one that was expected. What remains of a lease is less than it was.
pub(crate) fn alike(heard: Verdict, expected: Verdict) -> bool {
    match (heard, expected) {
        (Verdict::Busy { remaining }, Verdict::Busy { remaining: most }) => remaining <= most && remaining >= most / 2,
        _ => heard == expected,
    }
}

impl Row {
    fn waits(&self) -> bool {
        matches!(self.given, Marker::InProgress(hold) | Marker::InDoubt(hold, _) if hold.lease == SHORT)
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, given, asker, ask, .. } = self;
        write!(f, "row \u{ab}{name}\u{bb} ({ask:?} by {asker:?} on {given:?})")
    }
}

fn asker_of(hold: &Hold) -> Asker {
    let Hold { token, attempt, lease, guarantee, fingerprint, horizon } = *hold;
    // What is unresolved in at most once is kept for its horizon, whatever the window.
    let window = if guarantee == AT_MOST_ONCE { terms(guarantee).window } else { horizon };
    Asker { token, attempt, terms: Terms { guarantee, lease, window, fingerprint } }
}

/// The operations that make an absent marker this one, with their verdicts.
pub(crate) fn bring_about(key: &Key, marker: &Marker) -> Vec<Exchange> {
    let maker = |attempt| Asker::new(AT_MOST_ONCE, MAKER, attempt);
    match marker {
        Marker::Absent => Vec::new(),
        Marker::Cleared { attempt } => vec![
            (maker(*attempt).asks(Ask::Doubt, key), Verdict::Kept),
            (maker(*attempt).asks(Ask::Resolve(Finding::DidNotHappen), key), Verdict::Kept),
        ],
        Marker::InProgress(hold) => {
            let before = if hold.attempt == 1 { Marker::Absent } else { Marker::Cleared { attempt: hold.attempt - 1 } };
            let mut made = bring_about(key, &before);
            made.push((asker_of(hold).claims(key), granted(hold.attempt)));
            made
        }
        Marker::InDoubt(hold, Doubt::Waiting) => vec![(asker_of(hold).asks(Ask::Doubt, key), Verdict::Kept)],
        Marker::InDoubt(hold, Doubt::Reconciling) => vec![
            (maker(hold.attempt - 1).body(hold.fingerprint).asks(Ask::Doubt, key), Verdict::Kept),
            (asker_of(hold).claims(key), Verdict::InDoubt { attempt: hold.attempt }),
        ],
        Marker::Rejected(body) => {
            vec![(maker(1).body(*body).claims(key), granted(1)), (maker(1).asks(Ask::Reject(Effect::Nothing), key), Verdict::Kept)]
        }
        Marker::Done(body) => vec![(maker(1).body(*body).asks(Ask::Complete, key), DONE_THOUGH_LOST)],
    }
}

/// Questions that no other marker answers alike: every field of it, but for its age. They leave nothing behind, or a
/// visitor's claim.
pub(crate) fn questions(key: &Key, marker: &Marker) -> Vec<Exchange> {
    let visitor = Asker::new(EFFECTIVELY_ONCE, VISITOR, 1).lease(LONG);
    let forget = |seen| visitor.asks(Ask::Forget { seen }, key);
    match *marker {
        Marker::Absent => vec![(visitor.claims(key), granted(1))],
        Marker::Cleared { attempt } => vec![(visitor.claims(key), granted(attempt.saturating_add(1)))],
        // What is in progress is not forgotten; its holder's doubt keeps all of it, and then it is.
        Marker::InProgress(hold) => vec![
            (forget(Marker::InDoubt(hold, Doubt::Waiting)), Verdict::Lost),
            (forget(Marker::InDoubt(hold, Doubt::Reconciling)), Verdict::Lost),
            (asker_of(&hold).asks(Ask::Doubt, key), Verdict::Kept),
            (forget(Marker::InDoubt(hold, Doubt::Waiting)), Verdict::Kept),
        ],
        Marker::InDoubt(..) | Marker::Rejected(_) | Marker::Done(_) => vec![(forget(*marker), Verdict::Kept)],
    }
}
