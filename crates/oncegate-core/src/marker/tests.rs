//! Every row of the operation table.

use std::time::Duration;

use super::*;
use crate::id::{Key, MessageId};

const LEASE: Duration = Duration::from_secs(30);
const WINDOW: Duration = Duration::from_secs(3600);
const ALIVE: Age = Age::Of(Duration::from_secs(1));
const OVER: Age = Age::Of(Duration::from_secs(31));
const MINE: Token = Token(1);
const THEIRS: Token = Token(2);
const AMO: Guarantee = Guarantee::AtMostOnce;
const EO: Guarantee = Guarantee::EffectivelyOnce;

fn operation(guarantee: Guarantee, ask: Ask, attempt: u32) -> Operation {
    let terms = Terms { guarantee, lease: LEASE, window: WINDOW, fingerprint: None };
    Operation { key: Key::new(&MessageId::new("id").expect("an id")), ask, token: MINE, attempt, terms }
}

fn with_body(mut operation: Operation, body: u64) -> Operation {
    operation.terms.fingerprint = Some(Fingerprint::new(body));
    operation
}

fn hold(guarantee: Guarantee, token: Token, attempt: u32) -> Hold {
    let horizon = if guarantee == AMO { UNRESOLVED_AT_MOST_ONCE } else { WINDOW };
    Hold { token, attempt, lease: LEASE, horizon, guarantee, fingerprint: None }
}

fn running(guarantee: Guarantee, token: Token, attempt: u32) -> Marker {
    Marker::InProgress(hold(guarantee, token, attempt))
}

fn doubted(token: Token, attempt: u32, doubt: Doubt) -> Marker {
    Marker::InDoubt(hold(AMO, token, attempt), doubt)
}

fn write(marker: Marker) -> Change {
    let expiry = match marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.horizon,
        _ => WINDOW,
    };
    Change::Write(marker, expiry)
}

/// Checks rows of (marker, age, change, verdict) for one operation.
fn rows(operation: &Operation, rows: &[(Marker, Age, Change, Verdict)]) {
    for (marker, age, change, verdict) in rows {
        assert_eq!(apply(*marker, *age, operation), (*change, *verdict), "{:?} on {marker:?}, {age:?}", operation.ask);
    }
}

#[test]
fn claim() {
    use Change::Keep;
    use Marker::*;
    for guarantee in [AMO, EO] {
        let granted = |attempt| (write(running(guarantee, MINE, attempt)), Verdict::Granted { attempt });
        let (first, fourth) = (granted(1), granted(4));
        rows(
            &operation(guarantee, Ask::Claim, 0),
            &[
                (Absent, ALIVE, first.0, first.1),
                (Cleared { attempt: 3 }, ALIVE, fourth.0, fourth.1),
                (running(guarantee, MINE, 4), OVER, fourth.0, fourth.1), // renewed, the same attempt
                (running(guarantee, THEIRS, 1), ALIVE, Keep, Verdict::Busy { remaining: Duration::from_secs(29) }),
                (running(guarantee, THEIRS, 1), Age::Of(LEASE), Keep, Verdict::Busy { remaining: Duration::ZERO }), // to its last moment
                (running(guarantee, THEIRS, 1), Age::Unknown, write(running(guarantee, THEIRS, 1)), Verdict::Busy { remaining: LEASE }),
                (doubted(MINE, 2, Doubt::Reconciling), ALIVE, write(doubted(MINE, 2, Doubt::Reconciling)), Verdict::InDoubt { attempt: 2 }),
                (doubted(THEIRS, 2, Doubt::Reconciling), ALIVE, Keep, Verdict::Busy { remaining: Duration::from_secs(29) }),
                (doubted(THEIRS, 2, Doubt::Waiting), ALIVE, write(doubted(MINE, 3, Doubt::Reconciling)), Verdict::InDoubt { attempt: 3 }),
                (
                    doubted(THEIRS, 2, Doubt::Reconciling),
                    OVER,
                    write(doubted(MINE, 3, Doubt::Reconciling)),
                    Verdict::InDoubt { attempt: 3 },
                ),
                (Rejected(None), ALIVE, Keep, Verdict::Rejected),
                (Done(None), ALIVE, Keep, Verdict::Duplicate),
            ],
        );
    }
}

#[test]
fn a_lease_that_is_over_is_taken_over_or_doubted_by_the_stricter_guarantee() {
    let in_doubt = (write(doubted(MINE, 2, Doubt::Reconciling)), Verdict::InDoubt { attempt: 2 });
    for (record, claimer) in [(AMO, AMO), (AMO, EO), (EO, AMO)] {
        assert_eq!(apply(running(record, THEIRS, 1), OVER, &operation(claimer, Ask::Claim, 0)), in_doubt, "{record:?} {claimer:?}");
    }
    let taken = apply(running(EO, THEIRS, 1), OVER, &operation(EO, Ask::Claim, 0));
    assert_eq!(taken, (write(running(EO, MINE, 2)), Verdict::Granted { attempt: 2 }));
}

#[test]
fn a_claim_with_another_body() {
    let body = |number| Some(Fingerprint::new(number));
    let claim = with_body(operation(AMO, Ask::Claim, 0), 7);
    let theirs = Hold { fingerprint: body(8), ..hold(AMO, THEIRS, 1) };
    rows(
        &claim,
        &[
            (Marker::InProgress(theirs), ALIVE, Change::Keep, Verdict::Busy { remaining: Duration::from_secs(29) }),
            (Marker::InProgress(theirs), OVER, Change::Keep, Verdict::Busy { remaining: Duration::ZERO }),
            (Marker::InDoubt(theirs, Doubt::Waiting), ALIVE, Change::Keep, Verdict::Conflict),
            (Marker::Rejected(body(8)), ALIVE, Change::Keep, Verdict::Conflict),
            (Marker::Done(body(8)), ALIVE, Change::Keep, Verdict::Conflict),
            (Marker::Done(body(7)), ALIVE, Change::Keep, Verdict::Duplicate),
            (Marker::Done(None), ALIVE, Change::Keep, Verdict::Duplicate), // a bare `1` matches any body
        ],
    );
}

/// Every marker that is not the asker's own: another token, another attempt, or no holder at all.
fn not_mine() -> Vec<Marker> {
    let holders = [(THEIRS, 1), (MINE, 2)];
    let held = holders.into_iter().flat_map(|(token, attempt)| [running(AMO, token, attempt), doubted(token, attempt, Doubt::Waiting)]);
    held.chain([Marker::Absent, Marker::Cleared { attempt: 1 }, Marker::Rejected(None), Marker::Done(None)]).collect()
}

/// Checks that an operation loses on every marker that is not the asker's, but for those named.
fn loses_but(ask: Ask, guarantee: Guarantee, but: impl Fn(&Marker) -> bool) {
    for marker in not_mine().into_iter().filter(|marker| !but(marker)) {
        assert_eq!(apply(marker, ALIVE, &operation(guarantee, ask, 1)), (Change::Keep, Verdict::Lost), "{ask:?} on {marker:?}");
    }
}

fn nothing_there(marker: &Marker) -> bool {
    matches!(marker, Marker::Absent | Marker::Cleared { .. })
}

#[test]
fn renew() {
    for mine in [running(AMO, MINE, 1), doubted(MINE, 1, Doubt::Reconciling)] {
        rows(&operation(AMO, Ask::Renew, 1), &[(mine, OVER, write(mine), Verdict::Kept)]);
    }
    loses_but(Ask::Renew, AMO, |_| false);
}

#[test]
fn complete() {
    let done = |marker_lost| (write(Marker::Done(None)), Verdict::Done { marker_lost });
    let complete = operation(AMO, Ask::Complete, 1);
    for known in [running(AMO, MINE, 1), doubted(MINE, 1, Doubt::Waiting), doubted(THEIRS, 5, Doubt::Reconciling)] {
        assert_eq!(apply(known, OVER, &complete), done(false), "{known:?}");
    }
    for lost in [Marker::Absent, Marker::Cleared { attempt: 4 }] {
        assert_eq!(apply(lost, ALIVE, &complete), done(true), "{lost:?}");
    }
    rows(&complete, &[(Marker::Done(None), ALIVE, Change::Keep, Verdict::Done { marker_lost: false })]);
    loses_but(Ask::Complete, AMO, |marker| !matches!(marker, Marker::InProgress(_) | Marker::Rejected(_)));
}

#[test]
fn clear() {
    for (guarantee, effect, attempt, change) in [
        (AMO, Effect::Nothing, 1, Change::Delete),
        (EO, Effect::Nothing, 1, Change::Delete),
        (AMO, Effect::Nothing, 2, write(Marker::Cleared { attempt: 2 })),
        (EO, Effect::Unknown, 1, write(Marker::Cleared { attempt: 1 })),
        (EO, Effect::Unknown, 3, write(Marker::Cleared { attempt: 3 })),
    ] {
        let marker = running(guarantee, MINE, attempt);
        rows(&operation(guarantee, Ask::Clear(effect), attempt), &[(marker, OVER, change, Verdict::Kept)]);
    }
    let unknown = operation(AMO, Ask::Clear(Effect::Unknown), 1);
    rows(&unknown, &[(running(AMO, MINE, 1), ALIVE, Change::Keep, Verdict::Lost)]); // what is unknown is doubted, never cleared
    for marker in [Marker::Absent, Marker::Cleared { attempt: 1 }] {
        rows(&operation(AMO, Ask::Clear(Effect::Nothing), 1), &[(marker, ALIVE, Change::Keep, Verdict::Kept)]);
    }
    loses_but(Ask::Clear(Effect::Nothing), AMO, nothing_there);
}

#[test]
fn reject() {
    let cleared = |attempt| write(Marker::Cleared { attempt });
    for effect in [Effect::Nothing, Effect::Unknown] {
        let ask = Ask::Reject(effect);
        rows(&operation(AMO, ask, 1), &[(running(AMO, MINE, 1), OVER, write(Marker::Rejected(None)), Verdict::Kept)]);
        rows(&operation(EO, ask, 2), &[(running(EO, MINE, 2), OVER, cleared(2), Verdict::Kept)]);
        loses_but(ask, AMO, |_| false);
        loses_but(ask, EO, nothing_there);
    }
    rows(&operation(EO, Ask::Reject(Effect::Nothing), 1), &[(running(EO, MINE, 1), OVER, Change::Delete, Verdict::Kept)]);
    // The run may not be over: who runs it again after a redrive needs the higher fence.
    rows(&operation(EO, Ask::Reject(Effect::Unknown), 1), &[(running(EO, MINE, 1), OVER, cleared(1), Verdict::Kept)]);
}

#[test]
fn doubt() {
    let waiting = (write(doubted(MINE, 1, Doubt::Waiting)), Verdict::Kept);
    for marker in [running(AMO, MINE, 1), doubted(MINE, 1, Doubt::Reconciling), Marker::Absent, Marker::Cleared { attempt: 1 }] {
        assert_eq!(apply(marker, OVER, &operation(AMO, Ask::Doubt, 1)), waiting, "{marker:?}");
    }
    let later = (write(doubted(MINE, 3, Doubt::Waiting)), Verdict::Kept);
    assert_eq!(apply(Marker::Cleared { attempt: 3 }, OVER, &operation(AMO, Ask::Doubt, 1)), later, "the fence never steps back");
    loses_but(Ask::Doubt, AMO, nothing_there);
}

#[test]
fn resolve() {
    let mine = doubted(MINE, 1, Doubt::Reconciling);
    let happened = operation(AMO, Ask::Resolve(Finding::Happened), 1);
    rows(&happened, &[(mine, OVER, write(Marker::Done(None)), Verdict::Done { marker_lost: false })]);
    let did_not = operation(AMO, Ask::Resolve(Finding::DidNotHappen), 1);
    rows(&did_not, &[(mine, OVER, write(Marker::Cleared { attempt: 1 }), Verdict::Kept)]);
    for finding in [Finding::Happened, Finding::DidNotHappen] {
        loses_but(Ask::Resolve(finding), AMO, |_| false);
        rows(&operation(AMO, Ask::Resolve(finding), 1), &[(running(AMO, MINE, 1), ALIVE, Change::Keep, Verdict::Lost)]);
    }
}

#[test]
fn forget() {
    for seen in [Marker::Rejected(None), Marker::Done(None), doubted(THEIRS, 3, Doubt::Waiting)] {
        rows(&operation(AMO, Ask::Forget { seen }, 0), &[(seen, ALIVE, Change::Delete, Verdict::Kept)]);
        loses_but(Ask::Forget { seen }, AMO, |marker| *marker == seen);
    }
    let seen = running(AMO, THEIRS, 1);
    rows(&operation(AMO, Ask::Forget { seen }, 0), &[(seen, ALIVE, Change::Keep, Verdict::Lost)]); // what runs is not forgotten
}

#[test]
fn asking_again_after_a_lost_reply_gives_the_same_answer_or_a_look_that_converges() {
    for guarantee in [AMO, EO] {
        for (marker, ask) in [
            (Marker::Absent, Ask::Claim),
            (Marker::Cleared { attempt: 1 }, Ask::Claim),
            (running(guarantee, MINE, 1), Ask::Renew),
            (running(guarantee, MINE, 1), Ask::Complete),
            (running(guarantee, MINE, 1), Ask::Clear(Effect::Nothing)),
            (running(guarantee, MINE, 1), Ask::Doubt),
            (Marker::Absent, Ask::Doubt),
        ] {
            let asked = operation(guarantee, ask, 1);
            let (change, first) = apply(marker, ALIVE, &asked);
            let after = match change {
                Change::Write(marker, _) => marker,
                Change::Delete => Marker::Absent,
                Change::Keep => marker,
            };
            let (_, second) = apply(after, ALIVE, &asked);
            assert_eq!(first, second, "{ask:?} on {marker:?}");
        }
    }
}

#[test]
fn bare_is_the_literal_gate() {
    let bare = |ask| operation(Guarantee::Bare, ask, 1);
    rows(&bare(Ask::Claim), &[(Marker::Absent, ALIVE, write(Marker::Done(None)), Verdict::Granted { attempt: 1 })]);
    for marker in [Marker::Done(None), running(AMO, THEIRS, 1)] {
        rows(&bare(Ask::Claim), &[(marker, ALIVE, Change::Keep, Verdict::Duplicate)]);
    }
    for ask in [Ask::Clear(Effect::Nothing), Ask::Clear(Effect::Unknown), Ask::Reject(Effect::Unknown), Ask::Doubt] {
        rows(&bare(ask), &[(Marker::Done(None), ALIVE, Change::Delete, Verdict::Kept)]);
    }
    rows(&bare(Ask::Complete), &[(Marker::Done(None), ALIVE, Change::Keep, Verdict::Done { marker_lost: false })]);
}
