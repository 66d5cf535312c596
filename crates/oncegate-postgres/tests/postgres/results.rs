//! The results of runs: several processes, lost connections, expiry, and older tables.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures_util::future::join_all;
use oncegate_core::gate::Stored;
use oncegate_core::marker::{Guarantee, Marker, Operation, OperationKind, Verdict};
use oncegate_core::{Completion, Gate, ResultStore, Store, StoreError};
use oncegate_postgres::Postgres;
use oncegate_testkit::proxy::{RequestFault, contains};
use oncegate_testkit::servers::PostgresServer;
use sqlx::Executor;

use crate::support::{
    DONE, GRANTED, SECOND, behind_proxy, key, new_schema, new_schema_at, operation, raw, store_at,
    terms, verdicts,
};

const GUARANTEE: Guarantee = Guarantee::EffectivelyOnce;

fn claim(id: &str, token: u128) -> Operation {
    operation(id, OperationKind::Claim, token, 0, terms(GUARANTEE))
}

fn completion(id: &str, token: u128) -> Operation {
    operation(id, OperationKind::Complete, token, 1, terms(GUARANTEE))
}

fn results(store: &Postgres) -> &dyn ResultStore {
    store.results().expect("PostgreSQL keeps results")
}

async fn complete(store: &Postgres, id: &str, result: &[u8]) -> Result<Completion, StoreError> {
    results(store).complete(&completion(id, 1), result).await
}

async fn read(store: &Postgres, id: &str) -> Option<Vec<u8>> {
    let read = results(store).read(&key(id), None).await;
    read.expect("the store is available")
}

/// The keys in the table of results.
async fn rows(url: &str) -> Vec<String> {
    let select = "SELECT key FROM oncegate_results ORDER BY key";
    let mut raw = raw(url).await;
    let rows = sqlx::query_scalar(select).fetch_all(&mut raw).await;
    rows.expect("the table")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_is_replayed_by_another_process() {
    let url = new_schema().await;
    for expected in [Stored::Executed(4200), Stored::Replayed(4200)] {
        let gate = Gate::builder().store(store_at(&url).await).open();
        let gate = gate.await.expect("a gate");
        let charged = gate.run_stored("charge", || async { Ok(4200) }).await;
        assert_eq!(charged.expect("an outcome"), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_completions_of_several_processes_agree_on_one_result() {
    let url = new_schema().await;
    let stores = join_all((0..4).map(|_| store_at(&url))).await;
    for round in 0..50 {
        let id = format!("round-{round}");
        // Of an absent id, of a claim, and of a marker that has expired.
        match round % 3 {
            0 => {}
            1 => assert_eq!(verdicts(&stores[0], &[claim(&id, 1)]).await, [GRANTED]),
            _ => {
                let first = complete(&stores[0], &id, b"expired").await;
                first.expect("it is stored");
                let mut raw = raw(&url).await;
                for table in ["oncegate_markers", "oncegate_results"] {
                    let expire = format!("UPDATE {table} SET expires = 1 WHERE key = '{id}'");
                    let expired = raw.execute(sqlx::AssertSqlSafe(expire)).await;
                    expired.expect("written");
                }
            }
        }
        let completions = stores.iter().zip(0_u8..).map(|(store, n)| {
            let (store, id) = (store.clone(), id.clone());
            tokio::spawn(async move {
                let completion = complete(&store, &id, &[n]).await.expect("a verdict");
                completion.earlier.unwrap_or(vec![n])
            })
        });
        let answers = join_all(completions).await;
        let stored = read(&stores[0], &id).await.expect("a result");
        for answer in answers {
            assert_eq!(answer.expect("no panic"), stored);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_whose_reply_is_lost_is_repeated_safely() {
    let (_server, proxy, url) = behind_proxy().await;
    let store = store_at(&url).await;
    complete(&store, "warm", b"warm").await.expect("stored");
    for (id, fault, earlier) in [
        ("executed", RequestFault::LoseReply, Some(b"7".to_vec())),
        ("not sent", RequestFault::Reset, None),
    ] {
        assert_eq!(verdicts(&store, &[claim(id, 1)]).await, [GRANTED]);
        let mut faults = 1;
        // The statement is prepared: it is one request.
        proxy.inject_faults(move |request| {
            let is_first = request.first() == Some(&b'B') && faults > 0;
            faults -= i32::from(is_first);
            if is_first { fault } else { RequestFault::Pass }
        });
        let lost = complete(&store, id, b"7").await;
        assert!(matches!(lost, Err(StoreError::Unknown(_))), "{lost:?}");
        assert_eq!(read(&store, id).await, earlier, "{id}");
        let repeated = complete(&store, id, b"7").await.expect("a verdict");
        let verdict = DONE;
        assert_eq!(repeated, Completion { verdict, earlier }, "{id}");
        assert_eq!(read(&store, id).await.as_deref(), Some(&b"7"[..]), "{id}");
    }
}

/// Sessions end at any moment of a completion: its marker is done exactly if it has a result.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_are_terminated_leave_both_or_neither() {
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let url = new_schema_at(&server.url()).await;
    let store = store_at(&url).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let terminating = tokio::spawn({
        let (url, is_over) = (url.clone(), is_over.clone());
        async move {
            let mut operator = raw(&url).await;
            let mut terminated = 0;
            while !is_over.load(Ordering::Relaxed) {
                let some = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE application_name = 'oncegate' AND state = 'active'";
                let ended = operator.execute(some).await.expect("terminated");
                terminated += ended.rows_affected();
                tokio::time::sleep(SECOND / 200).await;
            }
            terminated
        }
    });
    // Large, so that a statement takes some time.
    let result: Vec<u8> = (0..500_000_u32)
        .map(|n| (n.wrapping_mul(n) >> 7) as u8)
        .collect();
    let mut unanswered = 0;
    for n in 0..150 {
        let id = format!("id-{n}");
        let completed = complete(&store, &id, &result).await;
        let mut marker = store.read_marker(&key(&id)).await;
        while marker.is_err() {
            marker = store.read_marker(&key(&id)).await;
        }
        let is_done = matches!(marker, Ok(Marker::Done(_)));
        let mut stored = results(&store).read(&key(&id), None).await;
        while stored.is_err() {
            stored = results(&store).read(&key(&id), None).await;
        }
        let stored = stored.expect("it is read");
        assert_eq!(stored.is_some(), is_done, "{id}: {completed:?}");
        assert!(stored.is_none_or(|stored| stored == result));
        match completed {
            Ok(_) => assert!(is_done),
            Err(_) => unanswered += 1,
        }
    }
    is_over.store(true, Ordering::Relaxed);
    let terminated = terminating.await.expect("no panic");
    println!("{terminated} sessions terminated, {unanswered} completions unanswered");
    assert!(unanswered > 0, "no completion was interrupted");
}

#[tokio::test(flavor = "multi_thread")]
async fn results_are_deleted_after_their_markers_have_expired() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    for id in ["kept", "old-1", "old-2", "reused"] {
        complete(&store, id, b"first").await.expect("stored");
    }
    let mut raw = raw(&url).await;
    for table in ["oncegate_markers", "oncegate_results"] {
        let expire = format!("UPDATE {table} SET expires = 1 WHERE key <> 'kept'");
        let expired = raw.execute(sqlx::AssertSqlSafe(expire)).await;
        expired.expect("written");
    }
    assert_eq!(read(&store, "old-1").await, None);
    let again = verdicts(&store, &[completion("reused", 2)]).await;
    assert_eq!(again, [Verdict::Done { marker_lost: true }]);
    assert_eq!(read(&store, "reused").await, None);
    let found = complete(&store, "reused", b"late").await;
    assert_eq!(found.expect("a verdict").earlier, None);

    let many: Vec<Operation> = (1..1_100)
        .map(|token| claim(&format!("other-{token}"), token))
        .collect();
    for _ in 0..60 {
        if rows(&url).await == ["kept"] {
            break;
        }
        verdicts(&store, &many).await;
        tokio::time::sleep(SECOND / 20).await;
    }
    assert_eq!(rows(&url).await, ["kept"]);
    assert_eq!(read(&store, "kept").await.as_deref(), Some(&b"first"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_row_of_a_forgotten_result_is_deleted() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    for id in ["forgotten", "deleted", "kept"] {
        complete(&store, id, b"first").await.expect("stored");
    }
    let seen = Marker::Done(None);
    let forget =
        |id, guarantee| operation(id, OperationKind::Forget { seen }, 2, 1, terms(guarantee));
    let batch = [
        claim("new", 1),
        forget("forgotten", GUARANTEE),
        forget("deleted", Guarantee::Bare),
    ];
    let answers = verdicts(&store, &batch).await;
    assert_eq!(answers, [GRANTED, Verdict::Applied, Verdict::Applied]);
    assert_eq!(rows(&url).await, ["kept"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_version_2_are_refused_or_updated_with_their_rows() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    let before = [claim("claimed", 1), completion("done", 1)];
    verdicts(&store, &before).await;
    let older = "DROP TABLE oncegate_results; DELETE FROM oncegate_schema WHERE version = 3";
    raw(&url).await.execute(older).await.expect("as version 2");

    let one_line = |error: StoreError| {
        let text = error.to_string();
        assert!(matches!(error, StoreError::Misconfigured(_)), "{error:?}");
        assert!(
            !text.contains('\n') && text.contains("Postgres::migrate"),
            "{text}"
        );
        text
    };
    let refused = store.preflight(GUARANTEE).await.expect_err("it is refused");
    assert!(one_line(refused).contains("have version 2, this release supports 3"));
    one_line(
        complete(&store, "claimed", b"first")
            .await
            .expect_err("no table"),
    );
    one_line(
        results(&store)
            .read(&key("done"), None)
            .await
            .expect_err("no table"),
    );
    // Batches without results do not use the table.
    let normal = [claim("claimed", 1), claim("new", 1), completion("new", 1)];
    assert_eq!(verdicts(&store, &normal).await, [GRANTED, GRANTED, DONE]);

    store.migrate().await.expect("the tables are updated");
    store.preflight(GUARANTEE).await.expect("they are usable");
    assert_eq!(
        verdicts(&store, &[claim("done", 2)]).await,
        [Verdict::Duplicate]
    );
    assert_eq!(read(&store, "done").await, None);
    let completed = complete(&store, "claimed", b"first").await;
    assert_eq!(completed.expect("a verdict").verdict, DONE);
    assert_eq!(
        read(&store, "claimed").await.as_deref(),
        Some(&b"first"[..])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_with_a_result_is_one_statement() {
    let (_server, proxy, url) = behind_proxy().await;
    let store = store_at(&url).await;
    assert_eq!(verdicts(&store, &[claim("a", 1)]).await, [GRANTED]);
    let statements = Arc::new(AtomicUsize::new(0));
    proxy.inject_faults({
        let statements = statements.clone();
        move |request| {
            let has_result = contains(request, "the result");
            statements.fetch_add(usize::from(has_result), Ordering::Relaxed);
            RequestFault::Pass
        }
    });
    let completed = complete(&store, "a", b"the result").await;
    assert_eq!(completed.expect("a verdict").verdict, DONE);
    assert_eq!(statements.load(Ordering::Relaxed), 1);
}
