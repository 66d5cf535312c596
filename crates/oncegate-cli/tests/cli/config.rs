//! The configuration.

use oncegate_config::settings::Kind;

use crate::desk::Desk;

#[test]
fn a_key_that_means_nothing_is_refused_with_the_nearest_one() {
    let desk = Desk::new();
    for (wrong, near) in [
        ("[gate]\nwindwo = \"1h\"", "did you mean gate.dedup-window?"),
        ("[gaet]\nwindow = \"1h\"", "did you mean gate?"),
        ("[kafka]\nbroker = \"x\"", "did you mean kafka.brokers?"),
        (
            "[kafka]\nzzzzzzzzzzzzzzzz = \"x\"",
            "`oncegate config keys` lists",
        ),
        ("[rabbitmq]\nqueue-file = \"x\"", "means nothing here"),
    ] {
        desk.configure(wrong);
        desk.run(&["config", "check"])
            .ended(2)
            .says(near)
            .says("oncegate.toml");
    }
    desk.configure("");
    desk.run_with(&["config", "check"], &[("ONCEGATE_GATE_WINDOWS", "1h")])
        .ended(2)
        .says("did you mean ONCEGATE_GATE_DEDUP_WINDOW?");
    for (wrong, near) in [
        ("ONCEGATE_KAFAK_TOPIC", "ONCEGATE_KAFKA_TOPIC"),
        ("ONCEGATE_STROE_URL", "ONCEGATE_STORE_URL"),
        ("ONCEGATE_STOR_URL_FILE", "ONCEGATE_STORE_URL_FILE"),
        ("ONCEGATE_RABBIT_QUEUE", "ONCEGATE_RABBITMQ_QUEUE"),
        ("ONCEGATE_GATES_WINDOW", "ONCEGATE_GATE_DEDUP_WINDOW"),
    ] {
        desk.run_with(&["config", "check"], &[(wrong, "1h")])
            .ended(2)
            .says(wrong)
            .says(&format!("did you mean {near}?"));
    }
    // Somebody else's: the tests', the tools' and the workers' own.
    let others = "KAFKA RABBITMQ REDIS CACHE OPERATOR TEST_RUN TEST_SQLITE_FILE LAWS_SEED FAULT_ROUNDS FAILPOINT SERVICE_HOST PORT_9623_TCP \
                  IMAGE BLOG_URL";
    let others: Vec<String> = others
        .split(' ')
        .map(|name| format!("ONCEGATE_{name}"))
        .collect();
    let others: Vec<(&str, &str)> = others.iter().map(|name| (name.as_str(), "x")).collect();
    desk.run_with(&["config", "check"], &others).ended(0);
}

#[test]
fn a_value_that_means_nothing_is_refused_with_its_key() {
    let desk = Desk::new();
    for (wrong, says) in [
        (
            "[gate]\nwindow = 5",
            "gate.dedup-window wants a time, in quotes",
        ),
        ("[gate]\nwindow = \"5 fortnights\"", "30s, 5m, 24h or 7d"),
        (
            "[gate]\nguarantee = \"exactly-once\"",
            "write one of at-most-once, effectively-once, bare",
        ),
        ("[gate]\norder = \"by-kye\"", "did you mean by-key?"),
        ("[gate]\nid = \"headers x\"", "gate.id"),
        ("[gate]\nrate = -1", "gate.rate wants a whole number"),
        ("[kafka]\nbrokers = [\"a\"]", "kafka.brokers wants a text"),
        ("scope = \"a|b\"", "store.scope"),
        ("cluster = [\"redis://x\"]", "set one of store.url"),
        (
            "sentinel-name = \"x\"",
            "store.sentinel-name needs store.sentinels",
        ),
        ("[admin]\nlisten = \"here\"", "admin.listen"),
        ("[gate", "line 4"),
    ] {
        desk.configure(wrong);
        desk.run(&["config", "check"]).ended(2).says(says);
    }
    desk.run(&["config", "check", "--config", "nowhere.toml"])
        .ended(2)
        .says("nowhere.toml");
    desk.configure("");
    desk.run_with(&["config", "check"], &[("ONCEGATE_GATE_RATE", "many")])
        .ended(2)
        .says("ONCEGATE_GATE_RATE");
}

#[test]
fn passwords_come_from_files_and_variables_and_are_never_shown() {
    let desk = Desk::new();
    desk.write("url", "redis://user:s3cret@host:1\n");
    desk.write("word", "s3cret\n");
    desk.write(
        "oncegate.toml",
        "[store]\nurl-file = \"url\"\n[kafka]\npassword-file = \"word\"\n[kafka.properties]\n\"sasl.username\" = \"me\"\n\
         \"ssl.key.password\" = \"s3cret\"\n[rabbitmq]\nurl = \"amqp://me:s3cr%2fet@host/x?password=s3cret\"\n",
    );
    let hidden = ["redis://user:***@host:1", "amqp://me:***@host/x"];
    for arguments in [&["config", "print"][..], &["config", "print", "--json"]] {
        let said = desk
            .run(arguments)
            .ended(0)
            .says(hidden[0])
            .says(hidden[1])
            .says("sasl.username");
        assert!(!said.out.contains("s3cr"), "{said:?}");
    }
    let said = desk
        .run_with(
            &["config", "print"],
            &[("ONCEGATE_STORE_URL", "redis://:an@0ther@host2:2")],
        )
        .ended(0);
    assert!(
        said.out.contains("redis://:***@host2:2") && said.out.contains("ONCEGATE_STORE_URL"),
        "the variable wins: {said:?}"
    );
    let properties = "sasl.username=you,ssl.key.password=s3cret,sasl.password=s3cret";
    let said = desk
        .run_with(
            &["config", "print"],
            &[("ONCEGATE_KAFKA_PROPERTIES", properties)],
        )
        .ended(0);
    assert!(
        said.out.contains("you")
            && said.out.contains("ONCEGATE_KAFKA_PROPERTIES")
            && !said.out.contains("s3cr"),
        "{said:?}"
    );
    let named = desk.path("url").display().to_string();
    desk.run_with(
        &["config", "print"],
        &[("ONCEGATE_RABBITMQ_URL_FILE", &named)],
    )
    .ended(0)
    .says("named by ONCEGATE_RABBITMQ_URL_FILE");
    desk.write("oncegate.toml", "[store]\nurl-file = \"nowhere\"\n");
    desk.run(&["config", "check"])
        .ended(2)
        .says("store.url-file")
        .says("nowhere");
    // A parser that shows the line shows what stands in it.
    desk.write(
        "oncegate.toml",
        "[store]\nurl = \"redis://:s3cret@host\" x\n",
    );
    let said = desk.run(&["config", "check"]).ended(2).says("line 2");
    assert!(!said.err.contains("s3cret"), "{said:?}");
}

#[test]
fn every_key_that_is_listed_can_be_set() {
    let desk = Desk::new();
    desk.write("oncegate.toml", "");
    let keys = desk.json(&["config", "keys"]);
    let keys = keys.as_array().expect("a list");
    assert!(keys.len() > 60);
    let value = |key: &str| match key.rsplit('.').next().expect("a name") {
        "sentinels" | "cluster" => "[\"redis://x\"]".to_owned(),
        "properties" => "{ \"client.rack\" = \"x\" }".to_owned(),
        _ => {
            let kind = oncegate_config::settings::find(key)
                .expect("a setting")
                .kind;
            match kind {
                Kind::Time => "\"1h\"".to_owned(),
                Kind::Number => "1".to_owned(),
                Kind::Choice(words) => format!("\"{}\"", words[0]),
                _ => "\"x\"".to_owned(),
            }
        }
    };
    for known in keys {
        let key = known["key"].as_str().expect("a key");
        let (section, name) = key.split_once('.').expect("a section");
        desk.write(
            "oncegate.toml",
            &format!("[{section}]\n{name} = {}\n", value(key)),
        );
        let said = desk.run(&["config", "print"]);
        assert!(said.code == 0 && said.out.contains(key), "{key}: {said:?}");
        if let Some(variable) = known["variable"].as_str() {
            desk.write("oncegate.toml", "");
            let text = value(key)
                .trim_matches(['"', '[', ']'])
                .trim_matches('"')
                .to_owned();
            desk.run_with(&["config", "print"], &[(variable, &text)])
                .ended(0)
                .says(variable);
        }
    }
}

#[test]
fn what_a_consumer_lacks_is_named_with_what_to_write() {
    let desk = Desk::new();
    let check = |text: &str| {
        desk.write("oncegate.toml", text);
        desk.run(&["config", "check"]).ended(0);
        desk.run(&["config", "check", "--consumer"])
    };
    let store = "[store]\nurl = \"redis://x\"\n";
    let gate = "[gate]\nid = \"message-id\"\n";
    let kafka = "[kafka]\nbrokers = \"x:1\"\ntopic = \"t\"\n";
    let rabbitmq = "[rabbitmq]\nqueue = \"q\"\n";
    for (text, says) in [
        (String::new(), "ONCEGATE_STORE_URL"),
        (
            store.to_owned(),
            "gate.id is missing; set it, or ONCEGATE_GATE_ID",
        ),
        (format!("{store}{gate}"), "no broker: set kafka.brokers"),
        (
            format!("{store}{gate}{kafka}"),
            "kafka.group is missing; set it, or ONCEGATE_KAFKA_GROUP",
        ),
        (
            format!("{store}{gate}{rabbitmq}"),
            "rabbitmq.url is missing",
        ),
        (
            format!("{store}{gate}{kafka}group = \"g\"\n{rabbitmq}"),
            "say which with gate.broker",
        ),
        (
            format!("{store}{gate}broker = \"rabbitmq\"\n{kafka}{rabbitmq}"),
            "rabbitmq.url is missing",
        ),
    ] {
        check(&text).ended(2).says(says);
    }
    check(&format!("{store}{gate}{kafka}group = \"g\"\n"))
        .ended(0)
        .says("a consumer can be wired from them");
}

#[test]
fn the_command_line_is_checked_and_explained() {
    let desk = Desk::new();
    desk.run(&["marker", "frobnicate"]).ended(2);
    desk.run(&["--help"])
        .ended(0)
        .says("Exit codes")
        .says("4  nothing was done");
}

/// Nothing that was looked at is no good news.
#[test]
fn without_a_configuration_nothing_is_reported_as_fine() {
    let desk = Desk::at("redis://127.0.0.1:1");
    std::fs::remove_file(desk.path("oncegate.toml")).expect("it was there");
    for command in [
        &["doctor"][..],
        &["config", "check"],
        &["config", "print"],
        &["explain", "x"],
    ] {
        let said = desk
            .run(command)
            .ended(2)
            .says("nothing is configured: there is no oncegate.toml here")
            .says("ONCEGATE_STORE_URL");
        assert_eq!(
            (said.out.as_str(), said.err.lines().count()),
            ("", 1),
            "{said:?}"
        );
    }
    for command in [
        &["marker", "list"][..],
        &["dead-letters", "list"],
        &["in-doubt", "list"],
        &["audit"],
    ] {
        let said = desk.run(command).ended(2);
        assert_eq!(
            (said.out.as_str(), said.err.lines().count()),
            ("", 1),
            "{said:?}"
        );
    }
    desk.run(&["doctor", "--list"]).ended(0);
    desk.write("oncegate.toml", "[gate]\nrate = 1\n");
    desk.run(&["doctor"])
        .ended(2)
        .says("no server is configured: set store.url");
    // A broker of which a part is missing is not passed over.
    desk.write(
        "oncegate.toml",
        "[kafka]\nbrokers = \"127.0.0.1:1\"\n[rabbitmq]\nurl = \"amqp://127.0.0.1:1\"\n",
    );
    let found = desk.run(&["doctor", "--json"]).ended(2).json();
    let missing: Vec<&str> = found["not_looked_at"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["why"].as_str().expect("a text"))
        .collect();
    assert!(
        missing[0].starts_with("kafka.topic is missing")
            && missing[1].starts_with("rabbitmq.queue is missing"),
        "{found}"
    );
}

#[test]
fn a_filter_that_names_nothing_known_is_refused_with_the_nearest_word() {
    let desk = Desk::new();
    desk.configure("[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\n");
    for (command, near) in [
        (
            &["dead-letters", "list", "--reason", "unreadabel"][..],
            "'unreadable'",
        ),
        (
            &["dead-letters", "drop", "--reason", "unusable_id", "--yes"],
            "'unusable-id'",
        ),
        (
            &["in-doubt", "list", "--reason", "in-doubt-to-old"],
            "'in-doubt-too-old'",
        ),
        (&["dead-letters", "list", "--broker", "kafak"], "'kafka'"),
        (
            &["marker", "list", "--state", "in-progres"],
            "'in-progress'",
        ),
    ] {
        desk.run(command)
            .ended(5)
            .says("possible values")
            .says(near);
    }
    desk.run(&["dead-letters", "list", "--reason"]).ended(2);
    desk.configure("scope = \"ledger\"\n");
    desk.run(&["audit", "--who", "ann"]).ended(0);
    desk.run(&["marker", "complete", "a", "--yes", "--as", "ann"])
        .ended(0);
    desk.run(&["audit", "--who", "anm"])
        .ended(5)
        .says("did you mean \"ann\"?");
    desk.run(&["audit", "--scope", "legder"])
        .ended(5)
        .says("did you mean \"ledger\"?");
    desk.run(&["audit", "--who", "ann", "--scope", "ledger"])
        .ended(0)
        .says("1 shown");
}
