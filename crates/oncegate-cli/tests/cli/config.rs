//! Configuration files and variables.

use oncegate_config::settings::ValueKind;

use crate::cli::TestCli;

#[test]
fn unknown_keys_are_rejected_with_a_suggestion() {
    let cli = TestCli::new();
    for (wrong, near) in [
        (
            "[gate]\ndedup-windwo = \"1h\"",
            "did you mean gate.dedup-window?",
        ),
        ("[gaet]\nwindow = \"1h\"", "did you mean gate?"),
        ("[kafka]\nbroker = \"x\"", "did you mean kafka.brokers?"),
        (
            "[kafka]\nzzzzzzzzzzzzzzzz = \"x\"",
            "`oncegate config keys` lists",
        ),
        ("[rabbitmq]\nqueue-file = \"x\"", "is unknown"),
    ] {
        cli.configure(wrong);
        cli.run(&["config", "check"])
            .exits_with(2)
            .prints(near)
            .prints("oncegate.toml");
    }
    cli.configure("");
    cli.run_with(
        &["config", "check"],
        &[("ONCEGATE_GATE_DEDUP_WINDOWS", "1h")],
    )
    .exits_with(2)
    .prints("did you mean ONCEGATE_GATE_DEDUP_WINDOW?");
    for (wrong, near) in [
        ("ONCEGATE_KAFAK_TOPIC", "ONCEGATE_KAFKA_TOPIC"),
        ("ONCEGATE_STROE_URL", "ONCEGATE_STORE_URL"),
        ("ONCEGATE_STOR_URL_FILE", "ONCEGATE_STORE_URL_FILE"),
        ("ONCEGATE_RABBIT_QUEUE", "ONCEGATE_RABBITMQ_QUEUE"),
        ("ONCEGATE_GATES_DEDUP_WINDOW", "ONCEGATE_GATE_DEDUP_WINDOW"),
    ] {
        cli.run_with(&["config", "check"], &[(wrong, "1h")])
            .exits_with(2)
            .prints(wrong)
            .prints(&format!("did you mean {near}?"));
    }
    // Variables of tests, tools and workers are ignored.
    let others = "KAFKA RABBITMQ REDIS CACHE OPERATOR TEST_RUN TEST_SQLITE_FILE LAWS_SEED FAULT_ROUNDS FAILPOINT SERVICE_HOST PORT_9623_TCP \
                  IMAGE BLOG_URL";
    let others: Vec<String> = others
        .split(' ')
        .map(|name| format!("ONCEGATE_{name}"))
        .collect();
    let others: Vec<(&str, &str)> = others.iter().map(|name| (name.as_str(), "x")).collect();
    cli.run_with(&["config", "check"], &others).exits_with(0);
}

#[test]
fn invalid_values_are_rejected_with_their_key() {
    let cli = TestCli::new();
    for (wrong, says) in [
        (
            "[gate]\ndedup-window = 5",
            "gate.dedup-window requires a duration, in quotes",
        ),
        (
            "[gate]\ndedup-window = \"5 fortnights\"",
            "30s, 5m, 24h or 7d",
        ),
        (
            "[gate]\nguarantee = \"exactly-once\"",
            "write one of at-most-once, effectively-once, bare",
        ),
        ("[gate]\norder = \"by-kye\"", "did you mean by-key?"),
        ("[gate]\nid = \"headers x\"", "gate.id"),
        ("[gate]\nrate = -1", "gate.rate requires a whole number"),
        (
            "[kafka]\nbrokers = [\"a\"]",
            "kafka.brokers requires a text",
        ),
        ("scope = \"a|b\"", "store.scope"),
        ("cluster = [\"redis://x\"]", "set one of store.url"),
        (
            "sentinel-name = \"x\"",
            "store.sentinel-name requires store.sentinels",
        ),
        ("[admin]\nlisten = \"here\"", "admin.listen"),
        ("[gate", "line 4"),
    ] {
        cli.configure(wrong);
        cli.run(&["config", "check"]).exits_with(2).prints(says);
    }
    cli.run(&["config", "check", "--config", "nowhere.toml"])
        .exits_with(2)
        .prints("nowhere.toml");
    cli.configure("");
    cli.run_with(&["config", "check"], &[("ONCEGATE_GATE_RATE", "many")])
        .exits_with(2)
        .prints("ONCEGATE_GATE_RATE");
}

#[test]
fn passwords_are_read_from_files_and_variables_and_never_shown() {
    let cli = TestCli::new();
    cli.write("url", "redis://user:s3cret@host:1\n");
    cli.write("word", "s3cret\n");
    cli.write(
        "oncegate.toml",
        "[store]\nurl-file = \"url\"\n[kafka]\npassword-file = \"word\"\n[kafka.properties]\n\"sasl.username\" = \"me\"\n\
         \"ssl.key.password\" = \"s3cret\"\n[rabbitmq]\nurl = \"amqp://me:s3cr%2fet@host/x?password=s3cret\"\n",
    );
    let hidden = ["redis://user:***@host:1", "amqp://me:***@host/x"];
    for arguments in [&["config", "print"][..], &["config", "print", "--json"]] {
        let output = cli
            .run(arguments)
            .exits_with(0)
            .prints(hidden[0])
            .prints(hidden[1])
            .prints("sasl.username");
        assert!(!output.out.contains("s3cr"), "{output:?}");
    }
    let output = cli
        .run_with(
            &["config", "print"],
            &[("ONCEGATE_STORE_URL", "redis://:an@0ther@host2:2")],
        )
        .exits_with(0);
    assert!(
        output.out.contains("redis://:***@host2:2") && output.out.contains("ONCEGATE_STORE_URL"),
        "a variable overrides the file: {output:?}"
    );
    for url in ["redis://host/?password=s3cr@3t", "redis://:s3cr?3t@host/"] {
        let output = cli
            .run_with(&["config", "print"], &[("ONCEGATE_STORE_URL", url)])
            .exits_with(0)
            .prints("redis://***");
        assert!(!output.out.contains("3t"), "{output:?}");
    }
    let properties = "sasl.username=you,ssl.key.password=s3cret,sasl.password=s3cret";
    let output = cli
        .run_with(
            &["config", "print"],
            &[("ONCEGATE_KAFKA_PROPERTIES", properties)],
        )
        .exits_with(0);
    assert!(
        output.out.contains("you")
            && output.out.contains("ONCEGATE_KAFKA_PROPERTIES")
            && !output.out.contains("s3cr"),
        "{output:?}"
    );
    let named = cli.path("url").display().to_string();
    cli.run_with(
        &["config", "print"],
        &[("ONCEGATE_RABBITMQ_URL_FILE", &named)],
    )
    .exits_with(0)
    .prints("named by ONCEGATE_RABBITMQ_URL_FILE");
    cli.write("oncegate.toml", "[store]\nurl-file = \"nowhere\"\n");
    cli.run(&["config", "check"])
        .exits_with(2)
        .prints("store.url-file")
        .prints("nowhere");
    // The error must not quote the line.
    cli.write(
        "oncegate.toml",
        "[store]\nurl = \"redis://:s3cret@host\" x\n",
    );
    let output = cli.run(&["config", "check"]).exits_with(2).prints("line 2");
    assert!(!output.err.contains("s3cret"), "{output:?}");
}

#[test]
fn every_listed_key_can_be_set() {
    let cli = TestCli::new();
    cli.write("oncegate.toml", "");
    let keys = cli.json(&["config", "keys"]);
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
                ValueKind::Time => "\"1h\"".to_owned(),
                ValueKind::Number => "1".to_owned(),
                ValueKind::Choice(words) => format!("\"{}\"", words[0]),
                _ => "\"x\"".to_owned(),
            }
        }
    };
    for known in keys {
        let key = known["key"].as_str().expect("a key");
        let (section, name) = key.split_once('.').expect("a section");
        cli.write(
            "oncegate.toml",
            &format!("[{section}]\n{name} = {}\n", value(key)),
        );
        let output = cli.run(&["config", "print"]);
        assert!(
            output.code == 0 && output.out.contains(key),
            "{key}: {output:?}"
        );
        if let Some(variable) = known["variable"].as_str() {
            cli.write("oncegate.toml", "");
            let text = value(key)
                .trim_matches(['"', '[', ']'])
                .trim_matches('"')
                .to_owned();
            cli.run_with(&["config", "print"], &[(variable, &text)])
                .exits_with(0)
                .prints(variable);
        }
    }
}

#[test]
fn an_empty_operator_name_is_ignored() {
    let cli = TestCli::on_sqlite();
    std::fs::write(cli.path("markers.db"), "").expect("the directory is writable");
    let complete = |id, more: &[&str], variables: &[(&str, &str)]| {
        let arguments = [&["marker", "complete", id, "--yes"], more].concat();
        cli.run_with(&arguments, variables).exits_with(0);
    };
    complete("a", &[], &[("ONCEGATE_OPERATOR", ""), ("USER", "ann")]);
    complete(
        "b",
        &["--as", " "],
        &[("SUDO_USER", ""), ("USER", "ann"), ("LOGNAME", "bob")],
    );
    for action in cli.json(&["audit"]).as_array().expect("a list") {
        let who = action["who"].as_str().expect("a text");
        assert!(who.starts_with("ann@"), "{action}");
    }
    let unset = [("SUDO_USER", ""), ("USER", ""), ("LOGNAME", "")];
    complete("c", &[], &unset);
    let actions = cli.json(&["audit", "--id", "c"]);
    let (who, file) = (
        actions[0]["who"].as_str().expect("a text"),
        std::fs::metadata(cli.path("oncegate.toml")).expect("the metadata"),
    );
    let uid = std::os::unix::fs::MetadataExt::uid(&file);
    assert!(who.starts_with(&format!("uid-{uid}@")), "{actions}");
    cli.run(&["config", "check", "--broker", "kafka"])
        .exits_with(2)
        .prints("ONCEGATE_GATE_BROKER=kafka oncegate config check --consumer");
}

/// `config check --consumer` refuses what the consumer refuses at start.
#[test]
fn check_refuses_what_the_consumer_refuses() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    let file = |gate: &str, store: &str, more: &str| {
        format!(
            "[gate]\nid = \"message-id\"\n{gate}\n[store]\n{store}\n[rabbitmq]\nurl = \"amqp://h\"\nqueue = \"q\"\n{more}"
        )
    };
    let (redis, at_most_once) = ("url = \"redis://h\"", "guarantee = \"at-most-once\"\n");
    let check = |text: &str| {
        cli.write("oncegate.toml", text);
        cli.run(&["config", "check", "--consumer"])
    };
    check(&file("", redis, "")).exits_with(0);
    for (gate, says) in [
        ("max-attempts = 0", "gate.max-attempts: it is 0"),
        ("max-in-flight = 0", "gate.max-in-flight: it is 0"),
        ("max-queued = 0", "gate.max-queued: it is 0"),
        ("max-reconciles = 0", "gate.max-reconciles: it is 0"),
        ("max-crashes = 1", "gate.max-crashes: "),
        ("lease = \"0s\"", "gate.lease: "),
        ("lease = \"25h\"", "gate.lease: "),
        ("shortest-lease = \"60s\"", "gate.shortest-lease is longer"),
        ("backoff = \"0s\"", "gate.backoff: "),
        (
            "backoff = \"2s\"\nlongest-backoff = \"1s\"",
            "gate.backoff: the longest pause, 1s, is shorter than the first, 2s",
        ),
        ("max-age = \"48h\"", "gate.max-age: "),
        ("dedup-window = \"0s\"", "gate.dedup-window: "),
        ("handler-timeout = \"0s\"", "gate.handler-timeout: "),
        ("drain-timeout = \"4000d\"", "gate.drain-timeout: "),
    ] {
        check(&file(gate, redis, "")).exits_with(2).prints(says);
    }
    for (gate, says) in [
        ("outage = \"pass-through\"", "gate.outage: "),
        ("mode = \"shadow\"", "gate.mode: "),
    ] {
        let gate = format!("{at_most_once}{gate}");
        check(&file(&gate, redis, "")).exits_with(2).prints(says);
    }
    for (store, says) in [
        ("url = \"redis://h:99999\"", "store.url: "),
        (
            "url = \"rediss://h#insecure\"",
            "store.url: the URL ends in #insecure",
        ),
        ("url = \"redis://:s3cr/et@h\"", "store.url: "),
        ("cluster = [\"redis://h\", \"x\"]", "store.cluster: "),
        (
            "sentinels = [\"x\"]\nsentinel-name = \"m\"",
            "store.sentinels: ",
        ),
        (
            "url = \"rediss://h\"\nca-certificate = \"/no/such.pem\"",
            "store.ca-certificate: ",
        ),
        (
            "url = \"redis://h\"\nclient-certificate = \"a\"\nclient-key = \"b\"",
            "store.client-certificate: ",
        ),
        ("url = \"redis://h\"\ntimeout = \"0s\"", "store.timeout: "),
        ("url = \"sqlite:x.db\"\ntimeout = \"0s\"", "store.timeout: "),
        ("url = \"redis://h\"\nreplicas = 0", "store.replicas: "),
        (
            "url = \"redis://h\"\nreplicas = 1\nreplicas-timeout = \"0s\"",
            "store.replicas-timeout: ",
        ),
        ("url = \"sqlite::memory:\"", "store.url: "),
    ] {
        let output = check(&file("", store, "")).exits_with(2).prints(says);
        assert!(!output.err.contains("s3cr"), "{output:?}");
    }
    check(&file(at_most_once, "url = \"memory:\"", ""))
        .exits_with(2)
        .prints("gate.guarantee: at most once requires a durable store");
    let source = |section: &str| {
        check(&format!(
            "[gate]\nid = \"header id\"\n[store]\n{redis}\n{section}"
        ))
    };
    let rabbitmq = "[rabbitmq]\nqueue = \"q\"\n";
    for (more, says) in [
        ("url = \"amqp://h\"\nprefetch = 0\n", "rabbitmq.prefetch: 0"),
        ("url = \"http://h\"\n", "rabbitmq.url: "),
        ("url = \"amqp://me:s3cr/et@h\"\n", "rabbitmq.url: "),
        (
            "url = \"amqp://h\"\ndead-letters = \"q\"\n",
            "rabbitmq.dead-letters: `q` is the consumed queue",
        ),
        (
            "url = \"amqp://h\"\nconsumer-timeout = \"1ms\"\n",
            "rabbitmq.consumer-timeout: ",
        ),
        (
            "url = \"amqps://h\"\nca-certificate = \"/no/such.pem\"\n",
            "rabbitmq.ca-certificate: ",
        ),
    ] {
        let output = source(&format!("{rabbitmq}{more}"))
            .exits_with(2)
            .prints(says);
        assert!(!output.err.contains("s3cr"), "{output:?}");
    }
    let kafka = "[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\ngroup = \"g\"\n";
    source(kafka).exits_with(0);
    for (id, broker) in [("message-id", kafka), ("position", rabbitmq)] {
        cli.write("oncegate.toml", &format!("[gate]\nid = \"{id}\"\n{broker}"));
        cli.run(&["config", "check"])
            .exits_with(2)
            .prints(&format!("gate.id: {id} reads "));
    }
    for (more, says) in [
        ("in-doubt = \"t\"\n", "kafka.in-doubt: "),
        ("stalled-after = \"1ms\"\n", "kafka.stalled-after: "),
        (
            "properties = { \"enable.auto.commit\" = \"false\" }\n",
            "kafka.properties: enable.auto.commit: ",
        ),
        (
            "properties = { \"session.timeout\" = \"1\" }\n",
            "kafka.properties: session.timeout: ",
        ),
        (
            "properties = { \"session.timeout.ms\" = \"soon\" }\n",
            "kafka.properties: session.timeout.ms: ",
        ),
    ] {
        source(&format!("{kafka}{more}")).exits_with(2).prints(says);
    }
    let no_port = kafka.replace("127.0.0.1:1", "http://127.0.0.1:1");
    source(&no_port).exits_with(2).prints("kafka.brokers: ");
    let log = "[log]\nfilter = \"info,=\"\n";
    check(&file("", redis, log))
        .exits_with(2)
        .prints("log.filter: ");
    assert!(
        !cli.path("x.db").exists(),
        "the check does not open the SQLite file"
    );
}

#[test]
fn missing_consumer_settings_are_named() {
    let cli = TestCli::new();
    let check = |text: &str| {
        cli.write("oncegate.toml", text);
        cli.run(&["config", "check"]).exits_with(0);
        cli.run(&["config", "check", "--consumer"])
    };
    let store = "[store]\nurl = \"redis://x\"\n";
    let gate = "[gate]\nid = \"header id\"\n";
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
            "choose with gate.broker",
        ),
        (
            format!("{store}{gate}broker = \"rabbitmq\"\n{kafka}{rabbitmq}"),
            "rabbitmq.url is missing",
        ),
    ] {
        check(&text).exits_with(2).prints(says);
    }
    check(&format!("{store}{gate}{kafka}group = \"g\"\n"))
        .exits_with(0)
        .prints("a consumer can be built from them");
}

#[test]
fn the_command_line_is_validated() {
    let cli = TestCli::new();
    cli.run(&["marker", "frobnicate"]).exits_with(2);
    cli.run(&["--help"])
        .exits_with(0)
        .prints("Exit codes")
        .prints("4  nothing was done");
}

/// The file name may come from the environment, which the user does not see.
#[test]
fn the_error_for_a_missing_file_names_the_option_and_the_variable() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    for output in [
        cli.run(&["--config", "op/sd.toml", "audit"]),
        cli.run_with(&["audit"], &[("ONCEGATE_CONFIG", "op/sd.toml")]),
    ] {
        output
            .exits_with(2)
            .prints("op/sd.toml: No such file or directory")
            .prints("--config or the variable ONCEGATE_CONFIG");
    }
}

/// Without a configuration no command reports success.
#[test]
fn an_empty_configuration_is_an_error() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    std::fs::remove_file(cli.path("oncegate.toml")).expect("the file exists");
    for command in [
        &["doctor"][..],
        &["config", "check"],
        &["config", "print"],
        &["explain", "x"],
        &["audit"],
    ] {
        let output = cli
            .run(command)
            .exits_with(2)
            .prints("nothing is configured: the current directory has no oncegate.toml")
            .prints("ONCEGATE_STORE_URL");
        assert_eq!(
            (output.out.as_str(), output.err.lines().count()),
            ("", 1),
            "{output:?}"
        );
    }
    for command in [
        &["marker", "list"][..],
        &["dead-letters", "list"],
        &["in-doubt", "list"],
    ] {
        let output = cli.run(command).exits_with(2);
        assert_eq!(
            (output.out.as_str(), output.err.lines().count()),
            ("", 1),
            "{output:?}"
        );
    }
    cli.run(&["doctor", "--list"]).exits_with(0);
    cli.write("oncegate.toml", "[gate]\nrate = 1\n");
    cli.run(&["doctor"])
        .exits_with(2)
        .prints("no server is configured: set store.url");
    // A partly configured broker is reported.
    cli.write(
        "oncegate.toml",
        "[kafka]\nbrokers = \"127.0.0.1:1\"\n[rabbitmq]\nurl = \"amqp://127.0.0.1:1\"\n",
    );
    let found = cli.run(&["doctor", "--json"]).exits_with(2).json();
    let missing: Vec<&str> = found["not_checked"]
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
fn unknown_filter_values_are_rejected_with_a_suggestion() {
    let cli = TestCli::new();
    cli.configure("[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\n");
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
        cli.run(command)
            .exits_with(5)
            .prints("possible values")
            .prints(near);
    }
    cli.run(&["dead-letters", "list", "--reason"]).exits_with(2);
    cli.run(&["in-doubt", "list", "--reason", "attempts-spent"])
        .exits_with(5)
        .prints("in-doubt-panicked");
    cli.run(&["dead-letters", "list", "--reason", "in-doubt-panicked"])
        .exits_with(5)
        .prints("attempts-spent");
    cli.configure("scope = \"ledger\"\n");
    cli.run(&["audit", "--who", "ann"]).exits_with(0);
    cli.run(&["marker", "complete", "a", "--yes", "--as", "ann"])
        .exits_with(0);
    cli.run(&["audit", "--who", "anm"])
        .exits_with(5)
        .prints("did you mean \"ann\"?");
    cli.run(&["audit", "--scope", "legder"])
        .exits_with(5)
        .prints("did you mean \"ledger\"?; known values: \"\", ledger");
    cli.run(&["audit", "--who", "ann", "--scope", "ledger"])
        .exits_with(0)
        .prints("1 shown");
}

#[test]
fn each_destination_accepts_and_lists_only_its_own_reasons() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    for (command, own, other) in [
        (
            ["dead-letters", "list"],
            "attempts-spent",
            "in-doubt-panicked",
        ),
        (
            ["dead-letters", "redrive"],
            "attempts-spent",
            "in-doubt-panicked",
        ),
        (
            ["dead-letters", "drop"],
            "attempts-spent",
            "in-doubt-panicked",
        ),
        (["in-doubt", "list"], "in-doubt-panicked", "attempts-spent"),
    ] {
        let help = cli.run(&[&command[..], &["--help"]].concat()).exits_with(0);
        for (reason, is_listed) in [
            (own, true),
            ("dead-lettered-by-broker", true),
            (other, false),
        ] {
            assert_eq!(help.out.contains(reason), is_listed, "{reason}: {help:?}");
        }
        let refused = cli
            .run(&[&command[..], &["--reason", other]].concat())
            .exits_with(5)
            .prints(own);
        assert!(
            !refused.err.contains("[\""),
            "a list for readers: {refused:?}"
        );
        // Valid, but no broker is configured.
        cli.run(&[&command[..], &["--reason", own]].concat())
            .exits_with(2)
            .prints("no broker");
    }
}

/// Output that cannot be written is not lost without an error, and no error panics.
#[test]
fn output_that_cannot_be_written_is_an_error() {
    let oncegate = env!("CARGO_BIN_EXE_oncegate");
    let run = |arguments: &str| {
        let command = format!("'{oncegate}' {arguments}");
        let output = std::process::Command::new("sh")
            .args(["-c", &command])
            .env("ONCEGATE_CONFIG", "/dev/null")
            .output();
        let output = output.expect("sh");
        (
            output.status.code(),
            String::from_utf8(output.stderr).expect("text"),
        )
    };
    let (code, error) = run("config keys > /dev/full");
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("cannot write to standard output"), "{error}");
    let (code, error) = run("config keys --json > /dev/full");
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("cannot write to standard output"), "{error}");
    // A reader that stops early, such as `head`.
    assert_eq!(run("config keys | true; exit 0").0, Some(0));
    // The exit code of the error, not that of a panic.
    assert_eq!(run("marker show 7 2> /dev/full").0, Some(2));
}

#[test]
fn a_load_that_is_too_large_is_not_estimated() {
    let cli = TestCli::new();
    let rate = u64::MAX.to_string();
    for arguments in [
        ["--rate", &rate, "--processes", "1"],
        ["--rate", &rate, "--primaries", "1000"],
        ["--rate", "1", "--processes", &rate],
    ] {
        cli.run(&[&["plan"], arguments.as_slice()].concat())
            .exits_with(2)
            .prints("too large to estimate");
    }
}
