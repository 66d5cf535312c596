//! Each finding of `oncegate doctor`, from a real misconfiguration. A good setup must have no
//! findings.

mod kafka;
mod rabbitmq;
mod redis;

use std::process::Command;

use serde_json::Value;

use crate::cli::TestCli;

const AT_MOST_ONCE: &str = "scope = \"s\"\n[gate]\nguarantee = \"at-most-once\"\n";

/// Code and level of the findings that are problems.
fn findings(cli: &TestCli) -> Vec<(String, String)> {
    let output = cli.run(&["doctor", "--json"]);
    assert!(output.code <= 1, "{output:?}");
    let json = output.json();
    let findings = json["findings"].as_array().expect("a list");
    let text = |finding: &Value, name: &str| finding[name].as_str().expect("a text").to_owned();
    for finding in findings {
        assert!(
            text(finding, "remedy").len() > 10 && text(finding, "what").len() > 10,
            "a finding has a problem and a remedy: {finding}"
        );
    }
    let bad: Vec<(String, String)> = findings
        .iter()
        .filter(|finding| finding["level"] != "advice")
        .map(|finding| (text(finding, "code"), text(finding, "level")))
        .collect();
    let has_errors = bad.iter().any(|(_, level)| level == "error");
    assert_eq!(output.code, i32::from(has_errors), "{output:?}");
    bad
}

#[track_caller]
fn assert_findings(cli: &TestCli, expected: &[(&str, &str)]) {
    let expected: Vec<(String, String)> = expected
        .iter()
        .map(|(code, level)| ((*code).to_owned(), (*level).to_owned()))
        .collect();
    assert_eq!(findings(cli), expected);
}

/// Asserts the findings of a configuration without a store, besides the one that reports this.
#[track_caller]
fn assert_broker_findings(cli: &TestCli, expected: &[(&str, &str)]) {
    let mut found = findings(cli);
    let store = ("store-not-configured".to_owned(), "error".to_owned());
    let at = found.iter().position(|finding| *finding == store);
    found.remove(at.unwrap_or_else(|| panic!("no finding about the store: {found:?}")));
    let found: Vec<(&str, &str)> = found
        .iter()
        .map(|(code, level)| (code.as_str(), level.as_str()))
        .collect();
    assert_eq!(found, expected);
}

/// Each code occurs in a test of this module.
#[test]
fn every_finding_has_a_test() {
    let listed = TestCli::at("redis://127.0.0.1:1")
        .run(&["doctor", "--list", "--json"])
        .exits_with(0)
        .json();
    let codes: Vec<&str> = listed
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it[0].as_str().expect("a code"))
        .collect();
    let tests = concat!(
        include_str!("doctor.rs"),
        include_str!("doctor/kafka.rs"),
        include_str!("doctor/rabbitmq.rs"),
        include_str!("doctor/redis.rs"),
    );
    let missing: Vec<&&str> = codes
        .iter()
        .filter(|code| !tests.contains(&format!("\"{code}\"")))
        .collect();
    assert!(
        codes.len() > 40 && missing.is_empty(),
        "no test for {missing:?}"
    );
}

/// Each file system is mounted for the command only, which needs root.
#[test]
fn finds_a_full_disk() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    cli.write("oncegate.toml", "[store]\nurl = \"sqlite:small/ids.db\"\n");
    let small = cli.path("small");
    std::fs::create_dir(&small).expect("a directory");
    let mount_and_run = r#"mount -t tmpfs -o size="$0" tmpfs small && exec "$@""#;
    for (size, level) in [("512k", "error"), ("8m", "warning")] {
        let output = Command::new("unshare")
            .args(["--mount", "sh", "-c", mount_and_run, size])
            .arg(env!("CARGO_BIN_EXE_oncegate"))
            .args(["doctor", "--json"])
            .current_dir(cli.path("."))
            .output()
            .expect("unshare");
        let found: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("needs root: {error}: {output:?}"));
        let full = |it: &&Value| it["code"] == "store-disk-full";
        let found = found["findings"].as_array().expect("findings");
        assert_eq!(found.iter().find(full).expect("a finding")["level"], level);
    }
}

/// A consumer with this configuration does not start.
#[test]
fn finds_a_missing_store_or_broker() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    for broker in [
        "[rabbitmq]\nurl = \"amqp://127.0.0.1:1\"\nqueue = \"q\"\n",
        "[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\n",
    ] {
        cli.write("oncegate.toml", broker);
        let codes: Vec<String> = findings(&cli).into_iter().map(|(code, _)| code).collect();
        assert!(
            codes.contains(&"store-not-configured".to_owned()),
            "{broker}: {codes:?}"
        );
        cli.run(&["doctor"])
            .exits_with(1)
            .prints("set store.url in oncegate.toml");
    }
    // The configuration names a broker and lacks its keys.
    for (broker, missing) in [
        ("[rabbitmq]\nqueue = \"q\"\n", "rabbitmq.url is missing"),
        ("[rabbitmq]\n", "rabbitmq.url is missing"),
        ("[kafka]\n", "kafka.brokers is missing"),
        (
            "[gate]\nbroker = \"kafka\"\n",
            "kafka.brokers is missing; set it, or remove [kafka] and gate.broker",
        ),
    ] {
        cli.configure(broker);
        cli.run(&["doctor"]).exits_with(2).prints(missing);
    }
    cli.configure("");
    cli.run(&["doctor"]).prints("broker-not-configured");
    for (file, error) in [
        ("", "oncegate.toml sets no key"),
        ("[store]\n[rabbitmq]\n", "sets no key"),
        ("[stor]\nurl = \"redis://h\"\n", "did you mean store?"),
    ] {
        cli.write("oncegate.toml", file);
        cli.run(&["doctor"]).exits_with(2).prints(error);
    }
}

#[test]
fn finds_an_unusable_store() {
    for store in [
        "url = \"rediss://127.0.0.1:1\"\nca-certificate = \"/no/such.pem\"\n",
        "url = \"sqlite:/no/such/directory/markers.db\"\n",
        "url = \"sqlite:oncegate.toml\"\n",
    ] {
        let cli = TestCli::on_sqlite();
        cli.write("oncegate.toml", &format!("[store]\n{store}{AT_MOST_ONCE}"));
        assert_findings(&cli, &[("store-unusable", "error")]);
    }
}

#[tokio::test]
async fn finds_an_sqlite_file_in_memory() {
    let cli = TestCli::on_sqlite();
    cli.configure(AT_MOST_ONCE);
    assert_findings(&cli, &[("store-file-missing", "warning")]);
    let path = cli.path("markers.db").display().to_string();
    cli.run(&["doctor"])
        .exits_with(0)
        .prints("errors: 0, warnings: 1")
        .prints(&format!("no file yet at {path}"));
    assert!(!cli.path("markers.db").exists(), "doctor creates no file");
    cli.apply_one(
        "a",
        oncegate::marker::OperationKind::Claim,
        1,
        0,
        crate::cli::terms(),
    )
    .await;
    assert_findings(&cli, &[]);
    cli.run(&["doctor"])
        .exits_with(0)
        .prints("Checked the settings, SQLite");
    // A file system in memory, on every Linux.
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let file = memory.path().join("markers.db");
    cli.write(
        "oncegate.toml",
        &format!(
            "[store]\nurl = \"sqlite:{}\"\n{AT_MOST_ONCE}",
            file.display()
        ),
    );
    assert_findings(
        &cli,
        &[
            ("store-volatile", "error"),
            ("store-file-missing", "warning"),
        ],
    );
    oncegate::Store::persistence(&oncegate::Sqlite::file(&file))
        .await
        .expect("the file is created");
    for store in [format!("sqlite:{}", file.display()), "memory:".to_owned()] {
        cli.write(
            "oncegate.toml",
            &format!("[store]\nurl = \"{store}\"\n{AT_MOST_ONCE}"),
        );
        assert_findings(&cli, &[("store-volatile", "error")]);
        cli.write(
            "oncegate.toml",
            &format!("[store]\nurl = \"{store}\"\nscope = \"s\"\n"),
        );
        assert_findings(&cli, &[("store-volatile", "warning")]);
    }
}

#[test]
fn refuses_an_sqlite_database_in_memory() {
    let cli = TestCli::on_sqlite();
    let store = "[store]\nurl = \"sqlite::memory:\"\n";
    cli.write("oncegate.toml", &format!("{store}{AT_MOST_ONCE}"));
    cli.run(&["doctor"])
        .exits_with(2)
        .prints("store.url: sqlite::memory: is no file");
}

#[test]
fn an_unchecked_server_hides_no_findings() {
    let cli = TestCli::new();
    cli.configure("[gate]\ndedup-window = \"1h\"\nmax-age = \"2h\"\n[kafka]\n");
    let output = cli.run(&["doctor", "--json"]).exits_with(2);
    let findings = output.json();
    let codes: Vec<&str> = findings["findings"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["code"].as_str().expect("a code"))
        .collect();
    assert!(codes.contains(&"max-age-exceeds-window"), "{findings}");
    assert!(findings["not_checked"][0]["where"] == "kafka", "{findings}");
    cli.run(&["doctor"])
        .exits_with(2)
        .prints("max-age-exceeds-window")
        .prints("Not checked: kafka");
}
