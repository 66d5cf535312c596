use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

use oncegate_core::internal::ClaimsPaused;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const AT_MOST_ONCE: Terms = Terms {
    guarantee: Guarantee::AtMostOnce,
    lease: SECOND,
    window: Duration::from_secs(60),
    fingerprint: None,
};

fn snapshot(run_id: &str) -> ServerSnapshot {
    let now = Instant::now();
    let replication_id = format!("of {run_id}");
    ServerSnapshot {
        run_id: run_id.into(),
        replication_id,
        previous_replication_id: None,
        uptime: SECOND,
        evicted: 0,
        clock: 1_000 * SECOND,
        requested_at: now,
        received_at: now,
    }
}

fn canary(generation: &str, count: u64) -> Canary {
    Canary {
        generation: Some(generation.into()),
        count,
    }
}

fn keys(name: &str) -> CanaryKeys {
    CanaryKeys {
        shared: name.into(),
        own: format!("own {name}").into(),
    }
}

/// A check whose canary becomes the full baseline.
fn check(detector: &LossDetector, name: &str, canary: Canary, snapshot: ServerSnapshot) {
    let expected = detector.expectation(keys(name));
    detector
        .state()
        .record_check(Some((expected, canary)), snapshot, CanaryBaseline::Full);
}

fn claim(detector: &LossDetector, canary: Canary, baseline: CanaryBaseline) {
    let expected = detector.expectation(keys("k"));
    detector.record_reply(expected, canary, baseline);
}

fn is_refused(detector: &LossDetector) -> bool {
    detector.claim_refusal(&AT_MOST_ONCE).is_some()
}

fn refusal_text(detector: &LossDetector) -> String {
    match detector.claim_refusal(&AT_MOST_ONCE) {
        Some(StoreFailure::NotApplied(problem)) => {
            let cause = std::error::Error::source(&problem).expect("a cause");
            assert!(cause.is::<ClaimsPaused>(), "{cause}");
            problem.to_string()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_snapshot_is_compared_with_the_previous_one() {
    let before = ServerSnapshot {
        evicted: 3,
        ..snapshot("r")
    };
    let later = before.received_at + 10 * SECOND;
    let after = ServerSnapshot {
        clock: 1_010 * SECOND,
        requested_at: later,
        received_at: later,
        ..before.clone()
    };
    let other = ServerSnapshot {
        run_id: "s".into(),
        evicted: 0,
        ..after.clone()
    };
    for (now, anomalies) in [
        (after.clone(), vec![]),
        (other.clone(), vec![]),
        (
            ServerSnapshot {
                evicted: 9,
                ..after.clone()
            },
            vec![Anomaly::Evicted(6)],
        ),
        (
            ServerSnapshot {
                evicted: 2,
                ..other
            },
            vec![Anomaly::Evicted(2)],
        ),
        (
            ServerSnapshot {
                clock: 1_016 * SECOND,
                ..after.clone()
            },
            vec![Anomaly::ClockForward(6 * SECOND)],
        ),
        (
            ServerSnapshot {
                clock: 1_004 * SECOND,
                ..after.clone()
            },
            vec![Anomaly::ClockBackward(6 * SECOND)],
        ),
        (
            ServerSnapshot {
                clock: 990 * SECOND,
                ..after.clone()
            },
            vec![Anomaly::ClockBackward(20 * SECOND)],
        ),
        (
            ServerSnapshot {
                clock: 1_011 * SECOND,
                ..after.clone()
            },
            vec![],
        ),
        // `INFO` did not show it.
        (
            ServerSnapshot {
                clock: Duration::ZERO,
                ..after
            },
            vec![],
        ),
    ] {
        assert_eq!(
            detect_anomalies(&before, &now, CLOCK_TOLERANCE),
            anomalies,
            "{now:?}"
        );
    }
}

/// A clock step that is harmless to a lease of 30 s expires a lease of 100 ms.
#[test]
fn a_clock_step_is_an_anomaly_from_half_of_the_shortest_lease() {
    let detector = LossDetector::default();
    let at = |ms: u32| {
        let before = snapshot("r");
        let later = before.received_at + 10 * SECOND;
        ServerSnapshot {
            clock: 1_010 * SECOND + Duration::from_millis(1) * ms,
            requested_at: later,
            received_at: later,
            ..before
        }
    };
    for (lease, step, is_jump) in [
        (30_000, 1_500, false),
        (30_000, 2_500, true),
        (100, 50, false),
        (100, 90, true),
        (30_000, 90, true),
    ] {
        let lease = Duration::from_millis(lease);
        let _ = detector.claim_refusal(&Terms {
            lease,
            ..AT_MOST_ONCE
        });
        let mut state = detector.state();
        (state.clock_jump, state.servers) =
            (None, HashMap::from([("r".to_owned(), snapshot("r"))]));
        state.record_check(None, at(step), CanaryBaseline::GenerationOnly);
        assert_eq!(
            state.clock_jump.is_some(),
            is_jump,
            "{step} ms with a lease of {lease:?}; the shortest one applies"
        );
    }
}

/// A reply is read late if, for example, this process is not scheduled.
#[test]
fn a_reply_that_was_read_late_is_not_a_clock_jump() {
    let soon = snapshot("r");
    let late = ServerSnapshot {
        received_at: soon.received_at + 10 * SECOND,
        ..soon.clone()
    };
    let next = |after: u32, clock: u32| {
        let at = late.received_at + after * SECOND;
        ServerSnapshot {
            clock: clock * SECOND,
            requested_at: at,
            received_at: at,
            ..soon.clone()
        }
    };
    // The clock advances from the moment of the snapshot, long before it was read.
    assert_eq!(
        detect_anomalies(&late, &next(1, 1_011), CLOCK_TOLERANCE),
        []
    );
    assert_eq!(
        detect_anomalies(&late, &next(1, 1_001), CLOCK_TOLERANCE),
        []
    );
    assert_eq!(
        detect_anomalies(
            &soon,
            &ServerSnapshot {
                received_at: soon.received_at + 20 * SECOND,
                ..next(0, 1_010)
            },
            CLOCK_TOLERANCE
        ),
        []
    );
    assert_eq!(
        detect_anomalies(&late, &next(1, 1_014), CLOCK_TOLERANCE),
        [Anomaly::ClockForward(3 * SECOND)]
    );
    assert_eq!(
        detect_anomalies(&late, &next(9, 1_001), CLOCK_TOLERANCE),
        [Anomaly::ClockBackward(8 * SECOND)]
    );
}

#[test]
fn each_loss_pauses_claims_with_its_own_description() {
    let missing = Canary {
        generation: None,
        count: 1,
    };
    for (lost, expected) in [
        (canary("c", 1), "was recreated"),
        (missing, "was recreated"),
        (canary("b", 0), "count decreased"),
        (canary("b", 4), "count decreased"),
    ] {
        let detector = LossDetector::default();
        check(&detector, "k", canary("b", 5), snapshot("r"));
        assert!(!is_refused(&detector));
        claim(&detector, lost.clone(), CanaryBaseline::Full);
        assert!(refusal_text(&detector).contains(expected), "{lost:?}");
        detector.accept_loss();
        check(&detector, "k", canary("d", lost.count + 1), snapshot("r"));
        assert_eq!(
            is_refused(&detector),
            lost.generation == Some(b"c".into()),
            "accepted: {lost:?}"
        );
    }
}

/// An old count may have expired in Redis.
#[test]
fn an_old_count_is_ignored() {
    let detector = LossDetector::default();
    check(&detector, "k", canary("b", 5), snapshot("r"));
    for counted in detector.state().counts.values_mut() {
        counted.at = Instant::now()
            .checked_sub(COUNT_VALID_FOR)
            .expect("the machine has run for longer than this duration");
    }
    claim(&detector, canary("b", 1), CanaryBaseline::Full);
    claim(&detector, canary("b", 2), CanaryBaseline::Full);
    assert!(!is_refused(&detector));
}

/// The lost writes are those of a pipeline of claims between two checks.
#[test]
fn a_restart_that_lost_claims_is_a_loss_of_writes() {
    let detector = LossDetector::default();
    check(&detector, "k", canary("b", 1), snapshot("r"));
    claim(&detector, canary("b", 2), CanaryBaseline::Full);
    check(&detector, "k", canary("b", 1), snapshot("s"));
    assert!(refusal_text(&detector).contains("last writes"));
}

#[test]
fn a_restart_pauses_claims_briefly() {
    let detector = LossDetector::default();
    check(&detector, "k", canary("b", 1), snapshot("r"));
    check(&detector, "k", canary("b", 2), snapshot("s"));
    assert!(refusal_text(&detector).contains("another run_id"));
    detector.state().restarted_at = Instant::now().checked_sub(RESTART_PAUSE);
    assert!(!is_refused(&detector));
    // A process that lost writes replaces the generation within the pause.
    claim(&detector, canary("c", 3), CanaryBaseline::Full);
    assert!(refusal_text(&detector).contains("another consumer's"));
}

#[test]
fn reordered_replies_are_not_a_loss() {
    let detector = LossDetector::default();
    check(&detector, "k", canary("b", 1), snapshot("r"));
    let [first, second] = [(); 2].map(|()| detector.expectation(keys("k")));
    detector.record_reply(second, canary("b", 3), CanaryBaseline::Full);
    detector.record_reply(first, canary("b", 2), CanaryBaseline::Full);
    assert!(!is_refused(&detector));
    assert_eq!(detector.state().counts[&keys("k").own].minimum, 3);
}

#[test]
fn replacing_a_generation_is_not_another_loss() {
    let detector = LossDetector::default();
    check(&detector, "k", canary("b", 7), snapshot("r"));
    let late = detector.expectation(keys("k"));
    claim(&detector, canary("b", 3), CanaryBaseline::Full);
    assert!(detector.expectation(keys("k")).canary.replace);
    detector.accept_loss();
    detector.record_reply(late, canary("b", 3), CanaryBaseline::Full);
    check(&detector, "k", canary("c", 5), snapshot("r"));
    assert!(!is_refused(&detector), "reported once");
    assert!(!detector.expectation(keys("k")).canary.replace);
}

#[test]
fn a_generation_to_replace_is_forgotten_when_no_server_has_it() {
    let detector = LossDetector::default();
    check(&detector, "k", canary("b", 7), snapshot("r"));
    claim(&detector, canary("b", 3), CanaryBaseline::Full);
    let is_due_soon = || {
        detector.state().last_check = Instant::now().checked_sub(CHECK_INTERVAL_WHILE_REPLACING);
        detector.start_if_due()
    };
    assert!(is_due_soon(), "the generation is to be replaced");
    detector.state().last_check = Some(Instant::now() + 100 * SECOND);
    assert!(!detector.start_if_due(), "not with each batch");
    detector.forget_removed_canaries(&[Some(keys("k")), None]);
    assert!(is_due_soon());
    // Its slot moved to another node, which has its own canary.
    detector.forget_removed_canaries(&[Some(keys("other")), None]);
    assert!(!is_due_soon());
    assert!(is_refused(&detector));
}

/// Writes that did not wait for replicas may be lost without an anomaly.
#[test]
fn a_failover_that_lost_no_claim_does_not_pause() {
    let detector = LossDetector::default();
    let check = |reply, run_id| {
        let expected = detector.expectation(keys("k"));
        let snapshot = ServerSnapshot {
            previous_replication_id: Some("of r".into()),
            uptime: 100 * SECOND,
            ..snapshot(run_id)
        };
        detector
            .state()
            .record_check(Some((expected, reply)), snapshot, CanaryBaseline::Unchanged);
    };
    check(canary("b", 1), "r");
    claim(&detector, canary("b", 2), CanaryBaseline::Full);
    claim(&detector, canary("b", 3), CanaryBaseline::Unchanged);
    check(canary("b", 4), "r");
    check(canary("b", 3), "s");
    assert!(!is_refused(&detector), "no acknowledged write is lost");
    check(canary("b", 1), "t");
    assert!(
        refusal_text(&detector).contains("last writes"),
        "a claim that replicas acknowledged is lost"
    );
}

/// Replicas resynchronize with a primary that came back and lose what it lost.
#[test]
fn only_a_promoted_replica_skips_the_restart_pause() {
    let primary = snapshot("r");
    let replica = ServerSnapshot {
        previous_replication_id: Some(primary.replication_id.clone()),
        uptime: 100 * SECOND,
        ..snapshot("s")
    };
    for (next, pauses) in [
        (replica.clone(), false),
        (snapshot("the same, restarted"), true),
        (
            ServerSnapshot {
                previous_replication_id: Some("of another".into()),
                ..replica.clone()
            },
            true,
        ),
        (
            ServerSnapshot {
                uptime: Duration::ZERO,
                ..replica
            },
            true,
        ),
    ] {
        let detector = LossDetector::default();
        for snapshot in [primary.clone(), next] {
            let expected = detector.expectation(keys("k"));
            let reply = canary("b", 1);
            detector.state().record_check(
                Some((expected, reply)),
                snapshot,
                CanaryBaseline::Unchanged,
            );
        }
        assert_eq!(is_refused(&detector), pauses);
    }
}

#[test]
fn a_canary_that_moves_to_another_node_is_not_an_anomaly() {
    let detector = LossDetector::default();
    let other = ServerSnapshot {
        evicted: 9,
        clock: 1_300 * SECOND,
        ..snapshot("other")
    };
    check(
        &detector,
        "1",
        canary("b", 1),
        ServerSnapshot {
            evicted: 0,
            ..snapshot("one")
        },
    );
    check(&detector, "2", canary("b", 1), other.clone());
    check(
        &detector,
        "1",
        canary("b", 2),
        ServerSnapshot {
            received_at: Instant::now(),
            ..other.clone()
        },
    );
    assert!(!is_refused(&detector));
    check(
        &detector,
        "1",
        canary("b", 3),
        ServerSnapshot {
            evicted: 10,
            received_at: Instant::now(),
            ..other
        },
    );
    assert!(is_refused(&detector));
}

#[test]
fn a_forward_jump_pauses_for_a_lease_and_a_long_one_until_accepted() {
    let detector = LossDetector::default();
    let jump = |by: Duration, ago: Duration| {
        (
            Instant::now()
                .checked_sub(ago)
                .expect("the machine has run for longer than this duration"),
            by,
        )
    };
    for (clock_jump, refused) in [
        (jump(3 * SECOND, Duration::ZERO), true),
        (jump(3 * SECOND, SECOND), false),
        (jump(30 * SECOND, 9 * SECOND), true),
    ] {
        detector.state().clock_jump = Some(clock_jump);
        assert_eq!(is_refused(&detector), refused, "{clock_jump:?}");
        assert!(
            detector
                .claim_refusal(&Terms {
                    guarantee: Guarantee::EffectivelyOnce,
                    ..AT_MOST_ONCE
                })
                .is_none()
        );
    }
    detector.accept_loss();
    assert!(!is_refused(&detector));
}

#[test]
fn a_small_jump_does_not_end_the_pause_of_a_large_one() {
    let detector = LossDetector::default();
    for by in [40, 3] {
        detector.state().report(&Anomaly::ClockForward(by * SECOND));
    }
    assert!(
        refusal_text(&detector).contains("40s") && refusal_text(&detector).contains("accept_loss"),
        "{}",
        refusal_text(&detector)
    );
    detector.accept_loss();
    detector.state().report(&Anomaly::ClockForward(3 * SECOND));
    assert!(
        refusal_text(&detector).contains("one lease"),
        "{}",
        refusal_text(&detector)
    );
}

/// A process without at-most-once claims checks the servers as well.
#[test]
fn a_process_that_only_checks_replaces_no_generation() {
    let detector = LossDetector::default();
    let check = |reply, run_id| {
        let expected = detector.expectation(keys("k"));
        detector.state().record_check(
            Some((expected, reply)),
            snapshot(run_id),
            CanaryBaseline::GenerationOnly,
        );
    };
    check(canary("b", 5), "r");
    check(canary("b", 2), "s");
    assert!(
        refusal_text(&detector).contains("another run_id"),
        "no claim is lost"
    );
    assert!(!detector.expectation(keys("k")).canary.replace);
    claim(&detector, canary("b", 3), CanaryBaseline::Full);
    check(canary("b", 4), "s");
    check(canary("b", 2), "t");
    assert!(
        refusal_text(&detector).contains("last writes"),
        "a claim is lost"
    );
    detector.accept_loss();
    check(canary("c", 5), "t");
    assert!(!detector.expectation(keys("k")).canary.replace);
    check(canary("d", 6), "t");
    assert!(refusal_text(&detector).contains("was recreated"));
}

/// The value of the only gauge.
#[derive(Default)]
struct GaugeRecorder(Arc<AtomicU64>);

impl Recorder for GaugeRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.0.clone())
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn the_paused_gauge_is_1_until_the_loss_is_accepted() {
    let recorder = GaugeRecorder::default();
    metrics::with_local_recorder(&recorder, || {
        let gauge = || f64::from_bits(recorder.0.load(Ordering::SeqCst));
        for (anomaly, pauses) in [
            (Anomaly::CanaryLost, 1.0),
            (Anomaly::ClockForward(40 * SECOND), 1.0),
            (Anomaly::ClockForward(3 * SECOND), 0.0),
            (Anomaly::Restarted, 0.0),
        ] {
            let detector = LossDetector::default();
            detector.state().report(&anomaly);
            assert!(
                detector
                    .claim_refusal(&Terms {
                        guarantee: Guarantee::EffectivelyOnce,
                        ..AT_MOST_ONCE
                    })
                    .is_none()
            );
            assert_eq!(gauge(), 0.0, "no claim was refused");
            let _ = detector.claim_refusal(&AT_MOST_ONCE);
            assert_eq!(gauge(), pauses, "{anomaly:?}");
            detector.accept_loss();
            assert_eq!(gauge(), 0.0);
        }
    });
}
