//! Rows of the operation table: a marker, an operation, its verdict, and the marker afterwards.

use oncegate_core::marker::{
    self, Ask, Attempts, Doubt, Effect, Finding, Hold, Marker, Operation, Terms, Token, Verdict,
};
use oncegate_core::{Key, Store};

use super::ask::{
    AT_MOST_ONCE, Asker, DONE_WITH_LOST_MARKER, EFFECTIVELY_ONCE, LONG, SHORT, SLACK, granted,
    hold, key, terms, verdicts,
};

/// One row. If the lease of the given marker is [`SHORT`], the operation is sent after it expires.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// The name in the table.
    pub(crate) name: &'static str,
    pub(crate) given: Marker,
    pub(crate) asker: Asker,
    pub(crate) ask: Ask,
    pub(crate) verdict: Verdict,
    pub(crate) becomes: Marker,
}

/// A row, with arguments in the order of the table's columns.
pub(crate) fn row(
    name: &'static str,
    given: Marker,
    (asker, ask): (Asker, Ask),
    verdict: Verdict,
    becomes: Marker,
) -> Row {
    Row {
        name,
        given,
        asker,
        ask,
        verdict,
        becomes,
    }
}

/// An operation and its expected verdict.
type Exchange = (Operation, Verdict);

/// The operations of one step of a row on a key.
type Part = fn(&Row, &Key) -> Vec<Exchange>;

/// No law uses these tokens otherwise.
const MAKER: Token = Token(u128::MAX);
const VISITOR: Token = Token(u128::MAX - 1);

/// At most about this many rows of a law are also tested one by one.
const ALONE: usize = 30;

/// Tests the rows: all together, with one batch for each step, and some of them one by one.
pub(crate) async fn keep(store: &dyn Store, rows: &[Row]) {
    let some = rows.len().div_ceil(ALONE);
    let exchanges = |way: &str, some: usize, of: Part| -> Vec<(String, Vec<Exchange>)> {
        let rows = rows.iter().enumerate().step_by(some);
        rows.map(|(it, row)| (row.to_string(), of(row, &key(format!("{way}-{it}")))))
            .collect()
    };
    let steps: [(&str, Part); 3] = [
        ("writing the given marker", |row, key| {
            setup_operations(key, &row.given)
        }),
        ("the operation", |row, key| {
            vec![(row.asker.asks(row.ask, key), row.verdict)]
        }),
        ("reading the resulting marker", |row, key| {
            questions(key, &row.becomes)
        }),
    ];
    for (step, of) in steps {
        if step == "the operation" && rows.iter().any(Row::waits) {
            tokio::time::sleep(SHORT + SLACK).await;
        }
        exchange(store, step, &exchanges("together", 1, of)).await;
        for one in exchanges("alone", some, of) {
            exchange(store, step, &[one]).await;
        }
    }
}

/// Sends all operations in one batch and compares the verdicts.
async fn exchange(store: &dyn Store, step: &str, of: &[(String, Vec<Exchange>)]) {
    let operations: Vec<Operation> = of
        .iter()
        .flat_map(|(_, exchanges)| exchanges)
        .map(|(asked, _)| asked.clone())
        .collect();
    let mut heard = verdicts(store, &operations).await.into_iter();
    for (name, exchanges) in of {
        for (asked, expected) in exchanges {
            let heard = heard.next().expect("one answer for each operation");
            assert!(
                alike(heard, *expected),
                "{name}: {step}: {heard:?}, not {expected:?}, to {asked:?}"
            );
        }
    }
}

/// Whether a verdict is the expected one. The remaining time of a lease may be shorter.
pub(crate) fn alike(heard: Verdict, expected: Verdict) -> bool {
    match (heard, expected) {
        (Verdict::Busy { remaining }, Verdict::Busy { remaining: most }) => {
            remaining <= most && remaining >= most / 2
        }
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
        let Self {
            name,
            given,
            asker,
            ask,
            ..
        } = self;
        write!(
            f,
            "row \u{ab}{name}\u{bb} ({ask:?} by {asker:?} on {given:?})"
        )
    }
}

fn asker_of(hold: &Hold) -> Asker {
    let Hold {
        token,
        attempts,
        lease,
        guarantee,
        fingerprint,
        horizon,
        ..
    } = *hold;
    // In at most once an unresolved marker is kept for its horizon, whatever the window.
    let window = if guarantee == AT_MOST_ONCE {
        terms(guarantee).window
    } else {
        horizon
    };
    Asker {
        token,
        attempt: attempts.number,
        terms: Terms {
            guarantee,
            lease,
            window,
            fingerprint,
        },
    }
}

/// The operations that turn an absent marker into this one, with their verdicts. A crash cannot be
/// produced this way, because a lease has to expire for it.
pub(crate) fn setup_operations(key: &Key, marker: &Marker) -> Vec<Exchange> {
    let maker = |attempt| Asker::new(AT_MOST_ONCE, MAKER, attempt);
    match *marker {
        Marker::Absent => Vec::new(),
        Marker::Cleared { attempts, effect } => setup_cleared(key, attempts, effect),
        Marker::InProgress(hold) => {
            let mut made = before(key, &hold);
            made.push((asker_of(&hold).claims(key), Verdict::Granted(hold.attempts)));
            made
        }
        Marker::InDoubt(hold, Doubt::Waiting) => {
            let mut made = setup_cleared(
                key,
                Attempts::all_forgiven(hold.attempts.base),
                Effect::Nothing,
            );
            made.push((asker_of(&hold).asks(Ask::Doubt, key), Verdict::Kept));
            made
        }
        Marker::InDoubt(hold, Doubt::Reconciling) => {
            let Attempts {
                number,
                base,
                crashes,
            } = hold.attempts;
            let mut made = setup_cleared(key, Attempts::all_forgiven(base - 1), Effect::Nothing);
            made.push((
                maker(number - 1)
                    .body(hold.fingerprint)
                    .asks(Ask::Doubt, key),
                Verdict::Kept,
            ));
            made.push((
                asker_of(&hold).claims(key),
                Verdict::InDoubt(Attempts {
                    number,
                    base,
                    crashes,
                }),
            ));
            made
        }
        Marker::Rejected {
            attempt,
            fingerprint,
        } => {
            let hold = hold(AT_MOST_ONCE, MAKER, Attempts::new(attempt), Effect::Nothing);
            let mut made = before(key, &hold);
            made.push((maker(0).body(fingerprint).claims(key), granted(attempt)));
            made.push((
                maker(attempt).asks(Ask::Reject(Effect::Nothing), key),
                Verdict::Kept,
            ));
            made
        }
        Marker::Done(body) => vec![(
            maker(1).body(body).asks(Ask::Complete, key),
            DONE_WITH_LOST_MARKER,
        )],
    }
}

/// The operations before a claim that is granted this hold.
fn before(key: &Key, hold: &Hold) -> Vec<Exchange> {
    match hold.attempts.number {
        1 if hold.earlier == Effect::Nothing => Vec::new(),
        number => setup_cleared(
            key,
            Attempts {
                number: number - 1,
                ..hold.attempts
            },
            hold.earlier,
        ),
    }
}

fn setup_cleared(key: &Key, attempts: Attempts, effect: Effect) -> Vec<Exchange> {
    let Attempts { number, base, .. } = attempts;
    let send_back = |effect| Ask::SendBack {
        seen: Marker::Absent,
        effect,
    };
    if number == base {
        return vec![(
            Asker::new(EFFECTIVELY_ONCE, MAKER, base).asks(send_back(effect), key),
            Verdict::Kept,
        )];
    }
    match effect {
        Effect::Nothing => vec![
            (
                Asker::new(EFFECTIVELY_ONCE, MAKER, base).asks(send_back(Effect::Nothing), key),
                Verdict::Kept,
            ),
            (
                Asker::new(AT_MOST_ONCE, MAKER, number).asks(Ask::Doubt, key),
                Verdict::Kept,
            ),
            (
                Asker::new(AT_MOST_ONCE, MAKER, number)
                    .asks(Ask::Resolve(Finding::DidNotHappen), key),
                Verdict::Kept,
            ),
        ],
        Effect::Unknown => {
            let mut made = setup_cleared(
                key,
                Attempts {
                    number: number - 1,
                    ..attempts
                },
                Effect::Nothing,
            );
            let lax = Asker::new(EFFECTIVELY_ONCE, MAKER, number);
            made.push((lax.claims(key), Verdict::Granted(attempts)));
            made.push((lax.asks(Ask::Clear(Effect::Unknown), key), Verdict::Kept));
            made
        }
    }
}

/// Operations whose verdicts identify the marker with all its fields except its age. Afterwards the
/// key is absent, or freed or claimed by `VISITOR`.
pub(crate) fn questions(key: &Key, marker: &Marker) -> Vec<Exchange> {
    let visitor = Asker::new(EFFECTIVELY_ONCE, VISITOR, 0).lease(LONG);
    let send_back = |seen| {
        visitor.asks(
            Ask::SendBack {
                seen,
                effect: Effect::Nothing,
            },
            key,
        )
    };
    match *marker {
        Marker::Absent => vec![(visitor.claims(key), granted(1))],
        // A marker in progress cannot be sent back; a doubt of its holder keeps all fields and can
        // be.
        Marker::InProgress(hold) => vec![
            (
                send_back(Marker::InDoubt(hold, Doubt::Waiting)),
                Verdict::Lost,
            ),
            (
                send_back(Marker::InDoubt(hold, Doubt::Reconciling)),
                Verdict::Lost,
            ),
            (asker_of(&hold).asks(Ask::Doubt, key), Verdict::Kept),
            (
                send_back(Marker::InDoubt(hold, Doubt::Waiting)),
                Verdict::Kept,
            ),
        ],
        Marker::Done(_) => {
            vec![
                (visitor.claims(key), Verdict::Duplicate),
                (
                    visitor.asks(Ask::Forget { seen: *marker }, key),
                    Verdict::Kept,
                ),
            ]
        }
        Marker::InDoubt(..) | Marker::Rejected { .. } | Marker::Cleared { .. } => {
            let asked = send_back(*marker);
            match marker::freed(&asked) {
                // Sending back is also `Kept` if the marker already is the result.
                Some(freed) if freed != *marker => {
                    vec![(send_back(freed), Verdict::Lost), (asked, Verdict::Kept)]
                }
                _ => vec![(asked, Verdict::Kept)],
            }
        }
    }
}
