//! Tests of the transitions of the lifecycle. The end of the lease, an outage of the store and a
//! drain are tested in every stage.

use std::time::Duration;

use super::*;
use crate::marker::{Attempts, Verdict as V};

const GRANT: Grant = Grant {
    attempts: Attempts::new(1),
    failures: 0,
};
const HISTORY: History = History {
    failures: 0,
    freshness: Freshness::Fresh,
};

fn policy(guarantee: Guarantee) -> Policy {
    Policy {
        guarantee,
        max_attempts: 3,
        max_crashes: 5,
        max_inline_retries: 2,
        max_reconciles: 2,
        max_claim_retries: 2,
        backoff: Duration::from_millis(100),
        longest_backoff: Duration::from_secs(10),
        outage: Outage::Hold,
    }
}

fn at_most_once() -> Policy {
    policy(Guarantee::AtMostOnce)
}

fn effectively_once() -> Policy {
    policy(Guarantee::EffectivelyOnce)
}

fn pause(tries: u32) -> Duration {
    at_most_once().pause(tries)
}

fn grant(attempt: u32) -> Grant {
    Grant {
        attempts: Attempts::new(attempt),
        failures: 0,
    }
}

/// Every stage of a delivery before it is settled.
fn stages() -> Vec<Stage> {
    use Stage::*;
    vec![
        New(HISTORY),
        Claiming(HISTORY, ClaimTries(0)),
        AwaitingClaim(HISTORY, ClaimTries(1), ClaimReply::Answered),
        AwaitingClaim(HISTORY, ClaimTries(1), ClaimReply::Unknown),
        ClaimingInDrain(HISTORY),
        Withdrawing(GRANT, AfterWithdrawal::Release),
        Withdrawing(GRANT, AfterWithdrawal::AwaitIsolation),
        Withdrawing(GRANT, AfterWithdrawal::Reject),
        Withdrawing(GRANT, AfterWithdrawal::ReleaseLater),
        Withdrawing(GRANT, AfterWithdrawal::ClaimAgain),
        Ready(GRANT),
        Running(GRANT, Tries(0)),
        Pausing(GRANT, Tries(1)),
        Doubting(GRANT, DoubtCause::HandlerReported, AfterDoubt::Reconcile),
        Doubting(GRANT, DoubtCause::Interrupted, AfterDoubt::Release),
        Doubting(GRANT, DoubtCause::Interrupted, AfterDoubt::ReleaseAtOnce),
        Doubting(GRANT, DoubtCause::Interrupted, AfterDoubt::Reject),
        Reconciling(GRANT, Tries(0), DoubtCause::HandlerReported),
        ReconcilePausing(GRANT, Tries(1), DoubtCause::HandlerReported),
        Resolving(GRANT, Finding::Happened),
        Resolving(GRANT, Finding::DidNotHappen),
        Completing(GRANT),
        Clearing(GRANT, Effect::Nothing, Duration::ZERO),
        Rejecting(GRANT, Reason::Refused, Effect::Nothing),
        WithoutClaim(HISTORY),
    ]
}

#[test]
fn a_delivery_with_an_id_is_claimed_and_one_without_is_rejected() {
    let policy = at_most_once();
    assert_eq!(
        transition(Stage::New(HISTORY), Event::NoId, &policy),
        reject(Reason::MissingId)
    );
    assert_eq!(
        transition(Stage::New(HISTORY), Event::UnusableId, &policy),
        reject(Reason::UnusableId)
    );
    assert_eq!(
        transition(Stage::New(HISTORY), Event::Arrived, &policy),
        (Stage::Claiming(HISTORY, ClaimTries(0)), Action::NewClaim)
    );
}

#[test]
fn each_verdict_on_a_claim() {
    let answer = |verdict, policy: &Policy| {
        transition(
            Stage::Claiming(HISTORY, ClaimTries(0)),
            Event::Answer(verdict),
            policy,
        )
    };
    for policy in [at_most_once(), effectively_once()] {
        assert_eq!(
            answer(V::Granted(Attempts::new(3)), &policy),
            (Stage::Ready(grant(3)), Action::AwaitRun)
        );
        assert_eq!(
            answer(V::Granted(Attempts::new(4)), &policy),
            rejecting(grant(4), Reason::AttemptsSpent, Effect::Nothing)
        );
        let reconciling = (
            Stage::Reconciling(grant(2), Tries(0), DoubtCause::Interrupted),
            Action::Reconcile,
        );
        assert_eq!(answer(V::InDoubt(Attempts::new(2)), &policy), reconciling);
        // A handler or a `reconcile` that crashes its process each time does not run again without
        // end.
        let crashed = |crashes| Attempts {
            crashes,
            ..Attempts::none_counted(9)
        };
        let (last, one_more) = (crashed(policy.max_crashes), crashed(policy.max_crashes + 1));
        assert!(matches!(
            answer(V::Granted(last), &policy),
            (Stage::Ready(_), Action::AwaitRun)
        ));
        assert!(matches!(
            answer(V::InDoubt(last), &policy),
            (Stage::Reconciling(..), Action::Reconcile)
        ));
        let grant = Grant {
            attempts: one_more,
            failures: 0,
        };
        assert_eq!(
            answer(V::Granted(one_more), &policy),
            rejecting(grant, Reason::CrashesSpent, Effect::Nothing)
        );
        let sent_to_the_in_doubt_queue = (
            Stage::Doubting(grant, DoubtCause::Interrupted, AfterDoubt::Reject),
            Action::Apply,
        );
        assert_eq!(
            answer(V::InDoubt(one_more), &policy),
            sent_to_the_in_doubt_queue
        );
        assert_eq!(answer(V::Duplicate, &policy), accept(ProofKind::Duplicate));
        assert_eq!(answer(V::Conflict, &policy), reject(Reason::Conflict));
        assert_eq!(
            answer(V::Rejected { attempt: 2 }, &policy),
            reject(Reason::RejectedBefore)
        );
        let busy = V::Busy {
            remaining: Duration::from_secs(9),
        };
        assert_eq!(
            answer(busy, &policy),
            (
                Stage::AwaitingClaim(HISTORY, ClaimTries(1), ClaimReply::Answered),
                Action::Wake(pause(0) + CLOCK_MARGIN)
            )
        );
    }
}

#[test]
fn the_claim_of_an_id_that_another_holder_has_is_repeated_and_then_the_delivery_released() {
    let policy = at_most_once();
    let busy = Event::Answer(V::Busy {
        remaining: Duration::ZERO,
    });
    let mut stage = Stage::Claiming(HISTORY, ClaimTries(0));
    for _ in 0..policy.max_claim_retries {
        let (waiting, action) = transition(stage, busy, &policy);
        assert_eq!(action, Action::Wake(CLOCK_MARGIN));
        let (claiming, action) = transition(waiting, Event::Woke, &policy);
        assert_eq!(action, Action::Apply); // with the same token
        stage = claiming;
    }
    // Redelivered at the end of the holder's lease, or earlier.
    let pause = policy.pause(policy.max_claim_retries);
    for (remaining, after) in [
        (Duration::ZERO, Duration::ZERO),
        (pause / 2, pause / 2),
        (pause * 2, pause),
    ] {
        assert_eq!(
            transition(stage, Event::Answer(V::Busy { remaining }), &policy),
            release(after + CLOCK_MARGIN, 0)
        );
    }
}

#[test]
fn max_attempts_counts_the_attempts_of_the_marker_and_the_failures_of_the_delivery() {
    let policy = effectively_once();
    for (attempt, failures, spent) in [
        (1, 0, false),
        (2, 0, false),
        (3, 0, true),
        (1, 1, false),
        (1, 2, true),
    ] {
        let grant = Grant {
            attempts: Attempts::new(attempt),
            failures,
        };
        let (stage, _) = transition(
            Stage::Running(grant, Tries(policy.max_inline_retries)),
            Event::Returned(Outcome::Retry),
            &policy,
        );
        assert_eq!(
            matches!(stage, Stage::Rejecting(_, Reason::AttemptsSpent, _)),
            spent,
            "{grant:?}"
        );
    }
    // A redriven message has all of `max_attempts` again, however high its attempt number.
    let redriven = V::Granted(Attempts {
        number: 9,
        base: 8,
        crashes: 0,
    });
    let (stage, action) = transition(
        Stage::Claiming(HISTORY, ClaimTries(0)),
        Event::Answer(redriven),
        &policy,
    );
    assert!(
        matches!(stage, Stage::Ready(_)) && action == Action::AwaitRun,
        "{stage:?}"
    );
    let failed_too_often = History {
        failures: 3,
        freshness: Freshness::Fresh,
    };
    let (stage, _) = transition(
        Stage::Claiming(failed_too_often, ClaimTries(0)),
        Event::Answer(V::Granted(Attempts::new(1))),
        &policy,
    );
    assert!(
        matches!(stage, Stage::Withdrawing(_, AfterWithdrawal::Reject)),
        "an operator may have freed the id for another delivery: {stage:?}"
    );
    assert_eq!(
        transition(stage, Event::Answer(V::Applied), &policy),
        reject(Reason::AttemptsSpent)
    );
}

#[test]
fn only_a_run_that_failed_counts_as_a_failure() {
    let policy = effectively_once();
    let history = History {
        failures: 1,
        ..HISTORY
    };
    let grant = Grant {
        failures: 1,
        ..GRANT
    };
    let failures = |stage, event| match transition(stage, event, &policy) {
        (_, Action::Settle(Settlement::Release { failures, .. })) => failures,
        (Stage::Clearing(grant, ..) | Stage::Withdrawing(grant, _), _) => grant.failures,
        other => panic!("{other:?}"),
    };
    let last_inline_try = Stage::Running(grant, Tries(policy.max_inline_retries));
    for outcome in [Outcome::Retry, Outcome::Unknown(DoubtCause::Panicked)] {
        assert_eq!(failures(last_inline_try, Event::Returned(outcome)), 2);
    }
    let busy = Event::Answer(V::Busy {
        remaining: Duration::ZERO,
    });
    assert_eq!(
        failures(
            Stage::Claiming(history, ClaimTries(policy.max_claim_retries)),
            busy
        ),
        1,
        "another delivery held the id"
    );
    assert_eq!(
        failures(last_inline_try, Event::LeaseOver),
        1,
        "the marker counts the takeover"
    );
    for waiting in [
        Stage::New(history),
        Stage::AwaitingClaim(history, ClaimTries(1), ClaimReply::Answered),
        Stage::Ready(grant),
    ] {
        assert_eq!(
            failures(waiting, Event::Drain),
            1,
            "a shutdown does not count as a failure"
        );
    }
}

#[test]
fn at_most_once_an_old_message_whose_marker_is_absent_is_in_doubt() {
    let old = Stage::Claiming(
        History {
            failures: 0,
            freshness: Freshness::TooOld,
        },
        ClaimTries(0),
    );
    let granted = Event::Answer(V::Granted(Attempts::new(1)));
    assert_eq!(
        transition(old, granted, &at_most_once()),
        (
            Stage::Doubting(GRANT, DoubtCause::TooOld, AfterDoubt::Reconcile),
            Action::Apply
        )
    );
    assert_eq!(
        transition(old, granted, &effectively_once()),
        (Stage::Ready(GRANT), Action::AwaitRun)
    );
    // An operator redrove the id when it had no marker. If an attempt has crashed since then, the
    // crash is the more likely cause.
    for (crashes, cause) in [(0, DoubtCause::TooOld), (1, DoubtCause::Interrupted)] {
        let attempts = Attempts {
            crashes,
            ..Attempts::none_counted(6)
        };
        let reconciling = Stage::Reconciling(
            Grant {
                attempts,
                failures: 0,
            },
            Tries(0),
            cause,
        );
        assert_eq!(
            transition(old, Event::Answer(V::InDoubt(attempts)), &at_most_once()),
            (reconciling, Action::Reconcile)
        );
    }
}

#[test]
fn each_outcome_of_a_handler() {
    let returned = |outcome, policy: &Policy| {
        transition(
            Stage::Running(GRANT, Tries(0)),
            Event::Returned(outcome),
            policy,
        )
    };
    for policy in [at_most_once(), effectively_once()] {
        assert_eq!(
            transition(Stage::Ready(GRANT), Event::MayRun, &policy),
            (Stage::Running(GRANT, Tries(0)), Action::Run)
        );
        assert_eq!(
            returned(Outcome::Done, &policy),
            (Stage::Completing(GRANT), Action::Apply)
        );
        assert_eq!(
            returned(Outcome::Retry, &policy),
            (Stage::Pausing(GRANT, Tries(1)), Action::Wake(pause(0)))
        );
        assert_eq!(
            returned(Outcome::Reject, &policy),
            rejecting(GRANT, Reason::Refused, Effect::Nothing)
        );
        assert_eq!(
            returned(Outcome::Unreadable, &policy),
            rejecting(GRANT, Reason::Unreadable, Effect::Nothing)
        );
        assert_eq!(
            returned(Outcome::NoRoute, &policy),
            rejecting(GRANT, Reason::NoRoute, Effect::Nothing)
        );
        assert_eq!(
            transition(Stage::Pausing(GRANT, Tries(1)), Event::Woke, &policy),
            (Stage::Running(GRANT, Tries(1)), Action::Run)
        );
    }
    let last = transition(
        Stage::Running(GRANT, Tries(2)),
        Event::Returned(Outcome::Retry),
        &at_most_once(),
    );
    assert_eq!(
        last,
        (
            Stage::Clearing(GRANT.failed(), Effect::Nothing, pause(2)),
            Action::Apply
        )
    );
    let bare = transition(
        Stage::Running(GRANT, Tries(0)),
        Event::Returned(Outcome::Retry),
        &policy(Guarantee::Bare),
    );
    assert!(
        matches!(bare, (Stage::Clearing(..), Action::Apply)),
        "bare deletes after any failure"
    );
}

#[test]
fn an_unknown_outcome_is_never_retried_inline() {
    for cause in [
        DoubtCause::HandlerReported,
        DoubtCause::Panicked,
        DoubtCause::TimedOut,
    ] {
        let unknown = Event::Returned(Outcome::Unknown(cause));
        let doubted = (
            Stage::Doubting(GRANT, cause, AfterDoubt::Reconcile),
            Action::Apply,
        );
        assert_eq!(
            transition(Stage::Running(GRANT, Tries(0)), unknown, &at_most_once()),
            doubted
        );
        let cleared = (
            Stage::Clearing(GRANT.failed(), Effect::Unknown, pause(1)),
            Action::Apply,
        );
        assert_eq!(
            transition(
                Stage::Running(GRANT, Tries(0)),
                unknown,
                &effectively_once()
            ),
            cleared
        );
        let spent = transition(
            Stage::Running(grant(3), Tries(0)),
            unknown,
            &effectively_once(),
        );
        assert_eq!(
            spent,
            rejecting(grant(3), Reason::AttemptsSpent, Effect::Unknown)
        );
    }
}

#[test]
fn each_result_of_reconcile() {
    let policy = at_most_once();
    let reconciling = |tries| Stage::Reconciling(GRANT, Tries(tries), DoubtCause::HandlerReported);
    let doubting = Stage::Doubting(GRANT, DoubtCause::HandlerReported, AfterDoubt::Reconcile);
    assert_eq!(
        transition(doubting, Event::Answer(V::Applied), &policy),
        (reconciling(0), Action::Reconcile)
    );
    for finding in [Finding::Happened, Finding::DidNotHappen] {
        let resolving = (Stage::Resolving(GRANT, finding), Action::Apply);
        assert_eq!(
            transition(reconciling(0), Event::Reconciled(Some(finding)), &policy),
            resolving
        );
    }
    let paused = Stage::ReconcilePausing(GRANT, Tries(1), DoubtCause::HandlerReported);
    assert_eq!(
        transition(reconciling(0), Event::Reconciled(None), &policy),
        (paused, Action::Wake(pause(0)))
    );
    assert_eq!(
        transition(paused, Event::Woke, &policy),
        (reconciling(1), Action::Reconcile)
    );
    let ending_the_lease = Stage::Doubting(GRANT, DoubtCause::HandlerReported, AfterDoubt::Reject);
    assert_eq!(
        transition(reconciling(1), Event::Reconciled(None), &policy),
        (ending_the_lease, Action::Apply)
    );
    assert_eq!(
        transition(reconciling(0), Event::CannotReconcile, &policy),
        (ending_the_lease, Action::Apply)
    );
    assert_eq!(
        transition(ending_the_lease, Event::Answer(V::Applied), &policy),
        reject(Reason::InDoubt(DoubtCause::HandlerReported))
    );
    let happened = transition(
        Stage::Resolving(GRANT, Finding::Happened),
        Event::Answer(V::Done { marker_lost: false }),
        &policy,
    );
    assert_eq!(happened, accept(ProofKind::Resolved));
    let after_it_did_not = |grant| {
        transition(
            Stage::Resolving(grant, Finding::DidNotHappen),
            Event::Answer(V::Applied),
            &policy,
        )
    };
    assert_eq!(after_it_did_not(GRANT), release(pause(1), 0));
    let after_the_last = Grant {
        attempts: Attempts {
            number: policy.max_attempts,
            base: 0,
            crashes: 0,
        },
        ..GRANT
    };
    assert_eq!(
        after_it_did_not(after_the_last),
        (Stage::Claiming(HISTORY, ClaimTries(0)), Action::NewClaim)
    );
    let after_a_crash = Grant {
        attempts: Attempts::none_counted(2),
        ..GRANT
    };
    assert_eq!(
        after_it_did_not(after_a_crash),
        (Stage::Claiming(HISTORY, ClaimTries(0)), Action::NewClaim)
    );
}

#[test]
fn a_delivery_is_settled_when_the_store_has_recorded_its_outcome() {
    let policy = at_most_once();
    for marker_lost in [false, true] {
        assert_eq!(
            transition(
                Stage::Completing(GRANT),
                Event::Answer(V::Done { marker_lost }),
                &policy
            ),
            accept(ProofKind::Completed)
        );
    }
    let after = Duration::from_secs(3);
    for verdict in [V::Applied, V::Lost] {
        assert_eq!(
            transition(
                Stage::Clearing(GRANT, Effect::Nothing, after),
                Event::Answer(verdict),
                &policy
            ),
            release(after, 0)
        );
    }
    assert_eq!(
        transition(
            Stage::Rejecting(GRANT, Reason::Refused, Effect::Nothing),
            Event::Answer(V::Applied),
            &policy
        ),
        reject(Reason::Refused)
    );
}

#[test]
fn after_a_lost_claim_the_id_is_claimed_again_with_a_new_token() {
    let claiming_again = (Stage::Claiming(HISTORY, ClaimTries(0)), Action::NewClaim);
    for stage in [
        Stage::Completing(GRANT),
        Stage::Rejecting(GRANT, Reason::Refused, Effect::Nothing),
        Stage::Resolving(GRANT, Finding::Happened),
        Stage::Resolving(GRANT, Finding::DidNotHappen),
        Stage::Doubting(GRANT, DoubtCause::HandlerReported, AfterDoubt::Reconcile),
        Stage::Doubting(GRANT, DoubtCause::HandlerReported, AfterDoubt::Reject),
    ] {
        assert_eq!(
            transition(stage, Event::Answer(V::Lost), &at_most_once()),
            claiming_again,
            "{stage:?}"
        );
    }
}

#[test]
fn only_effectively_once_with_pass_through_runs_without_the_store() {
    let through = Policy {
        outage: Outage::PassThrough,
        ..effectively_once()
    };
    let claiming = Stage::Claiming(HISTORY, ClaimTries(0));
    assert_eq!(
        transition(claiming, Event::Unavailable, &through),
        (Stage::WithoutClaim(HISTORY), Action::Run)
    );
    for policy in [
        effectively_once(),
        Policy {
            outage: Outage::PassThrough,
            ..at_most_once()
        },
    ] {
        assert!(matches!(
            transition(claiming, Event::Unavailable, &policy),
            (
                Stage::AwaitingClaim(_, _, ClaimReply::Unknown),
                Action::Wake(_)
            )
        ));
    }
    let without_claim = Stage::WithoutClaim(HISTORY);
    assert_eq!(
        transition(without_claim, Event::Returned(Outcome::Done), &through),
        accept(ProofKind::PassedWithoutStore)
    );
    assert_eq!(
        transition(without_claim, Event::Returned(Outcome::Reject), &through),
        reject(Reason::Refused)
    );
    assert_eq!(
        transition(
            without_claim,
            Event::Returned(Outcome::Unreadable),
            &through
        ),
        reject(Reason::Unreadable)
    );
    assert_eq!(
        transition(without_claim, Event::Returned(Outcome::NoRoute), &through),
        reject(Reason::NoRoute)
    );
    assert_eq!(
        transition(without_claim, Event::Returned(Outcome::Retry), &through),
        release(pause(0), 1)
    );
    let last = History {
        failures: through.max_attempts - 1,
        ..HISTORY
    };
    assert_eq!(
        transition(
            Stage::WithoutClaim(last),
            Event::Returned(Outcome::Retry),
            &through
        ),
        reject(Reason::AttemptsSpent)
    );
}

#[test]
fn a_completion_is_repeated_after_the_end_of_the_lease() {
    for policy in [at_most_once(), effectively_once()] {
        assert_eq!(
            transition(Stage::Completing(GRANT), Event::LeaseOver, &policy),
            (Stage::Completing(GRANT), Action::Wait)
        );
    }
}

#[test]
fn the_end_of_the_lease_in_every_stage() {
    use Stage::*;
    for stage in stages() {
        for policy in [at_most_once(), effectively_once()] {
            let expected = match stage {
                Ready(_) => (Claiming(HISTORY, ClaimTries(0)), Action::Apply),
                Running(..) if policy.guarantee == Guarantee::AtMostOnce => (
                    Doubting(GRANT, DoubtCause::Interrupted, AfterDoubt::Release),
                    Action::Apply,
                ),
                Running(..) | Reconciling(..) | ReconcilePausing(..) | WithoutClaim(_) => {
                    release(pause(0), 0)
                }
                Pausing(..) => (
                    Clearing(GRANT.failed(), Effect::Nothing, pause(0)),
                    Action::Apply,
                ),
                // No handler runs, and the store compares the token and the attempt of the
                // operation.
                _ => (stage, Action::Wait),
            };
            assert_eq!(
                transition(stage, Event::LeaseOver, &policy),
                expected,
                "{stage:?} {:?}",
                policy.guarantee
            );
        }
    }
}

#[test]
fn an_unanswered_operation_in_every_stage_is_repeated_with_the_same_token() {
    use Stage::*;
    for stage in stages() {
        let (after, action) = transition(stage, Event::Unavailable, &at_most_once());
        match stage {
            Claiming(..) => assert!(matches!(
                (after, action),
                (AwaitingClaim(_, _, ClaimReply::Unknown), Action::Wake(_))
            )),
            ClaimingInDrain(_) | Withdrawing(..) | Doubting(..) | Resolving(..) | Completing(_)
            | Clearing(..) | Rejecting(..) => {
                assert_eq!((after, action), (stage, Action::Wake(pause(3))));
                let (woken, action) = transition(after, Event::Woke, &at_most_once());
                assert_eq!(woken, stage);
                assert!(matches!(action, Action::Apply), "{stage:?}: {action:?}");
            }
            _ => assert_eq!(
                (after, action),
                (stage, Action::Wait),
                "no operation was sent"
            ),
        }
    }
}

#[test]
fn a_drain_in_every_stage_releases_deliveries_whose_handler_has_not_started() {
    use Stage::*;
    for stage in stages() {
        let expected = match stage {
            New(_) | AwaitingClaim(_, _, ClaimReply::Answered) => release(Duration::ZERO, 0),
            ReconcilePausing(..) => (
                Doubting(
                    GRANT,
                    DoubtCause::HandlerReported,
                    AfterDoubt::ReleaseAtOnce,
                ),
                Action::Apply,
            ),
            Claiming(..) => (ClaimingInDrain(HISTORY), Action::Wait),
            AwaitingClaim(_, _, ClaimReply::Unknown) => (ClaimingInDrain(HISTORY), Action::Apply),
            Ready(_) => (Withdrawing(GRANT, AfterWithdrawal::Release), Action::Apply),
            Pausing(..) => (
                Clearing(GRANT, Effect::Nothing, Duration::ZERO),
                Action::Apply,
            ),
            _ => (stage, Action::Wait),
        };
        assert_eq!(
            transition(stage, Event::Drain, &at_most_once()),
            expected,
            "{stage:?}"
        );
        assert_eq!(
            transition(stage, Event::StopNow, &at_most_once()),
            (Settled, Action::Abandon),
            "{stage:?}"
        );
    }
}

#[test]
fn the_drain_timeout_in_every_stage_records_running_handlers_as_unknown() {
    use Stage::*;
    let bare = policy(Guarantee::Bare);
    let released_in_doubt = |cause| {
        (
            Doubting(GRANT, cause, AfterDoubt::ReleaseAtOnce),
            Action::Apply,
        )
    };
    for policy in [at_most_once(), effectively_once(), bare] {
        for stage in stages() {
            let expected = match stage {
                New(_) | AwaitingClaim(..) | Claiming(..) | Ready(_) | Pausing(..)
                | ReconcilePausing(..) => transition(stage, Event::Drain, &policy),
                Running(..) if policy.guarantee == Guarantee::AtMostOnce => {
                    released_in_doubt(DoubtCause::Interrupted)
                }
                Running(..) => (
                    Clearing(GRANT.failed(), Effect::Unknown, Duration::ZERO),
                    Action::Apply,
                ),
                WithoutClaim(_) => release(Duration::ZERO, 1),
                Reconciling(_, _, cause) => released_in_doubt(cause),
                Doubting(_, cause, AfterDoubt::Reconcile) => (
                    Doubting(GRANT, cause, AfterDoubt::ReleaseAtOnce),
                    Action::Wait,
                ),
                _ => (stage, Action::Wait),
            };
            assert_eq!(
                transition(stage, Event::DrainOver, &policy),
                expected,
                "{:?}: {stage:?}",
                policy.guarantee
            );
        }
    }
}

#[test]
fn the_drain_timeout_records_the_same_as_a_handler_timeout_and_releases_at_once() {
    let timed_out = Event::Returned(Outcome::Unknown(DoubtCause::TimedOut));
    for policy in [at_most_once(), effectively_once(), policy(Guarantee::Bare)] {
        let running = Stage::Running(GRANT, Tries(0));
        let (stage, action) = transition(running, Event::DrainOver, &policy);
        assert_eq!(action, transition(running, timed_out, &policy).1);
        let (_, settled) = transition(stage, Event::Answer(V::Applied), &policy);
        let (after, failures) = match policy.guarantee {
            Guarantee::AtMostOnce => (Duration::ZERO, 0),
            Guarantee::EffectivelyOnce | Guarantee::Bare => (Duration::ZERO, 1),
        };
        assert_eq!(
            settled,
            Action::Settle(Settlement::Release { after, failures })
        );
    }
    // The same after the last attempt: the next claim dead-letters the message without a run.
    let policy = effectively_once();
    let last = Stage::Running(grant(policy.max_attempts), Tries(0));
    let (stage, _) = transition(last, Event::DrainOver, &policy);
    assert!(matches!(stage, Stage::Clearing(_, Effect::Unknown, _)));
}

#[test]
fn no_run_starts_after_the_drain_timeout() {
    let answers = [
        Event::Answer(V::Granted(Attempts::new(2))),
        Event::Answer(V::InDoubt(Attempts::new(2))),
        Event::Answer(V::Applied),
        Event::Answer(V::Done { marker_lost: false }),
        Event::Answer(V::Lost),
        Event::Answer(V::Duplicate),
        Event::Unavailable,
        Event::UnreadableMarker,
        Event::Woke,
        Event::LeaseOver,
        Event::MayRun,
    ];
    let through = Policy {
        outage: Outage::PassThrough,
        ..effectively_once()
    };
    for policy in [at_most_once(), effectively_once(), through] {
        for stage in stages() {
            let (stage, _) = transition(stage, Event::DrainOver, &policy);
            for event in answers {
                let (_, action) = transition(stage, event, &policy);
                assert!(
                    !matches!(action, Action::Run | Action::Reconcile | Action::AwaitRun),
                    "{stage:?} {event:?}: {action:?}"
                );
            }
        }
    }
}

#[test]
fn a_claim_that_is_granted_in_a_drain_is_withdrawn() {
    let answer = |verdict| {
        transition(
            Stage::ClaimingInDrain(HISTORY),
            Event::Answer(verdict),
            &at_most_once(),
        )
    };
    let withdrawing = Stage::Withdrawing(grant(2), AfterWithdrawal::Release);
    assert_eq!(
        answer(V::Granted(Attempts::new(2))),
        (withdrawing, Action::Apply)
    );
    for verdict in [V::Applied, V::Lost] {
        assert_eq!(
            transition(withdrawing, Event::Answer(verdict), &at_most_once()),
            release(Duration::ZERO, 0)
        );
    }
    assert_eq!(
        transition(
            Stage::ClaimingInDrain(HISTORY),
            Event::ClaimNotSent,
            &at_most_once()
        ),
        release(Duration::ZERO, 0)
    );
    let through = Policy {
        outage: Outage::PassThrough,
        ..effectively_once()
    };
    assert_eq!(
        transition(
            Stage::ClaimingInDrain(HISTORY),
            Event::Unavailable,
            &through
        ),
        release(Duration::ZERO, 0),
        "it does not wait for the store"
    );
    assert_eq!(answer(V::Duplicate), accept(ProofKind::Duplicate));
    let released_in_doubt = (
        Stage::Doubting(grant(2), DoubtCause::Interrupted, AfterDoubt::ReleaseAtOnce),
        Action::Apply,
    );
    assert_eq!(answer(V::InDoubt(Attempts::new(2))), released_in_doubt);
    for verdict in [
        V::Busy {
            remaining: Duration::ZERO,
        },
        V::Rejected { attempt: 2 },
        V::Conflict,
    ] {
        assert_eq!(answer(verdict), release(Duration::ZERO, 0));
    }
}

#[test]
fn a_delivery_that_waits_for_isolation_holds_no_claim() {
    let policy = effectively_once();
    let withdrawing = Stage::Withdrawing(GRANT, AfterWithdrawal::AwaitIsolation);
    assert_eq!(
        transition(Stage::Ready(GRANT), Event::IsolationFull, &policy),
        (withdrawing, Action::Apply)
    );
    let waiting = Stage::New(HISTORY);
    for verdict in [V::Applied, V::Lost] {
        assert_eq!(
            transition(withdrawing, Event::Answer(verdict), &policy),
            (waiting, Action::AwaitIsolation)
        );
    }
    // With a new token: a delayed withdrawal must not match it.
    assert_eq!(
        transition(waiting, Event::Arrived, &policy),
        (Stage::Claiming(HISTORY, ClaimTries(0)), Action::NewClaim)
    );
}

#[test]
fn no_event_changes_a_settled_delivery() {
    for event in [
        Event::Woke,
        Event::Answer(V::Applied),
        Event::LeaseOver,
        Event::Drain,
        Event::DrainOver,
        Event::StopNow,
        Event::Returned(Outcome::Done),
    ] {
        assert_eq!(
            transition(Stage::Settled, event, &at_most_once()),
            (Stage::Settled, Action::Wait)
        );
    }
}

#[test]
fn no_delivery_is_accepted_unless_its_id_is_done() {
    let events = [
        Event::Arrived,
        Event::NoId,
        Event::UnusableId,
        Event::Unavailable,
        Event::ClaimNotSent,
        Event::MayRun,
        Event::IsolationFull,
        Event::LeaseOver,
        Event::Woke,
        Event::Drain,
        Event::DrainOver,
        Event::StopNow,
        Event::Returned(Outcome::Done),
        Event::Reconciled(Some(Finding::Happened)),
        Event::CannotReconcile,
        Event::Answer(V::Busy {
            remaining: Duration::ZERO,
        }),
        Event::Answer(V::Lost),
        Event::Answer(V::Applied),
        Event::Answer(V::Rejected { attempt: 2 }),
        Event::Answer(V::Conflict),
    ];
    for stage in stages()
        .into_iter()
        .filter(|stage| !matches!(stage, Stage::WithoutClaim(_)))
    {
        for event in events {
            let (_, action) = transition(stage, event, &at_most_once());
            assert!(
                !matches!(action, Action::Settle(Settlement::Accept(_))),
                "{stage:?} {event:?}"
            );
        }
    }
}

#[test]
fn pauses_double_and_are_bounded() {
    let policy = at_most_once();
    assert_eq!(
        (policy.pause(0), policy.pause(1), policy.pause(3)),
        (policy.backoff, policy.backoff * 2, policy.backoff * 8)
    );
    assert_eq!(policy.pause(u32::MAX), policy.longest_backoff);
}

/// The names of all reasons, by a `match` that does not compile if one is missing.
macro_rules! every_reason {
    ($($reason:ident $(($cause:ident))?),+ $(,)?) => {{
        let named = |reason: &Reason| match reason {
            $(Reason::$reason $((DoubtCause::$cause))? => reason.as_str(),)+
        };
        let every = [$(Reason::$reason $((DoubtCause::$cause))?),+];
        every.each_ref().map(named)
    }};
}

#[test]
fn all_reasons_are_listed_and_have_different_names() {
    let every = every_reason![
        MissingId,
        UnusableId,
        Unreadable,
        NoRoute,
        Conflict,
        Refused,
        AttemptsSpent,
        CrashesSpent,
        RejectedBefore,
        TooLarge,
        InDoubt(HandlerReported),
        InDoubt(Panicked),
        InDoubt(TimedOut),
        InDoubt(Interrupted),
        InDoubt(TooOld),
        InDoubt(UnreadableMarker),
    ];
    let mut words = Reason::ALL.map(|reason| reason.as_str()).to_vec();
    assert_eq!(words, every);
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), every.len());
}

#[test]
fn an_unavailable_database_counts_no_attempt_unless_a_run_has_failed() {
    let policy = effectively_once();
    let unavailable = Event::Returned(Outcome::Unavailable);
    let after = |tries| transition(Stage::Running(GRANT, Tries(tries)), unavailable, &policy);
    let withdrawing = Stage::Withdrawing(GRANT, AfterWithdrawal::ReleaseLater);
    assert_eq!(after(0), (withdrawing, Action::Apply));
    let clearing = Stage::Clearing(GRANT.failed(), Effect::Nothing, pause(3));
    assert_eq!(after(1), (clearing, Action::Apply));
    for event in [Event::Answer(V::Applied), Event::UnreadableMarker] {
        assert_eq!(
            transition(withdrawing, event, &policy),
            release(pause(3), GRANT.failures)
        );
    }
}

#[test]
fn a_run_that_finds_a_record_claims_again_and_counts_no_attempt() {
    let policy = effectively_once();
    let withdrawing = Stage::Withdrawing(GRANT, AfterWithdrawal::ClaimAgain);
    for tries in 0..2 {
        let running = Stage::Running(GRANT, Tries(tries));
        assert_eq!(
            transition(running, Event::Returned(Outcome::Recorded), &policy),
            (withdrawing, Action::Apply)
        );
    }
    let (claiming, action) = transition(withdrawing, Event::Answer(V::Applied), &policy);
    assert_eq!(
        (claiming, action),
        (
            Stage::Claiming(GRANT.history(), ClaimTries(0)),
            Action::NewClaim
        )
    );
    assert_eq!(
        transition(claiming, Event::Answer(V::Duplicate), &policy),
        accept(ProofKind::Duplicate)
    );
}
