//! What the store refuses at the start, and with which words.

use std::time::Duration;

use oncegate_core::marker::{Guarantee, Marker, OperationKind, Verdict};
use oncegate_core::{Persistence, Store, StoreError};
use oncegate_postgres::Postgres;
use oncegate_testkit::servers::PostgresServer;
use sqlx::Executor;

use crate::support::{
    GRANTED, SECOND, key, new_schema, new_schema_at, operation, raw, store_at, terms, verdicts,
};

/// The text of a permanent error, which is one line.
fn refused(result: Result<(), StoreError>) -> String {
    match result {
        Err(error @ StoreError::Misconfigured(_)) => {
            let text = error.to_string();
            assert!(!text.contains('\n') && !text.contains("secret"), "{text}");
            text
        }
        other => panic!("not refused: {other:?}"),
    }
}

fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_tables_are_refused_or_created() {
    let url = new_schema().await;
    let guarantee = Guarantee::AtMostOnce;
    let text = refused(Postgres::url(&url).preflight(guarantee).await);
    let parts = ["oncegate_markers", "Postgres::migrate", "create_tables"];
    assert_contains(&text, &parts);
    let claim = operation("a", OperationKind::Claim, 1, 0, terms(guarantee));
    let answer = Postgres::url(&url)
        .apply(std::slice::from_ref(&claim))
        .await
        .remove(0);
    assert_contains(&refused(answer.map(drop)), &parts);

    // Two processes that start together.
    let stores = [(); 2].map(|()| Postgres::url(&url).timeout(10 * SECOND).create_tables());
    let [one, other] = stores.each_ref().map(|store| store.preflight(guarantee));
    let (one, other) = tokio::join!(one, other);
    (one.and(other)).expect("the tables are created once");
    assert_eq!(verdicts(&stores[0], &[claim]).await, [GRANTED]);
    let Persistence::Durable(_) = stores[0].persistence().await.expect("an answer") else {
        panic!("PostgreSQL's defaults lose nothing");
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_another_version_are_refused() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    let insert = "INSERT INTO oncegate_schema (version) VALUES (1000)";
    raw(&url).await.execute(insert).await.expect("inserted");
    let parts = ["version 1000", "upgrade oncegate"];
    for store in [store.clone(), store.create_tables()] {
        assert_contains(
            &refused(store.preflight(Guarantee::AtMostOnce).await),
            &parts,
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_was_dropped_is_created_again() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    let drop_it = "DROP TABLE oncegate_markers";
    raw(&url).await.execute(drop_it).await.expect("dropped");
    let text = refused(store.preflight(Guarantee::AtMostOnce).await);
    assert_contains(&text, &["does not exist", "create_tables"]);
    let store = store.create_tables();
    let created = store.preflight(Guarantee::AtMostOnce).await;
    created.expect("the table is created");
    let claim = operation(
        "a",
        OperationKind::Claim,
        1,
        0,
        terms(Guarantee::AtMostOnce),
    );
    assert_eq!(verdicts(&store, &[claim]).await, [GRANTED]);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_settings_are_named() {
    for (store, parts) in [
        (
            Postgres::url("localhost:5432/x?secret"),
            &["Postgres::url", "postgres://"][..],
        ),
        (
            Postgres::url("postgres://localhost/x?ssl_mode=secret"),
            &["\"ssl_mode\" is unknown", "sslmode"],
        ),
        (
            Postgres::url("postgres://x:12?secret@localhost/x"),
            &["it is not a URL"],
        ),
        (
            Postgres::url("postgres://x:secret@localhost/x").timeout(Duration::ZERO),
            &["Postgres::timeout"],
        ),
    ] {
        assert_contains(&refused(store.check()), parts);
        assert_contains(
            &refused(store.preflight(Guarantee::AtMostOnce).await),
            parts,
        );
    }
    let url = oncegate_testkit::postgres_url().expect("set");
    let (server, _) = url.rsplit_once('/').expect("a path");
    let missing = Postgres::url(format!("{server}/nowhere"));
    let text = refused(missing.preflight(Guarantee::AtMostOnce).await);
    assert_contains(&text, &["nowhere", "create the database"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_rights_are_named() {
    let url = new_schema().await;
    let _tables = store_at(&url).await;
    let user = format!("reader{}", fastrand::u64(..));
    let (_, schema) = url.rsplit_once('=').expect("a schema");
    let create = format!(
        "CREATE ROLE {user} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {user};
        GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {user}"
    );
    let mut admin = raw(&url).await;
    admin
        .execute(sqlx::AssertSqlSafe(create))
        .await
        .expect("a role");
    let store = Postgres::url(url.replace("postgres@", &format!("{user}@")));
    let text = refused(store.preflight(Guarantee::AtMostOnce).await);
    assert_contains(&text, &["GRANT SELECT, INSERT, UPDATE, DELETE", &user]);
    let claim = operation(
        "a",
        OperationKind::Claim,
        1,
        0,
        terms(Guarantee::AtMostOnce),
    );
    refused(
        store
            .apply(std::slice::from_ref(&claim))
            .await
            .remove(0)
            .map(drop),
    );

    let grant = async |admin: &mut sqlx::PgConnection, table: &str| {
        let grant = format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {user}");
        let granted = admin.execute(sqlx::AssertSqlSafe(grant)).await;
        granted.expect("granted");
    };
    grant(&mut admin, "oncegate_markers").await;
    let text = refused(store.preflight(Guarantee::AtMostOnce).await);
    assert_contains(&text, &["ON oncegate_markers, oncegate_results TO", &user]);
    grant(&mut admin, "oncegate_results").await;
    store
        .preflight(Guarantee::AtMostOnce)
        .await
        .expect("enough");
    assert_eq!(verdicts(&store, &[claim]).await, [GRANTED]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_may_lose_answers_is_volatile() {
    let server = PostgresServer::start(&[("fsync", "off")]).expect("PostgreSQL");
    let store = store_at(&new_schema_at(&server.url()).await).await;
    assert_volatile(&store, "fsync").await;
    drop(server);

    for unlogged in [
        "ALTER TABLE oncegate_markers SET UNLOGGED",
        "ALTER TABLE oncegate_results SET UNLOGGED",
    ] {
        let url = new_schema().await;
        let store = store_at(&url).await;
        let mut admin = raw(&url).await;
        admin.execute(unlogged).await.expect("altered");
        assert_volatile(&store, "unlogged").await;
        assert_volatile(&Postgres::url(&url), "unlogged").await;
    }
}

/// Without the table of results, a stored completion would fail after its effect.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_table_of_results_is_found_at_the_start() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    let drop = "DROP TABLE oncegate_results";
    raw(&url).await.execute(drop).await.expect("dropped");
    let refused = store.preflight(Guarantee::EffectivelyOnce).await;
    let Err(StoreError::Misconfigured(text)) = refused else {
        panic!("{refused:?}");
    };
    assert_contains(&text.to_string(), &["oncegate_results"]);
}

async fn assert_volatile(store: &Postgres, why: &str) {
    match store.persistence().await.expect("an answer") {
        Persistence::Volatile(text) => assert_contains(&text, &[why]),
        durable => panic!("{durable:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_row_affects_only_its_id() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    let insert =
        "INSERT INTO oncegate_markers (key, expires, state) VALUES ('bad', 9223372036854775807, 7);
        INSERT INTO oncegate_markers (key, expires, state, token) VALUES ('bad-token', 9223372036854775807, 2, 'x')";
    raw(&url).await.execute(insert).await.expect("inserted");
    let claim = |id| operation(id, OperationKind::Claim, 1, 0, terms(Guarantee::AtMostOnce));
    let answers = store
        .apply(&[claim("bad"), claim("bad-token"), claim("good")])
        .await;
    assert!(
        matches!(
            &answers[..],
            [
                Err(StoreError::UnreadableMarker(_)),
                Err(StoreError::UnreadableMarker(_)),
                Ok(Verdict::Granted(_))
            ]
        ),
        "{answers:?}"
    );
    assert!(matches!(
        store.read_marker(&key("bad")).await,
        Err(StoreError::UnreadableMarker(_))
    ));
    assert!(matches!(
        store.read_marker(&key("good")).await,
        Ok(Marker::InProgress(_))
    ));
    let mut listed = Vec::new();
    let mut browse = store.browse(1);
    while let Some(page) = browse.next().await.expect("a page") {
        listed.extend(page.into_iter().map(|it| (it.name, it.marker.is_ok())));
    }
    assert_eq!(
        listed,
        [
            ("bad".to_owned(), false),
            ("bad-token".to_owned(), false),
            ("good".to_owned(), true)
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_may_not_create_tables_is_told_so() {
    let url = new_schema().await;
    let (user, (_, schema)) = (
        format!("creator{}", fastrand::u64(..)),
        url.rsplit_once('=').expect("a schema"),
    );
    let create = format!("CREATE ROLE {user} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {user}");
    let mut admin = raw(&url).await;
    admin
        .execute(sqlx::AssertSqlSafe(create))
        .await
        .expect("a role");
    let store = Postgres::url(url.replace("postgres@", &format!("{user}@"))).create_tables();
    let text = refused(store.preflight(Guarantee::AtMostOnce).await);
    assert_contains(&text, &["GRANT USAGE, CREATE ON SCHEMA"]);

    let read_only = format!("ALTER ROLE {user} SET default_transaction_read_only = on");
    admin
        .execute(sqlx::AssertSqlSafe(read_only))
        .await
        .expect("altered");
    let store = Postgres::url(url.replace("postgres@", &format!("{user}@")));
    let text = refused(store.preflight(Guarantee::AtMostOnce).await);
    assert_contains(&text, &["default_transaction_read_only"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_names_the_database_and_lends_no_connection() {
    let url = new_schema().await;
    let tables = store_at(&url).await;
    let options = sqlx::postgres::PgPoolOptions::new().max_connections(1);
    let pool = options.connect(&url).await.expect("a pool");
    let _only = pool.acquire().await.expect("its only connection");
    let store = Postgres::pool(&pool);
    store
        .preflight(Guarantee::AtMostOnce)
        .await
        .expect("usable");
    let claim = operation(
        "a",
        OperationKind::Claim,
        1,
        0,
        terms(Guarantee::AtMostOnce),
    );
    assert_eq!(verdicts(&store, &[claim]).await, [GRANTED]);
    let marker = tables.read_marker(&key("a")).await;
    assert!(matches!(marker, Ok(Marker::InProgress(_))), "{marker:?}");
}
