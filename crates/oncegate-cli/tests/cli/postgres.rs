//! The commands on PostgreSQL.

use oncegate::marker::{Attempts, OperationKind, Verdict};

use crate::cli::{TestCli, terms};
use crate::json_shapes::assert_shape;
use crate::markers::write_one_marker_per_state;
use crate::sqlite::{assert_explain_and_resolve_work, assert_markers_are_shown_and_listed};

/// On a schema with the tables.
async fn migrated() -> TestCli {
    let cli = TestCli::on_postgres().await;
    cli.run(&["store", "migrate"]).exits_with(0);
    cli
}

#[tokio::test]
async fn markers_are_shown_and_listed_as_on_redis() {
    assert_markers_are_shown_and_listed(&migrated().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_and_resolve_work_with_a_consumer_on_postgres() {
    assert_explain_and_resolve_work(migrated().await).await;
}

#[tokio::test]
async fn missing_tables_are_named_and_created_by_migrate() {
    let cli = TestCli::on_postgres().await;
    cli.configure("scope = \"s\"\n");
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("[store-unusable]")
        .prints("oncegate store migrate");
    cli.run(&["marker", "show", "x"]).exits_with(3);
    for _ in 0..2 {
        cli.run(&["store", "migrate"])
            .exits_with(0)
            .prints("the tables in PostgreSQL are those of this release");
    }
    cli.run(&["doctor"])
        .exits_with(0)
        .prints("Checked the settings, PostgreSQL");
    cli.run(&["marker", "show", "x"])
        .exits_with(0)
        .prints("absent");
    TestCli::on_sqlite()
        .run(&["store", "migrate"])
        .exits_with(0)
        .prints("needs no preparation");
}

#[test]
fn an_unreachable_server_and_a_wrong_url_are_named_without_the_password() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    for (url, code, word) in [
        ("postgres://u:s3cret@127.0.0.1:1/d", 3, "127.0.0.1:1/d"),
        ("postgres://u:s3cret@h:x/d", 3, "store.url"),
        ("postgresq://u:s3cret@h/d", 2, "store.url is not valid"),
    ] {
        cli.write("oncegate.toml", &format!("[store]\nurl = \"{url}\"\n"));
        let failed = cli.run(&["marker", "show", "x"]);
        let failed = failed.exits_with(code).prints(word);
        assert!(!failed.err.contains("s3cret"), "{failed:?}");
        let printed = cli.run(&["config", "print"]);
        assert!(!printed.out.contains("s3cret"), "{printed:?}");
    }
    cli.write(
        "oncegate.toml",
        "[store]\nurl = \"postgres://u@h/d\"\nprefix = \"p:\"\n",
    );
    cli.run(&["config", "check"])
        .exits_with(2)
        .prints("store.prefix requires Redis");
}

#[tokio::test]
async fn changes_apply_to_consumers_and_are_audited_in_the_database() {
    let cli = migrated().await;
    write_one_marker_per_state(&cli).await;
    cli.run(&["marker", "forget", "refused", "--yes", "--as", "ann"])
        .exits_with(0)
        .prints("is cleared, attempt 1 now");
    let next = Attempts {
        number: 2,
        base: 1,
        crashes: 0,
    };
    assert_eq!(
        cli.apply_one("refused", OperationKind::Claim, 9, 0, terms())
            .await,
        Verdict::Granted(next)
    );
    cli.run(&["marker", "complete", "left", "--yes"])
        .exits_with(0)
        .prints("is done now");
    assert_eq!(
        cli.apply_one("left", OperationKind::Claim, 9, 0, terms())
            .await,
        Verdict::Duplicate
    );
    let actions = |arguments: &[&str]| cli.json(arguments).as_array().map(Vec::len);
    assert_eq!(actions(&["audit"]), Some(2));
    assert_eq!(actions(&["audit", "--who", "ann"]), Some(1));
    assert_eq!(actions(&["audit", "--id", "left"]), Some(1));
}

/// A row of the outbox, as a transaction writes it; with an error, parked.
async fn insert(pool: &sqlx::PgPool, destination: &str, error: Option<&str>) -> i64 {
    sqlx::query_scalar(
        "INSERT INTO oncegate_outbox (id, exchange, destination, headers, body, error) VALUES ('t-1/1', '', $1, '[]', 'secret', $2)
        RETURNING number",
    )
    .bind(destination)
    .bind(error)
    .fetch_one(pool)
    .await
    .expect("a row")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_the_outbox_are_listed_retried_and_dropped_with_an_audit() {
    let cli = migrated().await;
    let pool = sqlx::PgPool::connect(cli.postgres_url())
        .await
        .expect("PostgreSQL");
    let parked = insert(&pool, "booked", Some("too large")).await;
    let other = insert(&pool, "booked", Some("too large")).await;
    let unsent = insert(&pool, "missing", None).await;

    let listed = cli.json(&["outbox", "list"]);
    let numbers = |value: &serde_json::Value| -> Vec<Option<i64>> {
        let messages = value["messages"].as_array().expect("messages");
        messages.iter().map(|it| it["number"].as_i64()).collect()
    };
    assert_eq!(numbers(&listed), [Some(parked), Some(other)]);
    assert_eq!(listed["messages"][0]["error"], "too large");
    assert!(!listed.to_string().contains("secret"), "{listed}");
    assert_shape(&listed, "`outbox list`");
    assert_shape(&listed["messages"][0], "an entry of the outbox");
    let preview = cli.json(&["outbox", "drop", "--all", "--dry-run"]);
    assert_shape(&preview, "`outbox retry`, `drop`");
    let listed = cli.json(&["outbox", "list", "--unsent", "--limit", "2"]);
    assert_eq!((numbers(&listed).len(), &listed["all"]), (2, &false.into()));

    cli.run(&["outbox", "retry", "--yes"]).exits_with(2);
    let number = parked.to_string();
    cli.run(&["outbox", "retry", "--number", &number])
        .exits_with(4)
        .prints("1 would be unsent");
    cli.run(&[
        "outbox", "retry", "--number", &number, "--yes", "--as", "ann",
    ])
    .exits_with(0)
    .prints("1 messages are unsent now");
    assert_eq!(numbers(&cli.json(&["outbox", "list"])), [Some(other)]);
    cli.run(&["outbox", "drop", "--destination", "missing", "--yes"])
        .exits_with(0)
        .prints("outbox drop: no parked message is selected.");
    let drop = [
        "outbox",
        "drop",
        "--destination",
        "missing",
        "--unsent",
        "--yes",
    ];
    cli.run(&drop)
        .exits_with(0)
        .prints("1 messages are dropped now");
    cli.run(&["outbox", "drop", "--all", "--yes"]).exits_with(0);
    let left: Vec<i64> = sqlx::query_scalar("SELECT number FROM oncegate_outbox")
        .fetch_all(&pool)
        .await
        .expect("rows");
    assert_eq!(left, [parked], "not {unsent}");
    let actions = |arguments: &[&str]| cli.json(arguments).as_array().map(Vec::len);
    assert_eq!(actions(&["audit", "--id", "t-1/1"]), Some(3));
    assert_eq!(actions(&["audit", "--who", "ann"]), Some(1));

    let sqlite = TestCli::on_sqlite();
    sqlite
        .run(&["outbox", "list"])
        .exits_with(2)
        .prints("the outbox is in PostgreSQL");
}

#[tokio::test]
async fn an_unreadable_row_is_shown_with_a_remedy_for_the_table() {
    let cli = migrated().await;
    write_one_marker_per_state(&cli).await;
    let pool = sqlx::PgPool::connect(cli.postgres_url())
        .await
        .expect("PostgreSQL");
    sqlx::query("UPDATE oncegate_markers SET state = 99")
        .execute(&pool)
        .await
        .expect("changed rows");
    cli.run(&["marker", "show", "left"])
        .exits_with(1)
        .prints("upgrade oncegate here if a newer release wrote the row");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outbox_changes_leave_messages_that_wait_for_the_relay() {
    let cli = migrated().await;
    let pool = sqlx::PgPool::connect(cli.postgres_url())
        .await
        .expect("PostgreSQL");
    let parked = insert(&pool, "booked", Some("too large")).await;
    let unsent = insert(&pool, "booked", None).await.to_string();
    let (parked, no_row) = (parked.to_string(), "99999");
    let rows = || async {
        let count = sqlx::query_scalar("SELECT count(*) FROM oncegate_outbox");
        let count: i64 = count.fetch_one(&pool).await.expect("a count");
        count
    };

    for confirmed in [false, true] {
        let drop = |number| {
            let mut drop = vec!["outbox", "drop", "--number", number];
            drop.extend(confirmed.then_some("--yes"));
            cli.run(&drop)
                .exits_with(1)
                .prints("outbox drop: no parked message is selected.")
        };
        drop(&unsent).prints(&format!(
            "not parked, and waiting for the relay: row {unsent}; add --unsent to drop"
        ));
        drop(no_row).prints("not found: row 99999; published or dropped before");
    }
    assert_eq!(rows().await, 2);
    let list = cli.json(&["outbox", "list", "--number", &unsent]);
    assert_eq!(list["messages"][0]["state"], "unsent", "{list}");

    // The selected ones are changed.
    let drop = [
        "outbox", "drop", "--number", &parked, "--number", &unsent, "--number", no_row, "--yes",
        "--json",
    ];
    let dropped = cli.run(&drop).exits_with(1).json();
    assert_shape(&dropped, "`outbox retry`, `drop`");
    assert_eq!(
        (&dropped["done"], &dropped["left"]),
        (&1.into(), &1.into()),
        "{dropped}"
    );
    assert_eq!(rows().await, 1);

    cli.run(&["outbox", "retry", "--all", "--yes"])
        .exits_with(0)
        .prints("outbox retry: no parked message is selected.");
    cli.run(&["outbox", "retry", "--number", &unsent, "--yes"])
        .exits_with(0)
        .prints(&format!(
            "Not parked, so the relay publishes it: row {unsent}."
        ));
    cli.run(&["outbox", "retry", "--number", no_row, "--yes"])
        .exits_with(1)
        .prints("not found: row 99999");
    cli.run(&["outbox", "drop", "--number", &unsent, "--unsent", "--yes"])
        .exits_with(0)
        .prints("1 messages are dropped now");
    assert_eq!(rows().await, 0);
    let audit = cli.json(&["audit"]);
    assert_eq!(audit.as_array().map(Vec::len), Some(2), "{audit}");
}
