//! Markers and the audit.

use std::time::Duration;

use oncegate::marker::Fingerprint;
use oncegate::marker::{Attempts, Effect, Guarantee, Marker, OperationKind, Terms, Verdict};

use crate::cli::{TestCli, terms};

/// One id in each state.
pub(crate) async fn write_one_marker_per_state(cli: &TestCli) {
    let body = Terms {
        fingerprint: Some(Fingerprint::new(42)),
        ..terms()
    };
    let claim = |id: &'static str, terms| cli.apply_one(id, OperationKind::Claim, 1, 0, terms);
    claim("held", terms()).await;
    claim(
        "left",
        Terms {
            lease: Duration::from_millis(1),
            ..terms()
        },
    )
    .await;
    claim("handled", body).await;
    cli.apply_one("handled", OperationKind::Complete, 1, 1, body)
        .await;
    claim("refused", terms()).await;
    cli.apply_one(
        "refused",
        OperationKind::Reject(Effect::Nothing),
        1,
        1,
        terms(),
    )
    .await;
    claim("unknown", terms()).await;
    cli.apply_one("unknown", OperationKind::Doubt, 1, 1, terms())
        .await;
    let again = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        ..terms()
    };
    claim("failed", again).await;
    cli.apply_one("failed", OperationKind::Clear(Effect::Unknown), 1, 1, again)
        .await;
}

/// The id, state and a part of the description of each marker, and of an id without a marker.
pub(crate) const MARKER_STATES: [(&str, &str, &str); 7] = [
    ("never", "absent", "never claimed"),
    (
        "held",
        "in-progress",
        "Claim 00000000 holds it for attempt 1",
    ),
    ("left", "lapsed", "The next delivery puts the id in doubt"),
    ("handled", "done", "accepted without a run"),
    ("refused", "rejected", "dead-lettered until it is redriven"),
    (
        "unknown",
        "in-doubt",
        "Whether an attempt up to number 1 had an effect is unknown; crashes: 0;",
    ),
    (
        "failed",
        "cleared",
        "The next attempt is 2; attempts that count towards max_attempts: 1. Whether an earlier attempt had an effect is unknown",
    ),
];

#[tokio::test]
async fn each_marker_state_is_described() {
    let cli = TestCli::new();
    write_one_marker_per_state(&cli).await;
    for (id, state, words) in MARKER_STATES {
        let shown = cli.json(&["marker", "show", id]);
        assert_eq!(shown["state"], state, "{shown}");
        assert!(
            shown["description"]
                .as_str()
                .is_some_and(|says| says.contains(words)),
            "{shown}"
        );
        cli.run(&["marker", "show", id]).exits_with(0).prints(words);
    }
    let done = cli.json(&["marker", "show", "handled"]);
    assert_eq!(done["fingerprint"], "000000000000000042");
    assert!(
        done["written_at_ms"].as_u64().is_some() && done["expires_in_ms"].as_u64().is_some(),
        "{done}"
    );
}

#[tokio::test]
async fn markers_are_listed_by_state_without_internal_keys() {
    let cli = TestCli::new();
    write_one_marker_per_state(&cli).await;
    let keys = |listed: &serde_json::Value| {
        let mut keys: Vec<String> = listed["markers"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|it| it["key"].as_str().expect("a key").to_owned())
            .collect();
        keys.sort();
        keys
    };
    let all = cli.json(&["marker", "list"]);
    assert_eq!(
        keys(&all),
        ["failed", "handled", "held", "left", "refused", "unknown"]
    );
    assert_eq!(all["all"], true);
    assert_eq!(
        keys(&cli.json(&["marker", "list", "--state", "lapsed", "--state", "done"])),
        ["handled", "left"]
    );
    assert_eq!(cli.json(&["marker", "list", "--limit", "2"])["all"], false);
    cli.run(&["marker", "list"])
        .exits_with(0)
        .prints("KEY")
        .prints("in doubt")
        .prints("6 shown");
    cli.configure("scope = \"ledger\"\n");
    cli.run(&["marker", "list"])
        .exits_with(0)
        .prints("No key has the scope ledger. Scopes of scanned keys: none.");
    cli.run(&["marker", "complete", "handled", "--yes"])
        .exits_with(0);
    assert_eq!(
        keys(&cli.json(&["marker", "list"])),
        ["ledger|handled"],
        "markers of other scopes are not listed"
    );
    cli.configure("scope = \"wrong\"\n");
    cli.run(&["marker", "list"])
        .exits_with(0)
        .prints("Scopes of scanned keys: ledger, none.");
    cli.configure("scope = \"ledger\"\n");
    assert_eq!(
        keys(&cli.json(&["marker", "list", "--every-scope"])).len(),
        7
    );
}

#[tokio::test]
async fn forget_previews_and_audits() {
    let cli = TestCli::new();
    write_one_marker_per_state(&cli).await;
    cli.run(&["marker", "forget", "handled"])
        .exits_with(4)
        .prints("would be handled AGAIN")
        .prints("pass --yes");
    assert_eq!(
        cli.json(&["marker", "show", "handled"])["state"],
        "done",
        "a preview changes nothing"
    );
    // The numbers continue above the last attempt, which a done marker does not store.
    for (id, last_attempt) in [("handled", 1_000_000), ("refused", 1)] {
        let says = format!("is cleared, attempt {last_attempt} now");
        cli.run(&[
            "marker", "forget", id, "--yes", "--why", "a test", "--as", "ann",
        ])
        .exits_with(0)
        .prints(&says);
        let shown = cli.json(&["marker", "show", id]);
        assert_eq!(
            (&shown["state"], &shown["last_attempt"]),
            (&"cleared".into(), &last_attempt.into())
        );
    }
    let refused = [
        ("held", "may be handling it"),
        ("left", "the next delivery claims it again"),
        ("failed", "already free to be claimed"),
        (
            "unknown",
            "`oncegate in-doubt resolve unknown --happened` or `--did-not-happen`",
        ),
    ];
    for (id, why) in refused {
        cli.run(&["marker", "forget", id, "--yes"])
            .exits_with(1)
            .prints(why);
    }
    cli.run(&["marker", "forget", "never", "--yes"])
        .exits_with(0)
        .prints("nothing to do");
    let audit = cli.json(&["audit"]);
    let actions = audit.as_array().expect("a list");
    assert_eq!(actions.len(), 2, "{audit}");
    let expected = [
        ("handled", "done", "cleared, attempt 1000000"),
        ("refused", "rejected, attempt 1", "cleared, attempt 1"),
    ];
    for (action, (id, before, after)) in actions.iter().zip(expected) {
        let output = |name: &str| action[name].as_str().unwrap_or_default().to_owned();
        let hashed = oncegate::MessageId::new(id)
            .expect("an id")
            .hashed()
            .to_string();
        assert_eq!(
            [output("who"), output("what"), output("id")],
            ["ann", "marker forget", hashed.as_str()],
            "the audit has only the hash of a forgotten id"
        );
        assert_eq!(
            [
                output("before"),
                output("after"),
                output("stage"),
                output("why")
            ],
            [before, after, "done", "a test"]
        );
        assert!(
            output("at").starts_with("20") && output("at").ends_with('Z'),
            "{action}"
        );
    }
    assert_eq!(
        cli.json(&["audit", "--id", "refused"])
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    assert_eq!(
        cli.json(&["audit", "--who", "ann"])
            .as_array()
            .map(Vec::len),
        Some(2)
    );
    cli.run(&["audit"])
        .exits_with(0)
        .prints("WHO")
        .prints("marker forget");
    // Forgotten again, it continues above the recorded attempt.
    cli.run(&["marker", "complete", "handled", "--yes"])
        .exits_with(0);
    cli.run(&["marker", "forget", "handled", "--yes"])
        .exits_with(0)
        .prints("is cleared, attempt 2000000 now");
    let next = Attempts {
        number: 2_000_001,
        base: 2_000_000,
        crashes: 0,
    };
    assert_eq!(
        cli.apply_one("handled", OperationKind::Claim, 9, 0, terms())
            .await,
        Verdict::Granted(next)
    );
}

#[tokio::test]
async fn completed_ids_do_not_run() {
    let cli = TestCli::new();
    write_one_marker_per_state(&cli).await;
    cli.run(&["marker", "complete", "unknown", "--dry-run"])
        .exits_with(0)
        .prints("The marker would be done");
    cli.run(&["marker", "complete", "unknown"])
        .exits_with(4)
        .prints("would count as handled");
    assert_eq!(
        cli.json(&["marker", "show", "unknown"])["state"],
        "in-doubt"
    );
    for id in ["unknown", "left", "failed", "never"] {
        cli.run(&["marker", "complete", id, "--yes"])
            .exits_with(0)
            .prints("is done now");
        assert!(
            matches!(
                cli.apply_one(id, OperationKind::Claim, 9, 0, terms()).await,
                oncegate::marker::Verdict::Duplicate
            ),
            "{id}"
        );
    }
    cli.run(&["marker", "complete", "handled", "--yes"])
        .exits_with(0)
        .prints("nothing to do");
    for id in ["held", "refused"] {
        cli.run(&["marker", "complete", id, "--yes"]).exits_with(1);
    }
    assert_eq!(cli.json(&["audit"]).as_array().map(Vec::len), Some(4));
}

#[tokio::test]
async fn completion_keeps_the_fingerprint_and_accepts_any_id() {
    let cli = TestCli::new();
    let body = Terms {
        fingerprint: Some(Fingerprint::new(7)),
        ..terms()
    };
    let odd = "söme {id} with\nlines";
    cli.apply_one(odd, OperationKind::Claim, 1, 0, body).await;
    cli.apply_one(odd, OperationKind::Doubt, 1, 1, body).await;
    cli.run(&["marker", "complete", odd, "--yes"]).exits_with(0);
    let shown = cli.json(&["marker", "show", odd]);
    assert_eq!(
        (&shown["state"], &shown["fingerprint"]),
        (&"done".into(), &"000000000000000007".into())
    );
    // As keys and logs show it.
    let stored = shown["key"].as_str().expect("a key");
    assert!(stored.starts_with("h:"));
    assert_eq!(cli.json(&["marker", "show", stored])["state"], "done");
}

#[tokio::test]
async fn no_change_without_an_audit() {
    let cli = TestCli::new();
    write_one_marker_per_state(&cli).await;
    let directory = cli.path("");
    cli.configure(&format!("[audit]\nfile = \"{}\"\n", directory.display()));
    cli.run(&["marker", "forget", "handled", "--yes"])
        .exits_with(3)
        .prints("nothing was done, since the audit cannot be");
    assert_eq!(cli.json(&["marker", "show", "handled"])["state"], "done");
    cli.configure(&format!(
        "[audit]\nfile = \"{}\"\n",
        cli.path("audit.jsonl").display()
    ));
    cli.run(&["marker", "forget", "handled", "--yes"])
        .exits_with(0);
    let lines = std::fs::read_to_string(cli.path("audit.jsonl")).expect("the audit");
    let stages: Vec<String> = lines
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).expect("JSON")["stage"]
                .as_str()
                .expect("a stage")
                .to_owned()
        })
        .collect();
    assert_eq!(stages, ["begun", "done"]);
    assert_eq!(
        cli.json(&["audit"]).as_array().map(Vec::len),
        Some(1),
        "the two lines of an action are one entry"
    );
    assert!(
        cli.store()
            .read_audit()
            .await
            .expect("Redis answers")
            .is_empty(),
        "only the configured file is written"
    );
}

#[tokio::test]
async fn unreadable_markers_are_listed_and_unchanged() {
    let cli = TestCli::new();
    let client = redis::Client::open(cli.redis.as_str()).expect("a URL");
    let mut plain = client
        .get_multiplexed_async_connection()
        .await
        .expect("Redis answers");
    let () = redis::cmd("SET")
        .arg(format!("{}odd", cli.prefix()))
        .arg("\u{1b}[2Jx")
        .query_async(&mut plain)
        .await
        .expect("set");
    let listed = cli.json(&["marker", "list"]);
    assert_eq!(listed["markers"][0]["state"], "unreadable", "{listed}");
    let key = format!("{}odd", cli.prefix());
    for command in [
        &["marker", "show", "odd"][..],
        &["marker", "forget", "odd"],
        &["marker", "complete", "odd"],
        &["in-doubt", "resolve", "odd", "--did-not-happen", "--yes"],
        &["in-doubt", "resolve", "odd", "--happened", "--yes"],
    ] {
        cli.run(command)
            .exits_with(1)
            .prints(&format!(
                "The value of the key {key} is not one that oncegate writes: a string of 5 bytes."
            ))
            .prints(&format!("`DEL {key}`"));
    }
    let () = redis::cmd("HSET")
        .arg(format!("{}hash", cli.prefix()))
        .arg(&["a", "secret", "b", "secret"])
        .query_async(&mut plain)
        .await
        .expect("set");
    for (id, value) in [
        ("odd", "a string of 5 bytes"),
        ("hash", "a hash of 2 elements"),
    ] {
        let explanation = cli.run(&["explain", id]).exits_with(0).prints(&format!(
            "The value of the key {}{id} is not one that oncegate writes: {value}.",
            cli.prefix()
        ));
        assert!(!explanation.out.contains("secret"), "{explanation:?}");
        let explanation = cli.json(&["explain", id]);
        assert_eq!(
            (&explanation["verdict"], &explanation["marker"]["state"]),
            (&"unreadable-marker".into(), &"unreadable".into()),
            "{explanation}"
        );
    }
    let () = redis::cmd("SET")
        .arg(format!("{}newer", cli.prefix()))
        .arg("v2 d 17")
        .query_async(&mut plain)
        .await
        .expect("set");
    let newer = cli
        .run(&["explain", "newer"])
        .exits_with(0)
        .prints(&format!("The key {}newer has", cli.prefix()))
        .prints("(record version 2, this release reads 1): upgrade oncegate here");
    assert!(!newer.out.contains("DEL "), "not to be deleted: {newer:?}");
    let seen = cli
        .store()
        .read_marker(&oncegate::Key::new(
            &oncegate::MessageId::new("odd").expect("an id"),
        ))
        .await;
    assert!(seen.is_err() && !matches!(seen, Ok(Marker::Absent)));
}

#[tokio::test]
async fn the_documented_permissions_suffice() {
    let book = include_str!("../../../../docs/src/stores.md");
    let line = book
        .lines()
        .find(|line| line.starts_with("ACL SETUSER oncegate "))
        .expect("the line of the book");
    assert!(
        include_str!("../../../../docs/src/cli.md").contains("needs `+xadd +xrange`")
            && line.contains("~processed:*")
    );
    let server = oncegate_testkit::servers::RedisServer::start(
        oncegate_testkit::servers::RedisOptions::new(),
    )
    .expect("Redis starts");
    let url = server
        .url()
        .replace("redis://", "redis://oncegate:PASSWORD@");
    server.command(line).expect("Redis answers");
    let cli = TestCli::at(&url);
    cli.write("oncegate.toml", &format!("[store]\nurl = \"{url}\"\n"));
    cli.run(&["marker", "complete", "x", "--yes"])
        .exits_with(3)
        .prints("nothing was done, since the audit cannot be")
        .prints("NOPERM");
    for command in [
        &["explain", "x"][..],
        &["marker", "list"],
        &["marker", "complete", "x", "--yes"],
    ] {
        let output = cli.run(command);
        // Redis 7.0 replies `this user`, later releases the name.
        let granted = ["<user>", "oncegate"].iter().any(|user| {
            format!("{output:?}").contains(&format!(
                "ACL SETUSER {user} +xadd +xrange +scan +type +strlen"
            ))
        });
        assert!(granted, "{command:?}: {output:?}");
    }
    assert_eq!(cli.json(&["marker", "show", "x"])["state"], "absent");
    server
        .command(&format!("{line} +xadd +xrange +scan"))
        .expect("Redis answers");
    cli.run(&["marker", "complete", "x", "--yes"]).exits_with(0);
    assert_eq!(cli.json(&["marker", "list"])["markers"][0]["key"], "x");
    assert_eq!(cli.json(&["audit"]).as_array().map(Vec::len), Some(1));
    cli.run(&["marker", "forget", "x", "--yes"]).exits_with(0);
}

#[test]
fn errors_do_not_contain_the_store_password() {
    let cli = TestCli::at("redis://:s3cret@127.0.0.1:1");
    let output = cli
        .run(&["marker", "show", "x"])
        .exits_with(3)
        .prints("127.0.0.1:1");
    assert!(!format!("{output:?}").contains("s3cret"), "{output:?}");
}

/// A record expires with the window; the output names a default window.
#[tokio::test]
async fn actions_report_how_long_they_last() {
    let cli = TestCli::new();
    cli.run(&["marker", "complete", "a"])
        .exits_with(4)
        .prints("The marker would be done for 1 d, the default.");
    cli.run(&["marker", "complete", "a", "--yes"])
        .exits_with(0)
        .prints("for 1 d, the default");
    assert_eq!(
        cli.json(&["audit"])[0]["after"],
        "done for 1 d, the default"
    );
    cli.configure("[gate]\ndedup-window = \"7d\"\n");
    cli.run(&["marker", "complete", "b", "--yes"])
        .exits_with(0)
        .prints("is done now for 7 d");
}

#[tokio::test]
async fn forgotten_ids_are_found_in_the_audit_by_id() {
    let book = include_str!("../../../../docs/src/operating.md");
    assert!(book.contains("\n## Erase an id\n"));
    let cli = TestCli::new();
    cli.run(&["marker", "complete", "anna@example.org", "--yes"])
        .exits_with(0);
    for (yes, code) in [(&[][..], 4), (&["--yes"], 0)] {
        let forget: Vec<&str> = ["marker", "forget", "anna@example.org"]
            .into_iter()
            .chain(yes.iter().copied())
            .collect();
        cli.run(&forget)
            .exits_with(code)
            .prints("The audit still names the id, in 1 earlier action; to remove");
    }
    let audit = cli.json(&["audit", "--id", "anna@example.org"]);
    assert_eq!(audit.as_array().map(Vec::len), Some(2));
    assert!(
        audit[1]["id"]
            .as_str()
            .is_some_and(|id| id.starts_with("h:")),
        "{audit}"
    );
    cli.configure("[gate]\nid = \"header payment-id hashed\"\n");
    assert!(
        cli.json(&["marker", "show", "anna@example.org"])["key"]
            .as_str()
            .is_some_and(|key| key.starts_with("h:"))
    );
}

#[test]
fn a_truncated_audit_line_affects_no_other_and_the_file_is_private() {
    let cli = TestCli::new();
    let file = cli.path("audit.jsonl");
    cli.configure(&format!("[audit]\nfile = \"{}\"\n", file.display()));
    cli.run(&["marker", "complete", "a", "--yes"]).exits_with(0);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(&file).expect("the audit").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    let whole = std::fs::read_to_string(&file).expect("the audit");
    std::fs::write(&file, format!("{whole}{{\"act\":\"0")).expect("the file is writable");
    cli.run(&["marker", "complete", "b", "--yes"]).exits_with(0);
    let lines = std::fs::read_to_string(&file).expect("the audit");
    assert_eq!(
        lines
            .lines()
            .filter(|line| serde_json::from_str::<serde_json::Value>(line).is_ok())
            .count(),
        4,
        "two lines for each action: {lines}"
    );
    let audit = cli
        .run(&["audit", "--json"])
        .exits_with(1)
        .prints("lines of the audit that cannot be read, and are not shown: 1")
        .json();
    let ends: Vec<_> = audit
        .as_array()
        .expect("a list")
        .iter()
        .map(|action| action["stage"].clone())
        .collect();
    assert_eq!(ends, ["done", "done"]);
}
