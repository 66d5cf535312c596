//! When a store expires its markers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::marker::{
    Attempts, Effect, Guarantee, Operation, OperationKind, Token, Verdict,
};
use oncegate_core::{Key, Store};

use crate::laws::fixtures::{
    AT_MOST_ONCE, CLOCK_TOLERANCE, CRASHED_ONCE, Claimant, DONE, DONE_WITH_LOST_MARKER,
    DOUBTED_ONCE, EFFECTIVELY_ONCE, LONG_LEASE, OTHER_TOKEN, OWN_TOKEN, fingerprint, granted, key,
    verdict, verdicts,
};

/// The shortest window that settings allow.
const MIN_WINDOW: Duration = Duration::from_secs(1);

/// A key, the operations that write its marker, and the verdict of a claim before the marker
/// expires.
struct FinishedKey {
    key: Key,
    /// The operations that write the marker.
    setup: Vec<Operation>,
    claim: Operation,
    is_expected: fn(&Verdict) -> bool,
}

fn finished_key(
    name: &str,
    operations: &[(Claimant, OperationKind)],
    claimer: Guarantee,
    is_expected: fn(&Verdict) -> bool,
) -> FinishedKey {
    let key = key(name);
    let setup = operations
        .iter()
        .map(|(claimant, kind)| claimant.operation(*kind, &key))
        .collect();
    FinishedKey {
        claim: Claimant::new(claimer, Token(99), 0)
            .fingerprint(fingerprint(7))
            .claim(&key),
        key,
        setup,
        is_expected,
    }
}

/// Done, rejected and cleared markers, and unresolved ones in effectively once, exist for the
/// window and are absent afterwards. An operation of the holder of an expired marker is refused.
pub async fn a_marker_expires_after_its_window(store: Arc<dyn Store>) {
    let claimant = |of, attempt| {
        Claimant::new(of, OWN_TOKEN, attempt)
            .lease(MIN_WINDOW / 2)
            .window(MIN_WINDOW)
    };
    let (at_most_once, effectively_once) =
        (claimant(AT_MOST_ONCE, 1), claimant(EFFECTIVELY_ONCE, 1));
    let is_busy = |verdict: &Verdict| matches!(verdict, Verdict::Busy { .. });
    let all = [
        finished_key(
            "done",
            &[
                (effectively_once, OperationKind::Claim),
                (effectively_once, OperationKind::Complete),
            ],
            EFFECTIVELY_ONCE,
            |it| *it == Verdict::Duplicate,
        ),
        finished_key(
            "done at most once",
            &[
                (at_most_once, OperationKind::Claim),
                (at_most_once, OperationKind::Complete),
            ],
            AT_MOST_ONCE,
            |it| *it == Verdict::Duplicate,
        ),
        finished_key(
            "done, body",
            &[(
                effectively_once.fingerprint(fingerprint(8)),
                OperationKind::Complete,
            )],
            EFFECTIVELY_ONCE,
            |it| *it == Verdict::Conflict,
        ),
        finished_key(
            "bare",
            &[(claimant(Guarantee::Bare, 1), OperationKind::Claim)],
            Guarantee::Bare,
            |it| *it == Verdict::Duplicate,
        ),
        finished_key(
            "rejected",
            &[
                (at_most_once, OperationKind::Claim),
                (at_most_once, OperationKind::Reject(Effect::Unknown)),
            ],
            AT_MOST_ONCE,
            |it| *it == Verdict::Rejected { attempt: 1 },
        ),
        finished_key(
            "in progress",
            &[(effectively_once.lease(LONG_LEASE), OperationKind::Claim)],
            EFFECTIVELY_ONCE,
            is_busy,
        ),
        finished_key(
            "in doubt",
            &[(
                effectively_once.fingerprint(fingerprint(8)),
                OperationKind::Doubt,
            )],
            EFFECTIVELY_ONCE,
            |it| *it == Verdict::Conflict,
        ),
    ];
    let setup: Vec<Operation> = all.iter().flat_map(|it| it.setup.clone()).collect();
    // Only a claim distinguishes a cleared marker from an absent one, and a claim changes the
    // marker. So each check has a key of its own.
    let cleared: Vec<Key> = ["cleared 0", "cleared 1"].map(key).into();
    let clear = |key: &Key| {
        [
            effectively_once.claim(key),
            effectively_once.operation(OperationKind::Clear(Effect::Unknown), key),
        ]
    };
    let setup: Vec<Operation> = setup
        .into_iter()
        .chain(cleared.iter().flat_map(clear))
        .collect();
    let before = Instant::now();
    verdicts(&*store, &setup).await;
    let written = Instant::now();

    tokio::time::sleep(MIN_WINDOW / 2).await;
    let claims: Vec<Operation> = all.iter().map(|it| it.claim.clone()).collect();
    let first = Claimant::new(EFFECTIVELY_ONCE, Token(98), 0).claim(&cleared[0]);
    let received = verdicts(&*store, &[&claims[..], &[first]].concat()).await;
    if before.elapsed() + CLOCK_TOLERANCE > MIN_WINDOW {
        return; // This machine was suspended: the markers may have expired before the check.
    }
    for (it, received) in all.iter().zip(&received) {
        assert!(
            (it.is_expected)(received),
            "{:?} within its window: {received:?}",
            it.key
        );
    }
    assert_eq!(
        received[all.len()],
        granted(2),
        "cleared, within its window"
    );

    tokio::time::sleep((MIN_WINDOW + CLOCK_TOLERANCE).saturating_sub(written.elapsed())).await;
    let late = Claimant {
        attempt: 1,
        ..effectively_once
    }
    .operation(OperationKind::Renew, &all[5].key);
    assert_eq!(
        verdict(&*store, late).await,
        Verdict::Lost,
        "an expired marker has no holder"
    );
    let second = Claimant::new(EFFECTIVELY_ONCE, Token(97), 0).claim(&cleared[1]);
    let received = verdicts(&*store, &[&claims[..], &[second]].concat()).await;
    for (name, received) in all
        .iter()
        .map(|it| &it.key)
        .chain([&cleared[1]])
        .zip(received)
    {
        assert_eq!(received, granted(1), "{name:?} after its window");
    }
    // A completion by the holder after its marker has expired reports a lost marker.
    let expired = Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1)
        .lease(LONG_LEASE)
        .window(MIN_WINDOW);
    let key = key("late completion");
    assert_eq!(verdict(&*store, expired.claim(&key)).await, granted(1));
    tokio::time::sleep(MIN_WINDOW + CLOCK_TOLERANCE).await;
    assert_eq!(
        verdict(&*store, expired.operation(OperationKind::Complete, &key)).await,
        DONE_WITH_LOST_MARKER
    );
}

/// Repeated duplicates do not extend the window of a marker.
pub async fn an_operation_without_effect_does_not_extend_a_window(store: Arc<dyn Store>) {
    let (done, rejected) = (key("done"), key("rejected"));
    let claimant = |of| Claimant::new(of, OWN_TOKEN, 1).window(MIN_WINDOW);
    let reject =
        claimant(AT_MOST_ONCE).operation(OperationKind::Reject(Effect::Nothing), &rejected);
    let setup = [
        claimant(EFFECTIVELY_ONCE).operation(OperationKind::Complete, &done),
        claimant(AT_MOST_ONCE).claim(&rejected),
        reject,
    ];
    assert_eq!(
        verdicts(&*store, &setup).await,
        [DONE_WITH_LOST_MARKER, granted(1), Verdict::Applied]
    );
    let written = Instant::now();
    let another = Claimant::new(AT_MOST_ONCE, OTHER_TOKEN, 1);
    let without_effect: Vec<Operation> = [&done, &rejected]
        .into_iter()
        .flat_map(|key| {
            [
                another.claim(key),
                another.operation(OperationKind::Complete, key),
                another.operation(OperationKind::Renew, key),
            ]
        })
        .collect();
    while written.elapsed() < MIN_WINDOW * 3 / 4 {
        let received = verdicts(&*store, &without_effect).await;
        let expected = [
            Verdict::Duplicate,
            DONE,
            Verdict::Lost,
            Verdict::Rejected { attempt: 1 },
            Verdict::Lost,
            Verdict::Lost,
        ];
        if written.elapsed() + CLOCK_TOLERANCE > MIN_WINDOW {
            return; // This machine was suspended: the markers may have expired.
        }
        assert_eq!(received, expected);
        tokio::time::sleep(MIN_WINDOW / 10).await;
    }
    tokio::time::sleep((MIN_WINDOW + CLOCK_TOLERANCE).saturating_sub(written.elapsed())).await;
    assert_eq!(
        verdicts(&*store, &[another.claim(&done), another.claim(&rejected)]).await,
        [granted(1); 2]
    );
}

/// Every write restarts the window: a renewal, a repeated claim, a doubt, a clear, a completion.
pub async fn every_write_restarts_the_window(store: Arc<dyn Store>) {
    let claimant = Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1)
        .lease(LONG_LEASE)
        .window(MIN_WINDOW);
    let another = Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 0);
    let cases = [
        ("renewed", OperationKind::Renew, Verdict::Applied),
        ("claimed again", OperationKind::Claim, granted(1)),
        ("doubted", OperationKind::Doubt, Verdict::Applied),
        (
            "cleared",
            OperationKind::Clear(Effect::Unknown),
            Verdict::Applied,
        ),
        ("completed", OperationKind::Complete, DONE),
    ];
    let all =
        |operation_of: &dyn Fn(&(&str, OperationKind, Verdict)) -> Operation| -> Vec<Operation> {
            cases.iter().map(operation_of).collect()
        };
    let before = Instant::now();
    assert_eq!(
        verdicts(&*store, &all(&|(name, _, _)| claimant.claim(&key(name)))).await,
        [granted(1); 5]
    );
    tokio::time::sleep(MIN_WINDOW * 3 / 5).await;
    let sent = Instant::now();
    let received = verdicts(
        &*store,
        &all(&|(name, kind, _)| claimant.operation(*kind, &key(name))),
    )
    .await;
    if before.elapsed() + CLOCK_TOLERANCE > MIN_WINDOW {
        return; // This machine was suspended: the markers may have expired before they were written again.
    }
    assert_eq!(received, cases.map(|(_, _, verdict)| verdict));
    // After the first window, and within the second.
    tokio::time::sleep(MIN_WINDOW * 3 / 5).await;
    let received = verdicts(&*store, &all(&|(name, _, _)| another.claim(&key(name)))).await;
    if sent.elapsed() + CLOCK_TOLERANCE > MIN_WINDOW {
        return;
    }
    let [renewed, again, doubted, cleared, completed] = received[..] else {
        panic!("five answers, not {received:?}")
    };
    assert!(
        matches!(
            (renewed, again),
            (Verdict::Busy { .. }, Verdict::Busy { .. })
        ),
        "{received:?}"
    );
    assert_eq!(
        [doubted, cleared, completed],
        [
            Verdict::InDoubt(DOUBTED_ONCE),
            granted(2),
            Verdict::Duplicate
        ]
    );
}

/// An unresolved marker expires by the terms of its claim, whatever the terms of a later renewal,
/// repeated claim or doubt of its holder are, for example after a restart with other settings.
pub async fn the_holders_window_decides(store: Arc<dyn Store>) {
    /// The name, the terms of the claim, the terms of the later write, and whether the marker still
    /// exists after the shortest window.
    type Case = (&'static str, Claimant, Claimant, bool);
    let effectively_once = Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1).lease(LONG_LEASE);
    let at_most_once = Claimant::new(AT_MOST_ONCE, OWN_TOKEN, 1)
        .lease(LONG_LEASE)
        .window(MIN_WINDOW);
    let cases: [Case; 4] = [
        (
            "with a longer window",
            effectively_once.window(MIN_WINDOW),
            effectively_once,
            false,
        ),
        (
            "as at most once",
            effectively_once.window(MIN_WINDOW),
            at_most_once,
            false,
        ),
        (
            "with a shorter window",
            effectively_once,
            effectively_once.window(MIN_WINDOW),
            true,
        ),
        (
            "as effectively once",
            at_most_once,
            effectively_once.window(MIN_WINDOW),
            true,
        ),
    ];
    let writes = [
        ("renewed", OperationKind::Renew, Verdict::Applied),
        ("claimed again", OperationKind::Claim, granted(1)),
        ("doubted", OperationKind::Doubt, Verdict::Applied),
    ];
    let (mut operations, mut expected, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for (change, holder, repeated, is_kept) in cases {
        for (write, kind, verdict) in writes {
            let key = key(format!("{write} {change}"));
            operations.extend([holder.claim(&key), repeated.operation(kind, &key)]);
            expected.extend([granted(1), verdict]);
            all.push((key, kind, is_kept));
        }
    }
    let before = Instant::now();
    let received = verdicts(&*store, &operations).await;
    if before.elapsed() + CLOCK_TOLERANCE > MIN_WINDOW {
        return; // This machine was suspended: markers with the short window may have expired before they were written again.
    }
    assert_eq!(received, expected);
    tokio::time::sleep(MIN_WINDOW + CLOCK_TOLERANCE).await;
    let another = Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 0);
    let claims: Vec<Operation> = all.iter().map(|(key, ..)| another.claim(key)).collect();
    for ((key, kind, is_kept), received) in all.iter().zip(verdicts(&*store, &claims).await) {
        let is_expected = match (is_kept, kind) {
            (false, _) => received == granted(1),
            (true, OperationKind::Doubt) => received == Verdict::InDoubt(DOUBTED_ONCE),
            (true, _) => matches!(received, Verdict::Busy { .. }),
        };
        assert!(
            is_expected,
            "{key:?} after the shortest window: {received:?}"
        );
    }
}

/// An unresolved marker in at most once does not expire after the window; otherwise a redelivery
/// after the window would start the handler although the outcome is unknown.
pub async fn an_unresolved_at_most_once_marker_outlives_the_window(store: Arc<dyn Store>) {
    let brief = |of, token, attempt| {
        Claimant::new(of, Token(token), attempt)
            .lease(MIN_WINDOW / 20)
            .window(MIN_WINDOW)
    };
    let at_most_once = brief(AT_MOST_ONCE, 1, 1);
    let [running, doubted, taken, reversed, renewed, late] = [
        "running",
        "doubted",
        "taken",
        "taken the other way",
        "renewed",
        "completed late",
    ]
    .map(key);
    let setup = [
        at_most_once.claim(&running),
        at_most_once.claim(&doubted),
        at_most_once.operation(OperationKind::Doubt, &doubted),
        brief(EFFECTIVELY_ONCE, 1, 1).claim(&taken),
        at_most_once.claim(&reversed),
        at_most_once.claim(&renewed),
        at_most_once.operation(OperationKind::Renew, &renewed),
        at_most_once.claim(&late),
    ];
    let before = Instant::now();
    verdicts(&*store, &setup).await;
    tokio::time::sleep(MIN_WINDOW / 20 + CLOCK_TOLERANCE).await;
    // If either the holder or the new claim is at most once, a takeover makes a doubt in at most
    // once.
    let takeovers = [
        brief(AT_MOST_ONCE, 2, 0).claim(&taken),
        brief(EFFECTIVELY_ONCE, 2, 0).claim(&reversed),
    ];
    let received = verdicts(&*store, &takeovers).await;
    if before.elapsed() + CLOCK_TOLERANCE > MIN_WINDOW {
        return; // This machine was suspended: markers in effectively once may have expired before the takeover.
    }
    assert_eq!(received, [Verdict::InDoubt(CRASHED_ONCE); 2]);
    tokio::time::sleep(MIN_WINDOW + CLOCK_TOLERANCE).await;
    let claims: Vec<Operation> = [&running, &doubted, &taken, &reversed, &renewed]
        .into_iter()
        .map(|key| brief(AT_MOST_ONCE, 3, 0).claim(key))
        .collect();
    let crashed_twice = Attempts {
        number: 3,
        base: 3,
        crashes: 2,
    };
    let expected = [
        CRASHED_ONCE,
        DOUBTED_ONCE,
        crashed_twice,
        crashed_twice,
        CRASHED_ONCE,
    ]
    .map(Verdict::InDoubt);
    assert_eq!(verdicts(&*store, &claims).await, expected);
    assert_eq!(
        verdict(
            &*store,
            at_most_once.operation(OperationKind::Complete, &late)
        )
        .await,
        DONE,
        "the marker still has its holder"
    );
}

/// A done marker expires after the window of the completion's terms, which may be a hundred years.
pub async fn a_window_may_be_long(store: Arc<dyn Store>) {
    let century = Duration::from_secs(100 * 365 * 24 * 3600);
    let claimer = Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1).window(MIN_WINDOW);
    let key = key("k");
    let completer = claimer.window(century);
    assert_eq!(
        verdicts(
            &*store,
            &[
                claimer.claim(&key),
                completer.operation(OperationKind::Complete, &key)
            ]
        )
        .await,
        [granted(1), DONE]
    );
    tokio::time::sleep(MIN_WINDOW + CLOCK_TOLERANCE).await;
    assert_eq!(
        verdict(
            &*store,
            Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 0).claim(&key)
        )
        .await,
        Verdict::Duplicate
    );
}
