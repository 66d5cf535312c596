//! Expired rows are deleted, and others are not.

use oncegate_core::Store;
use oncegate_core::marker::{Guarantee, Operation, OperationKind, Verdict};
use oncegate_testkit::operations::SECOND;
use sqlx::{Executor, Row};

use crate::support::{GRANTED, new_schema, operation, raw, store_at, terms, verdicts};

fn claims(prefix: &str, count: u128) -> Vec<Operation> {
    let terms = terms(Guarantee::EffectivelyOnce);
    (1..=count)
        .map(|token| {
            operation(
                &format!("{prefix}{token}"),
                OperationKind::Claim,
                token,
                0,
                terms,
            )
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_delete_what_has_expired_and_nothing_else() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    let (old, kept, again) = (
        claims("old", 3_000),
        claims("kept", 100),
        claims("again", 100),
    );
    for batch in [&old, &kept, &again] {
        assert!(
            verdicts(&store, batch)
                .await
                .iter()
                .all(|it| *it == GRANTED)
        );
    }
    let mut raw = raw(&url).await;
    raw.execute("UPDATE oncegate_markers SET expires = 1 WHERE key LIKE 'old%'")
        .await
        .expect("they expire");
    let mut left = old.len();
    let many: Vec<_> = std::iter::repeat_n(&again, 11).flatten().cloned().collect();
    // A cycle over a table of this size ends after a few scans.
    for round in 0..60 {
        let busy = verdicts(&store, &many).await;
        assert!(
            busy.iter().all(|it| *it == GRANTED),
            "repeated: the same claim"
        );
        let counted = "SELECT count(*) FILTER (WHERE key LIKE 'old%'), count(*) FILTER (WHERE key LIKE 'kept%') FROM oncegate_markers";
        let row = sqlx::query(counted)
            .fetch_one(&mut raw)
            .await
            .expect("counted");
        left = row.get::<i64, _>(0) as usize;
        assert_eq!(row.get::<i64, _>(1), kept.len() as i64, "round {round}");
        if left == 0 {
            break;
        }
        tokio::time::sleep(SECOND / 20).await;
    }
    assert_eq!(left, 0, "expired rows are left");
    let again = verdicts(&store, &old[..1]).await;
    assert!(matches!(again[..], [Verdict::Granted(_)]));
}

/// An expired row that was not deleted yet counts as absent.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_row_is_written_again() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    let done = operation(
        "a",
        OperationKind::Complete,
        1,
        1,
        terms(Guarantee::AtMostOnce),
    );
    store.apply(&[done]).await;
    raw(&url)
        .await
        .execute("UPDATE oncegate_markers SET expires = -9223372036854775808")
        .await
        .expect("it expires");
    let claim = operation(
        "a",
        OperationKind::Claim,
        2,
        0,
        terms(Guarantee::AtMostOnce),
    );
    assert_eq!(verdicts(&store, &[claim]).await, [GRANTED]);
}
