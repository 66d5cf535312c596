//! The commands on PostgreSQL.

use oncegate::marker::{Attempts, OperationKind, Verdict};

use crate::cli::{TestCli, terms};
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
