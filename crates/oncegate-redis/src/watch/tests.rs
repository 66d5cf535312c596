use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const AT_MOST_ONCE: Terms = Terms {
    guarantee: Guarantee::AtMostOnce,
    lease: SECOND,
    window: Duration::from_secs(60),
    fingerprint: None,
};

fn shown(run_id: &str) -> Shown {
    let now = Instant::now();
    let history = format!("of {run_id}");
    Shown {
        run_id: run_id.into(),
        history,
        followed: None,
        up: SECOND,
        evicted: 0,
        clock: 1_000 * SECOND,
        asked: now,
        at: now,
    }
}

fn canary(birth: &str, count: u64) -> Canary {
    Canary {
        birth: Some(birth.into()),
        count,
    }
}

fn keys(name: &str) -> Keys {
    Keys {
        shared: name.into(),
        own: format!("own {name}").into(),
    }
}

/// A look at a canary, with claims that stand with its count.
fn look(watch: &Watch, name: &str, canary: Canary, shown: Shown) {
    let asked = watch.asks(keys(name));
    watch
        .state()
        .take(Some((asked, canary)), shown, Stands::Firmly);
}

fn claim(watch: &Watch, canary: Canary, stands: Stands) {
    let asked = watch.asks(keys("k"));
    watch.told(asked, canary, stands);
}

fn is_withheld(watch: &Watch) -> bool {
    watch.withholds(&AT_MOST_ONCE).is_some()
}

fn why(watch: &Watch) -> String {
    match watch.withholds(&AT_MOST_ONCE) {
        Some(Failure::NotApplied(problem)) => problem.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_process_shows_is_compared_with_what_it_showed() {
    let before = Shown {
        evicted: 3,
        ..shown("r")
    };
    let later = before.at + 10 * SECOND;
    let after = Shown {
        clock: 1_010 * SECOND,
        asked: later,
        at: later,
        ..before.clone()
    };
    let other = Shown {
        run_id: "s".into(),
        evicted: 0,
        ..after.clone()
    };
    for (now, findings) in [
        (after.clone(), vec![]),
        (other.clone(), vec![]),
        (
            Shown {
                evicted: 9,
                ..after.clone()
            },
            vec![Finding::Evicted(6)],
        ),
        (
            Shown {
                evicted: 2,
                ..other
            },
            vec![Finding::Evicted(2)],
        ),
        (
            Shown {
                clock: 1_016 * SECOND,
                ..after.clone()
            },
            vec![Finding::ClockForward(6 * SECOND)],
        ),
        (
            Shown {
                clock: 1_004 * SECOND,
                ..after.clone()
            },
            vec![Finding::ClockBackward(6 * SECOND)],
        ),
        (
            Shown {
                clock: 990 * SECOND,
                ..after.clone()
            },
            vec![Finding::ClockBackward(20 * SECOND)],
        ),
        (
            Shown {
                clock: 1_011 * SECOND,
                ..after
            },
            vec![],
        ),
    ] {
        assert_eq!(compare(&before, &now, CLOCK_TOLERANCE), findings, "{now:?}");
    }
}

/// A lease of 100 ms ends by a step that a lease of 30 s does not notice.
#[test]
fn a_step_of_the_clock_counts_from_half_of_the_shortest_lease() {
    let watch = Watch::default();
    let at = |ms: u32| {
        let before = shown("r");
        let later = before.at + 10 * SECOND;
        Shown {
            clock: 1_010 * SECOND + Duration::from_millis(1) * ms,
            asked: later,
            at: later,
            ..before
        }
    };
    for (lease, step, jumps) in [
        (30_000, 1_500, false),
        (30_000, 2_500, true),
        (100, 50, false),
        (100, 90, true),
        (30_000, 90, true),
    ] {
        let lease = Duration::from_millis(lease);
        let _ = watch.withholds(&Terms {
            lease,
            ..AT_MOST_ONCE
        });
        let mut state = watch.state();
        (state.jumped, state.processes) = (None, HashMap::from([("r".to_owned(), shown("r"))]));
        state.take(None, at(step), Stands::Born);
        assert_eq!(
            state.jumped.is_some(),
            jumps,
            "{step} ms, by a lease of {lease:?}; the shortest counts"
        );
    }
}

/// As when this process had no time to read.
#[test]
fn a_reply_that_was_read_late_is_no_jump() {
    let soon = shown("r");
    let late = Shown {
        at: soon.at + 10 * SECOND,
        ..soon.clone()
    };
    let next = |after: u32, clock: u32| {
        let at = late.at + after * SECOND;
        Shown {
            clock: clock * SECOND,
            asked: at,
            at,
            ..soon.clone()
        }
    };
    // The clock went on with the time since `late` was shown, which was long before it was read.
    assert_eq!(compare(&late, &next(1, 1_011), CLOCK_TOLERANCE), []);
    assert_eq!(compare(&late, &next(1, 1_001), CLOCK_TOLERANCE), []);
    assert_eq!(
        compare(
            &soon,
            &Shown {
                at: soon.at + 20 * SECOND,
                ..next(0, 1_010)
            },
            CLOCK_TOLERANCE
        ),
        []
    );
    assert_eq!(
        compare(&late, &next(1, 1_014), CLOCK_TOLERANCE),
        [Finding::ClockForward(3 * SECOND)]
    );
    assert_eq!(
        compare(&late, &next(9, 1_001), CLOCK_TOLERANCE),
        [Finding::ClockBackward(8 * SECOND)]
    );
}

#[test]
fn each_loss_pauses_and_is_told_from_the_others() {
    let gone = Canary {
        birth: None,
        count: 1,
    };
    for (lost, says) in [
        (canary("c", 1), "born anew"),
        (gone, "born anew"),
        (canary("b", 0), "counts back"),
        (canary("b", 4), "counts back"),
    ] {
        let watch = Watch::default();
        look(&watch, "k", canary("b", 5), shown("r"));
        assert!(!is_withheld(&watch));
        claim(&watch, lost.clone(), Stands::Firmly);
        assert!(why(&watch).contains(says), "{lost:?}");
        watch.accept();
        look(&watch, "k", canary("d", lost.count + 1), shown("r"));
        assert_eq!(
            is_withheld(&watch),
            lost.birth == Some(b"c".into()),
            "accepted: {lost:?}"
        );
    }
}

/// It may have expired meanwhile.
#[test]
fn a_count_of_long_ago_is_not_gone_by() {
    let watch = Watch::default();
    look(&watch, "k", canary("b", 5), shown("r"));
    for counted in watch.state().counts.values_mut() {
        counted.at = Instant::now()
            .checked_sub(COUNT_STANDS)
            .expect("the machine is up longer");
    }
    claim(&watch, canary("b", 1), Stands::Firmly);
    claim(&watch, canary("b", 2), Stands::Firmly);
    assert!(!is_withheld(&watch));
}

/// The last write of a pipeline of claims, between two looks.
#[test]
fn a_restart_that_lost_the_last_claims_is_no_mere_restart() {
    let watch = Watch::default();
    look(&watch, "k", canary("b", 1), shown("r"));
    claim(&watch, canary("b", 2), Stands::Firmly);
    look(&watch, "k", canary("b", 1), shown("s"));
    assert!(why(&watch).contains("last writes"));
}

#[test]
fn a_mere_restart_is_waited_for() {
    let watch = Watch::default();
    look(&watch, "k", canary("b", 1), shown("r"));
    look(&watch, "k", canary("b", 2), shown("s"));
    assert!(why(&watch).contains("another Redis process"));
    watch.state().restarted = Instant::now().checked_sub(OTHERS_MAY_TELL);
    assert!(!is_withheld(&watch));
    // Who lost something tells in time.
    claim(&watch, canary("c", 3), Stands::Firmly);
    assert!(why(&watch).contains("another consumer's"));
}

#[test]
fn pipelines_that_overtake_each_other_are_no_loss() {
    let watch = Watch::default();
    look(&watch, "k", canary("b", 1), shown("r"));
    let [first, second] = [(); 2].map(|()| watch.asks(keys("k")));
    watch.told(second, canary("b", 3), Stands::Firmly);
    watch.told(first, canary("b", 2), Stands::Firmly);
    assert!(!is_withheld(&watch));
    assert_eq!(watch.state().counts[&keys("k").own].least, 3);
}

#[test]
fn a_birth_that_we_end_ourselves_is_no_other_loss() {
    let watch = Watch::default();
    look(&watch, "k", canary("b", 7), shown("r"));
    let late = watch.asks(keys("k"));
    claim(&watch, canary("b", 3), Stands::Firmly);
    assert!(watch.asks(keys("k")).birth.ends);
    watch.accept();
    watch.told(late, canary("b", 3), Stands::Firmly);
    look(&watch, "k", canary("c", 5), shown("r"));
    assert!(!is_withheld(&watch), "told once");
    assert!(!watch.asks(keys("k")).birth.ends);
}

#[test]
fn a_birth_to_end_that_is_on_no_server_any_more_is_not_looked_for() {
    let watch = Watch::default();
    look(&watch, "k", canary("b", 7), shown("r"));
    claim(&watch, canary("b", 3), Stands::Firmly);
    let is_due_soon = || {
        watch.state().looked = Instant::now().checked_sub(EVERY_TO_TELL);
        watch.is_due()
    };
    assert!(is_due_soon(), "the others are to be told");
    watch.state().looked = Some(Instant::now() + 100 * SECOND);
    assert!(!watch.is_due(), "not with each batch");
    watch.saw_all(&[Some(keys("k")), None]);
    assert!(is_due_soon());
    // Its slot went to another node, which has a canary of its own.
    watch.saw_all(&[Some(keys("other")), None]);
    assert!(!is_due_soon());
    assert!(is_withheld(&watch));
}

/// What replicas did not have to know of may be gone.
#[test]
fn a_failover_that_no_claim_was_lost_in_pauses_nothing() {
    let watch = Watch::default();
    let looked = |told, run_id| {
        let asked = watch.asks(keys("k"));
        let shown = Shown {
            followed: Some("of r".into()),
            up: 100 * SECOND,
            ..shown(run_id)
        };
        watch
            .state()
            .take(Some((asked, told)), shown, Stands::Perhaps);
    };
    looked(canary("b", 1), "r");
    claim(&watch, canary("b", 2), Stands::Firmly);
    claim(&watch, canary("b", 3), Stands::Perhaps);
    looked(canary("b", 4), "r");
    looked(canary("b", 3), "s");
    assert!(!is_withheld(&watch), "what was covered is there");
    looked(canary("b", 1), "t");
    assert!(
        why(&watch).contains("last writes"),
        "a claim that replicas knew of is gone"
    );
}

/// Replicas follow a primary that came back, and forget what it lost.
#[test]
fn with_replicas_only_one_of_them_that_took_over_is_not_waited_for() {
    let primary = shown("r");
    let replica = Shown {
        followed: Some(primary.history.clone()),
        up: 100 * SECOND,
        ..shown("s")
    };
    for (next, waits) in [
        (replica.clone(), false),
        (shown("the same, started again"), true),
        (
            Shown {
                followed: Some("of another".into()),
                ..replica.clone()
            },
            true,
        ),
        (
            Shown {
                up: Duration::ZERO,
                ..replica
            },
            true,
        ),
    ] {
        let watch = Watch::default();
        for shown in [primary.clone(), next] {
            let asked = watch.asks(keys("k"));
            let told = canary("b", 1);
            watch
                .state()
                .take(Some((asked, told)), shown, Stands::Perhaps);
        }
        assert_eq!(is_withheld(&watch), waits);
    }
}

#[test]
fn a_canary_that_moves_to_another_node_tells_nothing() {
    let watch = Watch::default();
    let other = Shown {
        evicted: 9,
        clock: 1_300 * SECOND,
        ..shown("other")
    };
    look(
        &watch,
        "1",
        canary("b", 1),
        Shown {
            evicted: 0,
            ..shown("one")
        },
    );
    look(&watch, "2", canary("b", 1), other.clone());
    look(
        &watch,
        "1",
        canary("b", 2),
        Shown {
            at: Instant::now(),
            ..other.clone()
        },
    );
    assert!(!is_withheld(&watch));
    look(
        &watch,
        "1",
        canary("b", 3),
        Shown {
            evicted: 10,
            at: Instant::now(),
            ..other
        },
    );
    assert!(is_withheld(&watch));
}

#[test]
fn a_forward_jump_pauses_for_a_lease_and_a_long_one_until_it_is_accepted() {
    let watch = Watch::default();
    let jump = |by: Duration, ago: Duration| {
        (
            Instant::now()
                .checked_sub(ago)
                .expect("the machine is up longer"),
            by,
        )
    };
    for (jumped, withheld) in [
        (jump(3 * SECOND, Duration::ZERO), true),
        (jump(3 * SECOND, SECOND), false),
        (jump(30 * SECOND, 9 * SECOND), true),
    ] {
        watch.state().jumped = Some(jumped);
        assert_eq!(is_withheld(&watch), withheld, "{jumped:?}");
        assert!(
            watch
                .withholds(&Terms {
                    guarantee: Guarantee::EffectivelyOnce,
                    ..AT_MOST_ONCE
                })
                .is_none()
        );
    }
    watch.accept();
    assert!(!is_withheld(&watch));
}

#[test]
fn a_small_jump_does_not_lift_the_pause_of_a_large_one() {
    let watch = Watch::default();
    for by in [40, 3] {
        watch.state().note(&Finding::ClockForward(by * SECOND));
    }
    assert!(
        why(&watch).contains("40s") && why(&watch).contains("accept_loss"),
        "{}",
        why(&watch)
    );
    watch.accept();
    watch.state().note(&Finding::ClockForward(3 * SECOND));
    assert!(why(&watch).contains("one lease"), "{}", why(&watch));
}

/// A process that claims nothing at most once looks as well.
#[test]
fn what_was_only_looked_at_pauses_and_tells_nobody() {
    let watch = Watch::default();
    let looked = |told, run_id| {
        let asked = watch.asks(keys("k"));
        watch
            .state()
            .take(Some((asked, told)), shown(run_id), Stands::Born);
    };
    looked(canary("b", 5), "r");
    looked(canary("b", 2), "s");
    assert!(
        why(&watch).contains("another Redis process"),
        "no claim is gone"
    );
    assert!(!watch.asks(keys("k")).birth.ends);
    claim(&watch, canary("b", 3), Stands::Firmly);
    looked(canary("b", 4), "s");
    looked(canary("b", 2), "t");
    assert!(
        why(&watch).contains("last writes"),
        "one that was claimed is"
    );
    watch.accept();
    looked(canary("c", 5), "t");
    assert!(!watch.asks(keys("k")).birth.ends);
    looked(canary("d", 6), "t");
    assert!(why(&watch).contains("born anew"));
}

/// The level of the only gauge.
#[derive(Default)]
struct Level(Arc<AtomicU64>);

impl Recorder for Level {
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
fn the_gauge_is_1_while_something_pauses_until_it_is_accepted() {
    let level = Level::default();
    metrics::with_local_recorder(&level, || {
        let is = || f64::from_bits(level.0.load(Ordering::SeqCst));
        for (finding, pauses) in [
            (Finding::CanaryLost, 1.0),
            (Finding::ClockForward(40 * SECOND), 1.0),
            (Finding::ClockForward(3 * SECOND), 0.0),
            (Finding::Restarted, 0.0),
        ] {
            let watch = Watch::default();
            watch.state().note(&finding);
            assert!(
                watch
                    .withholds(&Terms {
                        guarantee: Guarantee::EffectivelyOnce,
                        ..AT_MOST_ONCE
                    })
                    .is_none()
            );
            assert_eq!(is(), 0.0, "nobody pauses");
            let _ = watch.withholds(&AT_MOST_ONCE);
            assert_eq!(is(), pauses, "{finding:?}");
            watch.accept();
            assert_eq!(is(), 0.0);
        }
    });
}
