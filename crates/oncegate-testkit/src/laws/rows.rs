//! Rows of the table of marker operations: a marker, an operation, its verdict, and the marker
//! afterwards.

use oncegate_core::marker::{
    self, Attempts, Doubt, Effect, Finding, Hold, Marker, Operation, OperationKind, Terms, Token,
    Verdict,
};
use oncegate_core::{Key, Store};

use super::fixtures::{
    AT_MOST_ONCE, CLOCK_TOLERANCE, Claimant, DONE_WITH_LOST_MARKER, EFFECTIVELY_ONCE, LONG_LEASE,
    SHORT_LEASE, granted, hold, key, terms, verdicts,
};

/// One row. If the given marker has the lease [`SHORT_LEASE`], the operation is sent after its
/// expiry.
#[derive(Clone, Debug)]
pub(crate) struct OperationRow {
    /// The name that a failure prints.
    pub(crate) name: &'static str,
    /// The marker before the operation.
    pub(crate) given: Marker,
    /// The sender of the operation.
    pub(crate) claimant: Claimant,
    pub(crate) kind: OperationKind,
    /// The expected verdict.
    pub(crate) verdict: Verdict,
    /// The expected marker after the operation.
    pub(crate) becomes: Marker,
}

/// A row, with arguments in the order of the table's columns.
pub(crate) fn row(
    name: &'static str,
    given: Marker,
    (claimant, kind): (Claimant, OperationKind),
    verdict: Verdict,
    becomes: Marker,
) -> OperationRow {
    OperationRow {
        name,
        given,
        claimant,
        kind,
        verdict,
        becomes,
    }
}

/// An operation and its expected verdict.
type ExpectedVerdict = (Operation, Verdict);

/// The operations of one step of a row on a key.
type StepOperations = fn(&OperationRow, &Key) -> Vec<ExpectedVerdict>;

/// The token of the operations that write the given marker.
const SETUP: Token = Token(u128::MAX);
/// The token of the operations that read the resulting marker.
const PROBE: Token = Token(u128::MAX - 1);

/// The approximate maximum number of rows of a law that are also tested one by one.
const MAX_SINGLE_ROWS: usize = 30;

/// Tests the rows: all together, with one batch for each step, and some of them one by one.
pub(crate) async fn check_rows(store: &dyn Store, rows: &[OperationRow]) {
    let stride = rows.len().div_ceil(MAX_SINGLE_ROWS);
    let operations =
        |prefix: &str, stride: usize, of: StepOperations| -> Vec<(String, Vec<ExpectedVerdict>)> {
            let rows = rows.iter().enumerate().step_by(stride);
            rows.map(|(it, row)| (row.to_string(), of(row, &key(format!("{prefix}-{it}")))))
                .collect()
        };
    let steps: [(&str, StepOperations); 3] = [
        ("writing the given marker", |row, key| {
            setup_operations(key, &row.given)
        }),
        ("the operation", |row, key| {
            vec![(row.claimant.operation(row.kind, key), row.verdict)]
        }),
        ("reading the resulting marker", |row, key| {
            probe_operations(key, &row.becomes)
        }),
    ];
    for (step, of) in steps {
        if step == "the operation" && rows.iter().any(OperationRow::waits_for_expiry) {
            tokio::time::sleep(SHORT_LEASE + CLOCK_TOLERANCE).await;
        }
        check_batch(store, step, &operations("together", 1, of)).await;
        for one in operations("alone", stride, of) {
            check_batch(store, step, &[one]).await;
        }
    }
}

/// Sends all operations in one batch and compares the verdicts.
async fn check_batch(store: &dyn Store, step: &str, of: &[(String, Vec<ExpectedVerdict>)]) {
    let operations: Vec<Operation> = of
        .iter()
        .flat_map(|(_, expected)| expected)
        .map(|(operation, _)| operation.clone())
        .collect();
    let mut received = verdicts(store, &operations).await.into_iter();
    for (name, operations) in of {
        for (operation, expected) in operations {
            let received = received.next().expect("one answer for each operation");
            assert!(
                matches_expected(received, *expected),
                "{name}: {step}: {received:?} instead of {expected:?} for {operation:?}"
            );
        }
    }
}

/// Whether a verdict is the expected one. The remaining time of a lease may be as short as half of
/// the expected one, because time passes before the operation.
pub(crate) fn matches_expected(received: Verdict, expected: Verdict) -> bool {
    match (received, expected) {
        (Verdict::Busy { remaining }, Verdict::Busy { remaining: most }) => {
            remaining <= most && remaining >= most / 2
        }
        _ => received == expected,
    }
}

impl OperationRow {
    fn waits_for_expiry(&self) -> bool {
        matches!(self.given, Marker::InProgress(hold) | Marker::InDoubt(hold, _) if hold.lease == SHORT_LEASE)
    }
}

impl std::fmt::Display for OperationRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            name,
            given,
            claimant,
            kind,
            ..
        } = self;
        write!(
            f,
            "row \u{ab}{name}\u{bb} ({kind:?} by {claimant:?} on {given:?})"
        )
    }
}

fn claimant_of(hold: &Hold) -> Claimant {
    let Hold {
        token,
        attempts,
        lease,
        guarantee,
        fingerprint,
        horizon,
        ..
    } = *hold;
    // In at most once the expiry of an unresolved marker (its horizon) does not depend on the
    // window.
    let window = if guarantee == AT_MOST_ONCE {
        terms(guarantee).window
    } else {
        horizon
    };
    Claimant {
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

/// The operations that turn an absent marker into this one, with their verdicts. They cannot
/// produce a marker that counts a crash, because a lease has to expire for that.
pub(crate) fn setup_operations(key: &Key, marker: &Marker) -> Vec<ExpectedVerdict> {
    let setup_claimant = |attempt| Claimant::new(AT_MOST_ONCE, SETUP, attempt);
    match *marker {
        Marker::Absent => Vec::new(),
        Marker::Cleared { attempts, effect } => setup_cleared(key, attempts, effect),
        Marker::InProgress(hold) => {
            let mut setup = setup_before_claim(key, &hold);
            setup.push((
                claimant_of(&hold).claim(key),
                Verdict::Granted(hold.attempts),
            ));
            setup
        }
        Marker::InDoubt(hold, Doubt::Waiting) => {
            let mut setup = setup_cleared(
                key,
                Attempts::none_counted(hold.attempts.base),
                Effect::Nothing,
            );
            setup.push((
                claimant_of(&hold).operation(OperationKind::Doubt, key),
                Verdict::Applied,
            ));
            setup
        }
        Marker::InDoubt(hold, Doubt::Reconciling) => {
            let Attempts {
                number,
                base,
                crashes,
            } = hold.attempts;
            let mut setup = setup_cleared(key, Attempts::none_counted(base - 1), Effect::Nothing);
            setup.push((
                setup_claimant(number - 1)
                    .fingerprint(hold.fingerprint)
                    .operation(OperationKind::Doubt, key),
                Verdict::Applied,
            ));
            setup.push((
                claimant_of(&hold).claim(key),
                Verdict::InDoubt(Attempts {
                    number,
                    base,
                    crashes,
                }),
            ));
            setup
        }
        Marker::Rejected {
            attempt,
            fingerprint,
        } => {
            let hold = hold(AT_MOST_ONCE, SETUP, Attempts::new(attempt), Effect::Nothing);
            let mut setup = setup_before_claim(key, &hold);
            setup.push((
                setup_claimant(0).fingerprint(fingerprint).claim(key),
                granted(attempt),
            ));
            setup.push((
                setup_claimant(attempt).operation(OperationKind::Reject(Effect::Nothing), key),
                Verdict::Applied,
            ));
            setup
        }
        Marker::Done(fingerprint) => vec![(
            setup_claimant(1)
                .fingerprint(fingerprint)
                .operation(OperationKind::Complete, key),
            DONE_WITH_LOST_MARKER,
        )],
    }
}

/// The operations before a claim that is granted this hold.
fn setup_before_claim(key: &Key, hold: &Hold) -> Vec<ExpectedVerdict> {
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

fn setup_cleared(key: &Key, attempts: Attempts, effect: Effect) -> Vec<ExpectedVerdict> {
    let Attempts { number, base, .. } = attempts;
    let redrive = |effect| OperationKind::Redrive {
        seen: Marker::Absent,
        effect,
    };
    if number == base {
        return vec![(
            Claimant::new(EFFECTIVELY_ONCE, SETUP, base).operation(redrive(effect), key),
            Verdict::Applied,
        )];
    }
    match effect {
        Effect::Nothing => vec![
            (
                Claimant::new(EFFECTIVELY_ONCE, SETUP, base)
                    .operation(redrive(Effect::Nothing), key),
                Verdict::Applied,
            ),
            (
                Claimant::new(AT_MOST_ONCE, SETUP, number).operation(OperationKind::Doubt, key),
                Verdict::Applied,
            ),
            (
                Claimant::new(AT_MOST_ONCE, SETUP, number)
                    .operation(OperationKind::Resolve(Finding::DidNotHappen), key),
                Verdict::Applied,
            ),
        ],
        Effect::Unknown => {
            let mut setup = setup_cleared(
                key,
                Attempts {
                    number: number - 1,
                    ..attempts
                },
                Effect::Nothing,
            );
            let effectively_once = Claimant::new(EFFECTIVELY_ONCE, SETUP, number);
            setup.push((effectively_once.claim(key), Verdict::Granted(attempts)));
            setup.push((
                effectively_once.operation(OperationKind::Clear(Effect::Unknown), key),
                Verdict::Applied,
            ));
            setup
        }
    }
}

/// Operations whose verdicts identify the marker with all its fields except its age. They change
/// the marker: afterwards it is absent, redriven, or claimed by `PROBE`.
pub(crate) fn probe_operations(key: &Key, marker: &Marker) -> Vec<ExpectedVerdict> {
    let probe = Claimant::new(EFFECTIVELY_ONCE, PROBE, 0).lease(LONG_LEASE);
    let redrive = |seen| {
        probe.operation(
            OperationKind::Redrive {
                seen,
                effect: Effect::Nothing,
            },
            key,
        )
    };
    match *marker {
        Marker::Absent => vec![(probe.claim(key), granted(1))],
        // `Redrive` refuses a marker in progress whose lease is valid. `Doubt` by its holder keeps
        // all fields, and `Redrive` accepts the doubt.
        Marker::InProgress(hold) => vec![
            (
                redrive(Marker::InDoubt(hold, Doubt::Waiting)),
                Verdict::Lost,
            ),
            (
                redrive(Marker::InDoubt(hold, Doubt::Reconciling)),
                Verdict::Lost,
            ),
            (
                claimant_of(&hold).operation(OperationKind::Doubt, key),
                Verdict::Applied,
            ),
            (
                redrive(Marker::InDoubt(hold, Doubt::Waiting)),
                Verdict::Applied,
            ),
        ],
        Marker::Done(_) => {
            vec![
                (probe.claim(key), Verdict::Duplicate),
                (
                    probe.operation(OperationKind::Forget { seen: *marker }, key),
                    Verdict::Applied,
                ),
            ]
        }
        Marker::InDoubt(..) | Marker::Rejected { .. } | Marker::Cleared { .. } => {
            let operation = redrive(*marker);
            match marker::freed(&operation) {
                // A redrive is also `Applied` if the marker already is the result.
                Some(freed) if freed != *marker => {
                    vec![
                        (redrive(freed), Verdict::Lost),
                        (operation, Verdict::Applied),
                    ]
                }
                _ => vec![(operation, Verdict::Applied)],
            }
        }
    }
}
