//! What a holder is told, and whoever takes himself for one: each row but the claim's.

use std::sync::Arc;

use oncegate_core::Store;
use oncegate_core::marker::{Ask, Doubt, Effect, Finding, Guarantee, Hold, Marker, Verdict};

use crate::laws::ask::{
    AT_MOST_ONCE, Asker, BOTH, DONE, DONE_THOUGH_LOST, EFFECTIVELY_ONCE, HOLDERS_ASKS, LONG, MINE, THEIRS, WINDOW, body, doubted, granted,
    of_body, over, reconciled, running,
};
use crate::laws::rows::{Row, keep, row};

const EFFECTS: [Effect; 2] = [Effect::Nothing, Effect::Unknown];
const FINDINGS: [Finding; 2] = [Finding::Happened, Finding::DidNotHappen];
const FREE: [Marker; 2] = [Marker::Absent, Marker::Cleared { attempt: 3 }];

fn asks(guarantee: Guarantee, ask: Ask, attempt: u32) -> (Asker, Ask) {
    (Asker::new(guarantee, MINE, attempt), ask)
}

/// The holder of attempt 2 whose settings have changed since: what it holds stays on the terms that it was claimed on.
fn on_other_terms(ask: Ask) -> [(Asker, Ask); 2] {
    BOTH.map(|of| (Asker::new(of, MINE, 2).lease(LONG / 2).window(WINDOW / 2).body(body(8)), ask))
}

/// The holder renews what it runs and what it reconciles, also after its lease while nobody else has claimed.
pub async fn the_holder_renews(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        for given in
            [running(of, MINE, 2), over(running(of, MINE, 2)), doubted(of, MINE, 2), reconciled(MINE, 2), over(reconciled(MINE, 2))]
        {
            rows.push(row("renew: mine", given, asks(of, Ask::Renew, 2), Verdict::Kept, given));
            rows.extend(on_other_terms(Ask::Renew).map(|asked| row("renew: mine, on other terms", given, asked, Verdict::Kept, given)));
        }
    }
    keep(&*store, &rows).await;
}

/// The holder completes, also after its lease while nobody else has claimed. The fingerprint stays with the id.
pub async fn the_holder_completes(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        for given in [running(of, MINE, 2), over(running(of, MINE, 2))] {
            rows.push(row("complete: in progress, mine", given, asks(of, Ask::Complete, 2), DONE, Marker::Done(None)));
            let (asker, ask) = asks(of, Ask::Complete, 2);
            let asked = (asker.body(body(7)), ask);
            rows.push(row("complete: in progress, mine", of_body(given, body(7)), asked, DONE, Marker::Done(body(7))));
        }
    }
    keep(&*store, &rows).await;
}

/// A doubt is completed by whoever: only a holder completes, and knowing beats doubting.
pub async fn a_doubt_is_completed_by_whoever(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        for given in [doubted(of, MINE, 1), doubted(of, THEIRS, 5), reconciled(MINE, 2), reconciled(THEIRS, 5), over(reconciled(THEIRS, 5))]
        {
            rows.push(row("complete: in doubt, whoever's", given, asks(of, Ask::Complete, 1), DONE, Marker::Done(None)));
        }
    }
    keep(&*store, &rows).await;
}

/// Completing again is done, and keeps the first fingerprint.
pub async fn completing_again_is_done(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        for given in [Marker::Done(None), Marker::Done(body(7))] {
            let (asker, ask) = asks(of, Ask::Complete, 1);
            rows.push(row("complete: done", given, (asker.body(body(8)), ask), DONE, given));
        }
    }
    keep(&*store, &rows).await;
}

/// Completing what has gone in the meantime is done, and says that the marker was lost.
pub async fn completing_a_lost_marker_says_so(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        let asked = asks(of, Ask::Complete, 1);
        rows.extend(FREE.map(|given| row("complete: absent, cleared", given, asked, DONE_THOUGH_LOST, Marker::Done(None))));
    }
    keep(&*store, &rows).await;
}

/// A first attempt of which nothing happened leaves nothing behind.
pub async fn clearing_a_first_attempt_deletes_it(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        for given in [running(of, MINE, 1), over(running(of, MINE, 1))] {
            let asked = asks(of, Ask::Clear(Effect::Nothing), 1);
            rows.push(row("clear: in progress, mine, nothing happened, attempt 1", given, asked, Verdict::Kept, Marker::Absent));
        }
    }
    keep(&*store, &rows).await;
}

/// A later attempt, and one whose outcome is unknown, keeps its number when it is cleared: it is a fence.
pub async fn clearing_keeps_the_attempt(store: Arc<dyn Store>) {
    let name = "clear: in progress, mine, attempt > 1 or unknown";
    let cleared = |of, effect, attempt| {
        let asked = asks(of, Ask::Clear(effect), attempt);
        row(name, running(of, MINE, attempt), asked, Verdict::Kept, Marker::Cleared { attempt })
    };
    let rows = [
        cleared(AT_MOST_ONCE, Effect::Nothing, 2),
        cleared(AT_MOST_ONCE, Effect::Nothing, 3),
        cleared(EFFECTIVELY_ONCE, Effect::Nothing, 2),
        cleared(EFFECTIVELY_ONCE, Effect::Nothing, 3),
        cleared(EFFECTIVELY_ONCE, Effect::Unknown, 1),
        cleared(EFFECTIVELY_ONCE, Effect::Unknown, 2),
        cleared(EFFECTIVELY_ONCE, Effect::Unknown, 4),
    ];
    keep(&*store, &rows).await;
}

/// In at most once what is unknown is doubted, never cleared.
pub async fn an_unknown_outcome_is_not_cleared_in_at_most_once(store: Arc<dyn Store>) {
    let rows = [1, 4].map(|attempt| {
        let given = running(AT_MOST_ONCE, MINE, attempt);
        row("clear: unknown, at most once", given, asks(AT_MOST_ONCE, Ask::Clear(Effect::Unknown), attempt), Verdict::Lost, given)
    });
    keep(&*store, &rows).await;
}

/// What is free already stays as it is.
pub async fn clearing_what_is_free_changes_nothing(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        for effect in EFFECTS {
            let asked = asks(of, Ask::Clear(effect), 1);
            rows.extend(FREE.map(|given| row("clear: absent, cleared", given, asked, Verdict::Kept, given)));
        }
    }
    keep(&*store, &rows).await;
}

/// In at most once a rejected id is remembered, with the fingerprint of what was rejected.
pub async fn rejecting_is_remembered_in_at_most_once(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for effect in EFFECTS {
        for of in [None, body(7)] {
            for attempt in [1, 2, 3] {
                let given = of_body(running(AT_MOST_ONCE, MINE, attempt), of);
                let asked = asks(AT_MOST_ONCE, Ask::Reject(effect), attempt);
                rows.push(row("reject: in progress, mine, at most once", given, asked, Verdict::Kept, Marker::Rejected(of)));
            }
        }
        let asked = asks(AT_MOST_ONCE, Ask::Reject(effect), 1);
        rows.extend(FREE.map(|given| row("reject: absent, cleared, at most once", given, asked, Verdict::Lost, given)));
    }
    keep(&*store, &rows).await;
}

/// In effectively once a rejection is a clear.
pub async fn rejecting_clears_in_effectively_once(store: Arc<dyn Store>) {
    let name = "reject: in progress, mine, effectively once";
    let of = EFFECTIVELY_ONCE;
    let rejected =
        |effect, attempt, becomes| row(name, running(of, MINE, attempt), asks(of, Ask::Reject(effect), attempt), Verdict::Kept, becomes);
    let mut rows = vec![
        rejected(Effect::Nothing, 1, Marker::Absent),
        rejected(Effect::Nothing, 2, Marker::Cleared { attempt: 2 }),
        rejected(Effect::Nothing, 3, Marker::Cleared { attempt: 3 }),
        rejected(Effect::Unknown, 2, Marker::Cleared { attempt: 2 }),
        rejected(Effect::Unknown, 1, Marker::Cleared { attempt: 1 }),
        rejected(Effect::Unknown, 3, Marker::Cleared { attempt: 3 }),
    ];
    for effect in EFFECTS {
        let asked = asks(of, Ask::Reject(effect), 1);
        rows.extend(FREE.map(|given| row("reject: absent, cleared, effectively once", given, asked, Verdict::Kept, given)));
    }
    keep(&*store, &rows).await;
}

/// The holder doubts what it ran or reconciled: then nobody reconciles, and nothing else of its hold changes.
pub async fn the_holder_doubts(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        let asked = asks(of, Ask::Doubt, 2);
        for given in [running(of, MINE, 2), doubted(of, MINE, 2), of_body(running(of, MINE, 2), body(7))] {
            let becomes = match given {
                Marker::InProgress(hold) | Marker::InDoubt(hold, _) => waiting(hold),
                _ => unreachable!("each of these has a hold"),
            };
            rows.push(row("doubt: mine", given, asked, Verdict::Kept, becomes));
            rows.extend(on_other_terms(Ask::Doubt).map(|asked| row("doubt: mine, on other terms", given, asked, Verdict::Kept, becomes)));
        }
        rows.push(row("doubt: in doubt, mine", reconciled(MINE, 2), asked, Verdict::Kept, doubted(AT_MOST_ONCE, MINE, 2)));
    }
    keep(&*store, &rows).await;
}

fn waiting(hold: Hold) -> Marker {
    Marker::InDoubt(hold, Doubt::Waiting)
}

/// What is free is in doubt once somebody doubts it, under the higher of both attempts: the fence never steps back.
pub async fn what_is_free_can_be_doubted(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        for (given, attempt, fence) in [
            (Marker::Absent, 1, 1),
            (Marker::Absent, 4, 4),
            (Marker::Cleared { attempt: 3 }, 1, 3),
            (Marker::Cleared { attempt: 3 }, 3, 3),
            (Marker::Cleared { attempt: 3 }, 10, 10),
            (Marker::Cleared { attempt: 10 }, 9, 10),
        ] {
            rows.push(row("doubt: absent, cleared", given, asks(of, Ask::Doubt, attempt), Verdict::Kept, doubted(of, MINE, fence)));
        }
    }
    keep(&*store, &rows).await;
}

/// A doubt that is resolved as it was seen is done if it happened, and free under its attempt if it did not.
pub async fn a_doubt_is_resolved_as_it_was_seen(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        for given in [doubted(of, MINE, 2), reconciled(MINE, 2), over(reconciled(MINE, 2))] {
            let happened = asks(of, Ask::Resolve(Finding::Happened), 2);
            rows.push(row("resolve: happened", given, happened, DONE, Marker::Done(None)));
            let did_not = asks(of, Ask::Resolve(Finding::DidNotHappen), 2);
            rows.push(row("resolve: did not happen", given, did_not, Verdict::Kept, Marker::Cleared { attempt: 2 }));
        }
        // What runs is not resolved, and what is in doubt neither cleared nor rejected, not even by its holder.
        let given = running(of, MINE, 2);
        rows.extend(FINDINGS.map(|finding| row("resolve: in progress", given, asks(of, Ask::Resolve(finding), 2), Verdict::Lost, given)));
        for ask in EFFECTS.into_iter().flat_map(|effect| [Ask::Clear(effect), Ask::Reject(effect)]) {
            for given in [doubted(of, MINE, 2), reconciled(MINE, 2)] {
                rows.push(row("clear, reject: in doubt", given, asks(of, ask, 2), Verdict::Lost, given));
            }
        }
    }
    keep(&*store, &rows).await;
}

/// An operator forgets what is rejected, done or in doubt, if it still is what was seen; never what runs.
pub async fn an_operator_forgets_what_was_seen(store: Arc<dyn Store>) {
    let settled = [
        Marker::Rejected(None),
        Marker::Rejected(body(7)),
        Marker::Done(None),
        Marker::Done(body(7)),
        doubted(AT_MOST_ONCE, THEIRS, 3),
        doubted(AT_MOST_ONCE, THEIRS, 4),
        doubted(AT_MOST_ONCE, MINE, 3),
        doubted(EFFECTIVELY_ONCE, THEIRS, 3),
        reconciled(THEIRS, 3),
        of_body(reconciled(THEIRS, 3), body(7)),
    ];
    let others = [Marker::Absent, Marker::Cleared { attempt: 3 }, running(AT_MOST_ONCE, THEIRS, 3), running(EFFECTIVELY_ONCE, THEIRS, 3)];
    let all: Vec<Marker> = settled.into_iter().chain(others).collect();
    let mut rows = Vec::new();
    for of in BOTH {
        for given in &all {
            for seen in &all {
                let asked = asks(of, Ask::Forget { seen: *seen }, 0);
                rows.push(if given == seen && settled.contains(given) {
                    row("forget: as seen", *given, asked, Verdict::Kept, Marker::Absent)
                } else {
                    row("forget: anything else", *given, asked, Verdict::Lost, *given)
                });
            }
        }
    }
    keep(&*store, &rows).await;
}

/// Another's permit completes, renews, clears, rejects, doubts and resolves nothing: neither another token under the same
/// attempt, nor the same token under another attempt. What is settled stays settled.
pub async fn another_permit_changes_nothing(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for of in BOTH {
        let not_mine = [(THEIRS, 2), (MINE, 1), (MINE, 3), (THEIRS, 1)];
        let held = not_mine.into_iter().flat_map(|(token, attempt)| {
            let doubts = [doubted(of, token, attempt), reconciled(token, attempt.max(2))];
            [running(of, token, attempt), over(running(of, token, attempt))].into_iter().chain(doubts.into_iter().filter(|it| !mine(it)))
        });
        let settled = [Marker::Absent, Marker::Cleared { attempt: 2 }, Marker::Rejected(None), Marker::Done(None)];
        for given in held.chain(settled) {
            rows.extend(
                HOLDERS_ASKS
                    .into_iter()
                    .filter(|ask| !has_a_row_of_its_own(*ask, &given, of))
                    .map(|ask| row("any of these: anything else", given, asks(of, ask, 2), Verdict::Lost, given)),
            );
        }
    }
    keep(&*store, &rows).await;
}

/// Whether it belongs to this permit: [`MINE`], attempt 2.
fn mine(marker: &Marker) -> bool {
    matches!(marker, Marker::InProgress(hold) | Marker::InDoubt(hold, _) if hold.token == MINE && hold.attempt == 2)
}

/// What the table says more of than "anything else", where the permit is another's.
fn has_a_row_of_its_own(ask: Ask, given: &Marker, of: Guarantee) -> bool {
    match given {
        Marker::Absent | Marker::Cleared { .. } => match ask {
            Ask::Complete | Ask::Clear(_) | Ask::Doubt => true,
            Ask::Reject(_) => of == EFFECTIVELY_ONCE,
            _ => false,
        },
        Marker::InDoubt(..) | Marker::Done(_) => ask == Ask::Complete,
        Marker::InProgress(_) | Marker::Rejected(_) => false,
    }
}

/// Bare is the literal gate: a claim of what is not there writes a done marker, any failure deletes it, and nothing else
/// is looked at.
pub async fn bare_is_the_literal_gate(store: Arc<dyn Store>) {
    let bare = |ask| asks(Guarantee::Bare, ask, 1);
    let all = [
        Marker::Absent,
        Marker::Cleared { attempt: 1 },
        running(AT_MOST_ONCE, THEIRS, 1),
        over(running(EFFECTIVELY_ONCE, THEIRS, 1)),
        reconciled(MINE, 2),
        Marker::Rejected(None),
        Marker::Done(None),
        Marker::Done(body(7)),
    ];
    let mut rows: Vec<Row> = Vec::new();
    for given in all {
        rows.push(match given {
            Marker::Absent => row("bare: claim, absent", given, bare(Ask::Claim), granted(1), Marker::Done(None)),
            _ => row("bare: claim, anything else", given, bare(Ask::Claim), Verdict::Duplicate, given),
        });
        rows.push(row("bare: renew", given, bare(Ask::Renew), Verdict::Kept, given));
        rows.push(row("bare: complete", given, bare(Ask::Complete), DONE, given));
        for ask in HOLDERS_ASKS.into_iter().filter(|ask| !matches!(ask, Ask::Renew | Ask::Complete)) {
            rows.push(row("bare: failure", given, bare(ask), Verdict::Kept, Marker::Absent));
        }
    }
    keep(&*store, &rows).await;
}
