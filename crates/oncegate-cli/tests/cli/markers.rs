//! Markers and the audit.

use std::time::Duration;

use oncegate::Fingerprint;
use oncegate::marker::{Ask, Attempts, Effect, Guarantee, Marker, Terms, Verdict};

use crate::desk::{Desk, terms};

/// One id in each state.
pub(crate) async fn one_of_each(desk: &Desk) {
    let body = Terms {
        fingerprint: Some(Fingerprint::new(42)),
        ..terms()
    };
    let claim = |id: &'static str, terms| desk.ask(id, Ask::Claim, 1, 0, terms);
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
    desk.ask("handled", Ask::Complete, 1, 1, body).await;
    claim("refused", terms()).await;
    desk.ask("refused", Ask::Reject(Effect::Nothing), 1, 1, terms())
        .await;
    claim("unknown", terms()).await;
    desk.ask("unknown", Ask::Doubt, 1, 1, terms()).await;
    let again = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        ..terms()
    };
    claim("failed", again).await;
    desk.ask("failed", Ask::Clear(Effect::Unknown), 1, 1, again)
        .await;
}

/// Of each of them, and of one that never was: its state, and what is said of it.
pub(crate) const TOLD: [(&str, &str, &str); 7] = [
    ("never", "absent", "never claimed"),
    (
        "held",
        "in-progress",
        "Claim 00000000 holds it for attempt 1",
    ),
    ("left", "lapsed", "The next delivery finds it in doubt"),
    ("handled", "done", "accepted without a run"),
    ("refused", "rejected", "dead-lettered until it is redriven"),
    (
        "unknown",
        "in-doubt",
        "Nobody knows whether it happened in attempt 1",
    ),
    (
        "failed",
        "cleared",
        "The next attempt is 2; attempts used of the budget: 1. Whether an earlier attempt had an effect is unknown",
    ),
];

#[tokio::test]
async fn each_state_is_told_in_plain_words() {
    let desk = Desk::new();
    one_of_each(&desk).await;
    for (id, state, words) in TOLD {
        let shown = desk.json(&["marker", "show", id]);
        assert_eq!(shown["state"], state, "{shown}");
        assert!(
            shown["says"]
                .as_str()
                .is_some_and(|says| says.contains(words)),
            "{shown}"
        );
        desk.run(&["marker", "show", id]).ended(0).says(words);
    }
    let done = desk.json(&["marker", "show", "handled"]);
    assert_eq!(done["fingerprint"], "000000000000000042");
    assert!(
        done["written_at_ms"].as_u64().is_some() && done["expires_in_ms"].as_u64().is_some(),
        "{done}"
    );
}

#[tokio::test]
async fn markers_are_listed_by_state_and_the_librarys_own_keys_are_not() {
    let desk = Desk::new();
    one_of_each(&desk).await;
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
    let all = desk.json(&["marker", "list"]);
    assert_eq!(
        keys(&all),
        ["failed", "handled", "held", "left", "refused", "unknown"]
    );
    assert_eq!(all["all"], true);
    assert_eq!(
        keys(&desk.json(&["marker", "list", "--state", "lapsed", "--state", "done"])),
        ["handled", "left"]
    );
    assert_eq!(desk.json(&["marker", "list", "--limit", "2"])["all"], false);
    desk.run(&["marker", "list"])
        .ended(0)
        .says("KEY")
        .says("in doubt")
        .says("6 shown");
    desk.configure("scope = \"ledger\"\n");
    desk.run(&["marker", "complete", "handled", "--yes"])
        .ended(0);
    assert_eq!(
        keys(&desk.json(&["marker", "list"])),
        ["ledger|handled"],
        "another scope's marker is another one"
    );
    assert_eq!(
        keys(&desk.json(&["marker", "list", "--every-scope"])).len(),
        7
    );
}

#[tokio::test]
async fn nothing_is_forgotten_that_was_not_shown_first_and_all_of_it_is_audited() {
    let desk = Desk::new();
    one_of_each(&desk).await;
    desk.run(&["marker", "forget", "handled"])
        .ended(4)
        .says("would be handled AGAIN")
        .says("say --yes");
    assert_eq!(
        desk.json(&["marker", "show", "handled"])["state"],
        "done",
        "showing changes nothing"
    );
    // The fence goes on above the last attempt, which a done marker does not hold.
    for (id, fence) in [("handled", 1_000_000), ("refused", 1)] {
        let says = format!("is cleared, attempt {fence} now");
        desk.run(&[
            "marker", "forget", id, "--yes", "--why", "a test", "--as", "ann",
        ])
        .ended(0)
        .says(&says);
        let shown = desk.json(&["marker", "show", id]);
        assert_eq!(
            (&shown["state"], &shown["fence"]),
            (&"cleared".into(), &fence.into())
        );
    }
    let refused = [
        ("held", "may be at work"),
        ("left", "may be at work"),
        ("failed", "free to be claimed already"),
        (
            "unknown",
            "`oncegate in-doubt resolve unknown --happened` or `--did-not-happen`",
        ),
    ];
    for (id, why) in refused {
        desk.run(&["marker", "forget", id, "--yes"])
            .ended(1)
            .says(why);
    }
    desk.run(&["marker", "forget", "never", "--yes"])
        .ended(0)
        .says("nothing to do");
    let audit = desk.json(&["audit"]);
    let acts = audit.as_array().expect("a list");
    assert_eq!(acts.len(), 2, "{audit}");
    let expected = [
        ("handled", "done", "cleared, attempt 1000000"),
        ("refused", "rejected, attempt 1", "cleared, attempt 1"),
    ];
    for (act, (id, before, after)) in acts.iter().zip(expected) {
        let said = |name: &str| act[name].as_str().unwrap_or_default().to_owned();
        let hashed = oncegate::MessageId::new(id)
            .expect("an id")
            .hashed()
            .to_string();
        assert_eq!(
            [said("who"), said("what"), said("id")],
            ["ann", "marker forget", hashed.as_str()],
            "what is forgotten is not kept"
        );
        assert_eq!(
            [said("before"), said("after"), said("stage"), said("why")],
            [before, after, "done", "a test"]
        );
        assert!(
            said("at").starts_with("20") && said("at").ends_with('Z'),
            "{act}"
        );
    }
    assert_eq!(
        desk.json(&["audit", "--id", "refused"])
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    assert_eq!(
        desk.json(&["audit", "--who", "ann"])
            .as_array()
            .map(Vec::len),
        Some(2)
    );
    desk.run(&["audit"])
        .ended(0)
        .says("WHO")
        .says("marker forget");
    // Forgotten once more, it goes on above what was named then.
    desk.run(&["marker", "complete", "handled", "--yes"])
        .ended(0);
    desk.run(&["marker", "forget", "handled", "--yes"])
        .ended(0)
        .says("is cleared, attempt 2000000 now");
    let next = Attempts {
        number: 2_000_001,
        base: 2_000_000,
        crashes: 0,
    };
    assert_eq!(
        desk.ask("handled", Ask::Claim, 9, 0, terms()).await,
        Verdict::Granted(next)
    );
}

#[tokio::test]
async fn what_an_operator_completes_is_not_run_any_more() {
    let desk = Desk::new();
    one_of_each(&desk).await;
    desk.run(&["marker", "complete", "unknown"])
        .ended(4)
        .says("would count as handled");
    assert_eq!(
        desk.json(&["marker", "show", "unknown"])["state"],
        "in-doubt"
    );
    for id in ["unknown", "left", "failed", "never"] {
        desk.run(&["marker", "complete", id, "--yes"])
            .ended(0)
            .says("is done now");
        assert!(
            matches!(
                desk.ask(id, Ask::Claim, 9, 0, terms()).await,
                oncegate::marker::Verdict::Duplicate
            ),
            "{id}"
        );
    }
    desk.run(&["marker", "complete", "handled", "--yes"])
        .ended(0)
        .says("nothing to do");
    for id in ["held", "refused"] {
        desk.run(&["marker", "complete", id, "--yes"]).ended(1);
    }
    assert_eq!(desk.json(&["audit"]).as_array().map(Vec::len), Some(4));
}

#[tokio::test]
async fn a_fingerprint_outlives_a_completion_and_an_id_may_be_anything() {
    let desk = Desk::new();
    let body = Terms {
        fingerprint: Some(Fingerprint::new(7)),
        ..terms()
    };
    let odd = "söme {id} with\nlines";
    desk.ask(odd, Ask::Claim, 1, 0, body).await;
    desk.ask(odd, Ask::Doubt, 1, 1, body).await;
    desk.run(&["marker", "complete", odd, "--yes"]).ended(0);
    let shown = desk.json(&["marker", "show", odd]);
    assert_eq!(
        (&shown["state"], &shown["fingerprint"]),
        (&"done".into(), &"000000000000000007".into())
    );
    // As it stands in keys and logs.
    let stored = shown["key"].as_str().expect("a key");
    assert!(stored.starts_with("h:"));
    assert_eq!(desk.json(&["marker", "show", stored])["state"], "done");
}

#[tokio::test]
async fn nothing_is_done_that_cannot_be_audited() {
    let desk = Desk::new();
    one_of_each(&desk).await;
    let directory = desk.path("");
    desk.configure(&format!("[audit]\nfile = \"{}\"\n", directory.display()));
    desk.run(&["marker", "forget", "handled", "--yes"])
        .ended(3)
        .says("nothing was done, since the audit cannot be");
    assert_eq!(desk.json(&["marker", "show", "handled"])["state"], "done");
    desk.configure(&format!(
        "[audit]\nfile = \"{}\"\n",
        desk.path("audit.jsonl").display()
    ));
    desk.run(&["marker", "forget", "handled", "--yes"]).ended(0);
    let lines = std::fs::read_to_string(desk.path("audit.jsonl")).expect("the audit");
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
        desk.json(&["audit"]).as_array().map(Vec::len),
        Some(1),
        "both lines are one act"
    );
    assert!(
        desk.store()
            .read_audit()
            .await
            .expect("Redis answers")
            .is_empty(),
        "the file alone"
    );
}

#[tokio::test]
async fn what_no_release_reads_is_listed_and_left_alone() {
    let desk = Desk::new();
    let client = redis::Client::open(desk.redis.as_str()).expect("a URL");
    let mut plain = client
        .get_multiplexed_async_connection()
        .await
        .expect("Redis answers");
    let () = redis::cmd("SET")
        .arg(format!("{}odd", desk.prefix()))
        .arg("\u{1b}[2Jx")
        .query_async(&mut plain)
        .await
        .expect("set");
    let listed = desk.json(&["marker", "list"]);
    assert_eq!(listed["markers"][0]["state"], "unreadable", "{listed}");
    for command in ["show", "forget", "complete"] {
        desk.run(&["marker", command, "odd"])
            .ended(3)
            .says("left as it is");
    }
    let seen = desk
        .store()
        .look(&oncegate::Key::new(
            &oncegate::MessageId::new("odd").expect("an id"),
        ))
        .await;
    assert!(seen.is_err() && !matches!(seen, Ok(Marker::Absent)));
}

#[tokio::test]
async fn the_rights_that_the_book_lists_are_enough() {
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
    let desk = Desk::at(&url);
    desk.write("oncegate.toml", &format!("[store]\nurl = \"{url}\"\n"));
    desk.run(&["marker", "complete", "x", "--yes"])
        .ended(3)
        .says("nothing was done, since the audit cannot be")
        .says("NOPERM");
    assert_eq!(desk.json(&["marker", "show", "x"])["state"], "absent");
    server
        .command(&format!("{line} +xadd +xrange +scan"))
        .expect("Redis answers");
    desk.run(&["marker", "complete", "x", "--yes"]).ended(0);
    assert_eq!(desk.json(&["marker", "list"])["markers"][0]["key"], "x");
    assert_eq!(desk.json(&["audit"]).as_array().map(Vec::len), Some(1));
    desk.run(&["marker", "forget", "x", "--yes"]).ended(0);
}

#[test]
fn a_store_that_is_not_there_is_told_of_without_its_password() {
    let desk = Desk::at("redis://:s3cret@127.0.0.1:1");
    let said = desk
        .run(&["marker", "show", "x"])
        .ended(3)
        .says("127.0.0.1:1");
    assert!(!format!("{said:?}").contains("s3cret"), "{said:?}");
}

/// What an operator writes stands for a window, and who has not said which is told so.
#[tokio::test]
async fn an_act_tells_how_long_it_lasts() {
    let desk = Desk::new();
    desk.run(&["marker", "complete", "a"])
        .ended(4)
        .says("It would be done for 1 d, the default.");
    desk.run(&["marker", "complete", "a", "--yes"])
        .ended(0)
        .says("for 1 d, the default");
    assert_eq!(
        desk.json(&["audit"])[0]["after"],
        "done for 1 d, the default"
    );
    desk.configure("[gate]\nwindow = \"7d\"\n");
    desk.run(&["marker", "complete", "b", "--yes"])
        .ended(0)
        .says("is done now for 7 d");
}

#[tokio::test]
async fn what_was_forgotten_is_found_in_the_audit_by_its_id_alone() {
    let desk = Desk::new();
    desk.run(&["marker", "complete", "anna@example.org", "--yes"])
        .ended(0);
    for (yes, code) in [(&[][..], 4), (&["--yes"], 0)] {
        let forget: Vec<&str> = ["marker", "forget", "anna@example.org"]
            .into_iter()
            .chain(yes.iter().copied())
            .collect();
        desk.run(&forget)
            .ended(code)
            .says("The audit still names it, in 1 earlier act:");
    }
    let audit = desk.json(&["audit", "--id", "anna@example.org"]);
    assert_eq!(audit.as_array().map(Vec::len), Some(2));
    assert!(
        audit[1]["id"]
            .as_str()
            .is_some_and(|id| id.starts_with("h:")),
        "{audit}"
    );
    desk.configure("[gate]\nid = \"header payment-id hashed\"\n");
    assert!(
        desk.json(&["marker", "show", "anna@example.org"])["key"]
            .as_str()
            .is_some_and(|key| key.starts_with("h:"))
    );
}

#[test]
fn a_line_of_the_audit_that_was_cut_off_swallows_no_other_and_the_file_is_nobody_elses() {
    let desk = Desk::new();
    let file = desk.path("audit.jsonl");
    desk.configure(&format!("[audit]\nfile = \"{}\"\n", file.display()));
    desk.run(&["marker", "complete", "a", "--yes"]).ended(0);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(&file).expect("the audit").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    let whole = std::fs::read_to_string(&file).expect("the audit");
    std::fs::write(&file, format!("{whole}{{\"act\":\"0")).expect("the file is ours");
    desk.run(&["marker", "complete", "b", "--yes"]).ended(0);
    let lines = std::fs::read_to_string(&file).expect("the audit");
    assert_eq!(
        lines
            .lines()
            .filter(|line| serde_json::from_str::<serde_json::Value>(line).is_ok())
            .count(),
        4,
        "two lines an act: {lines}"
    );
    let audit = desk
        .run(&["audit", "--json"])
        .ended(1)
        .says("lines of the audit that cannot be read, and are not shown: 1")
        .json();
    let ends: Vec<_> = audit
        .as_array()
        .expect("a list")
        .iter()
        .map(|act| act["stage"].clone())
        .collect();
    assert_eq!(ends, ["done", "done"]);
}
