//! The commands that the store sends.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};

use oncegate_core::marker::{
    Effect, Finding, Guarantee, Marker, Operation, OperationKind, Terms, Verdict,
};
use oncegate_redis::{Durability, Redis};
use oncegate_testkit::servers::{ClusterServers, RedisOptions, RedisServer};

use crate::laws::groups_sent_to;
use crate::sentinel_and_cluster::until_answered;
use crate::support::{DONE, GRANTED, SECOND, at, claim, complete, operation, terms, verdicts};

/// The commands that a server receives, by `MONITOR`.
pub(crate) struct Monitor {
    stream: BufReader<TcpStream>,
    port: u16,
}

impl Monitor {
    pub(crate) fn of(port: u16) -> Self {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("a connection");
        stream
            .set_read_timeout(Some(20 * SECOND))
            .expect("a timeout");
        let mut monitor = Self {
            stream: BufReader::new(stream),
            port,
        };
        monitor
            .stream
            .get_mut()
            .write_all(b"MONITOR\r\n")
            .expect("sent");
        assert_eq!(monitor.line(), "+OK");
        monitor
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// The commands so far, without those of connecting and of the loss detector.
    fn commands(&mut self) -> Vec<String> {
        self.lines()
            .into_iter()
            .map(|(_, command)| command)
            .collect()
    }

    /// The same, each with the client that sent it.
    pub(crate) fn lines(&mut self) -> Vec<(String, String)> {
        let mut end = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("a connection");
        end.write_all(b"ECHO end-of-monitor\r\n").expect("sent");
        let mut commands = Vec::new();
        loop {
            let line = self.line();
            // `+<time> [<database> <client>] "SET" "key" …`
            let (client, command) = line.split_once("] ").unwrap_or_default();
            if command.contains("end-of-monitor") {
                return commands;
            }
            let is_check = command.contains("!canary") || command.starts_with("\"INFO\"");
            if !is_check && !command.starts_with("\"HELLO\"") && !command.starts_with("\"CLIENT\"")
            {
                commands.push((
                    client.rsplit(' ').next().unwrap_or_default().to_owned(),
                    command.to_owned(),
                ));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bare_sends_set_nx_and_del() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let bare = Terms {
        window: 86_400 * SECOND,
        ..terms(Guarantee::Bare)
    };
    let on_order = |request| operation("order-1", request, 5, 1, bare);
    let mut monitor = Monitor::of(server.port());

    assert_eq!(
        verdicts(&store, &[on_order(OperationKind::Claim)]).await,
        [GRANTED]
    );
    assert_eq!(
        verdicts(&store, &[on_order(OperationKind::Claim)]).await,
        [Verdict::Duplicate]
    );
    assert_eq!(
        monitor.commands(),
        [r#""SET" "processed:order-1" "1" "EX" "86400" "NX""#; 2]
    );

    assert_eq!(
        verdicts(
            &store,
            &[
                on_order(OperationKind::Complete),
                on_order(OperationKind::Renew)
            ]
        )
        .await,
        [DONE, Verdict::Applied]
    );
    assert_eq!(monitor.commands(), Vec::<String>::new());

    let failures = [
        OperationKind::Clear(Effect::Nothing),
        OperationKind::Clear(Effect::Unknown),
        OperationKind::Withdraw,
        OperationKind::Reject(Effect::Nothing),
        OperationKind::Doubt,
        OperationKind::Resolve(Finding::Happened),
        OperationKind::Forget {
            seen: Marker::Done(None),
        },
    ];
    for request in failures {
        assert_eq!(
            verdicts(&store, &[on_order(request)]).await,
            [Verdict::Applied]
        );
        assert_eq!(
            monitor.commands(),
            [r#""DEL" "processed:order-1""#],
            "{request:?}"
        );
    }
    assert_eq!(
        server.command("DBSIZE").expect("a reply"),
        ":0",
        "no canary either"
    );
}

/// How a server is asked to complete or clear an unchanged claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Script,
    SetIfEq,
    DelIfEq,
    DelEx,
}

/// What each server has, from its newest release to its oldest: completions, then clearings.
const BY_VERSION: [(&str, (u32, u32), Sent, Sent); 5] = [
    ("valkey", (9, 0), Sent::SetIfEq, Sent::DelIfEq),
    ("valkey", (8, 1), Sent::SetIfEq, Sent::Script),
    ("valkey", (7, 2), Sent::Script, Sent::Script),
    ("redis", (8, 4), Sent::SetIfEq, Sent::DelEx),
    ("redis", (7, 0), Sent::Script, Sent::Script),
];

/// How completions and clearings are sent to this server.
fn expected(server: &RedisServer) -> (Sent, Sent) {
    let (name, version) = release(server);
    BY_VERSION
        .into_iter()
        .find(|(of, since, ..)| *of == name && version >= *since)
        .map(|(.., completion, clearing)| (completion, clearing))
        .expect("a supported version")
}

/// Whether the server has `MSETEX`.
pub(crate) fn has_msetex(server: &RedisServer) -> bool {
    match release(server) {
        ("valkey", version) => version >= (9, 1),
        (_, version) => version >= (8, 4),
    }
}

/// The name and version of the server.
fn release(server: &RedisServer) -> (&'static str, (u32, u32)) {
    let info = server.reply("INFO server").expect("a reply");
    let field = |name: &str| {
        info.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    };
    let (name, version) = match field("valkey_version") {
        Some(version) => ("valkey", version),
        None => ("redis", field("redis_version").expect("a version")),
    };
    let mut numbers = version
        .split('.')
        .map(|number| number.parse().expect("a number"));
    let version = (numbers.next().expect("two"), numbers.next().expect("two"));
    (name, version)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_two_commands_where_the_server_compares_values() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let claims: Vec<Operation> = ["a", "b", "c"].map(|id| claim(id, 7)).into();
    verdicts(&store, &claims).await;
    // Loads the script, and finds out what the server has.
    verdicts(&store, &[complete("lost", 7, 1)]).await;
    verdicts(&store, &[complete("a", 7, 1)]).await;
    let ((completion, _), can_group) = (expected(&server), has_msetex(&server));
    let mut monitor = Monitor::of(server.port());

    let batch = [
        claim("d", 8),
        complete("b", 7, 1),
        claim("e", 9),
        complete("c", 7, 1),
    ];
    assert_eq!(
        verdicts(&store, &batch).await,
        [GRANTED, DONE, GRANTED, DONE]
    );
    let sent: Vec<String> = monitor
        .commands()
        .into_iter()
        .filter(|command| !command.is_empty())
        .collect();
    let (inside, own): (Vec<&str>, Vec<&str>) = sent
        .iter()
        .map(String::as_str)
        .partition(|command| is_inside_script(command));
    let record = |token: u128| format!("v1 p {token:032x} 1 0 0 n 30000 600000 e -");
    let granted = if can_group {
        let [d, e] = [8, 9].map(record);
        vec![format!(
            r#""MSETEX" "2" "processed:d" "{d}" "processed:e" "{e}" "NX" "PX" "600000""#
        )]
    } else {
        let single = |(id, token)| {
            let record = record(token);
            format!(r#""SET" "processed:{id}" "{record}" "NX" "GET" "PX" "600000""#)
        };
        [("d", 8), ("e", 9)].map(single).to_vec()
    };
    match completion {
        Sent::SetIfEq => {
            let done = |id: &str| {
                format!(
                    r#""SET" "processed:{id}" "1" "IFEQ" "{}" "PX" "600000""#,
                    record(7)
                )
            };
            assert_eq!(inside, Vec::<&str>::new());
            assert_eq!(own[..2], [done("b"), done("c")]);
            assert_eq!(own[2..], granted);
        }
        _ => {
            assert_eq!(own.len(), 3, "{sent:?}");
            // Both claims were unchanged, so that no key is read a second time.
            assert_eq!(inside[0], r#""MGET" "processed:b" "processed:c""#);
            assert_eq!(
                inside[1..],
                ["b", "c"].map(|id| format!(r#""SET" "processed:{id}" "1" "PX" "600000""#))
            );
            assert!(
                own[0].starts_with("\"EVALSHA\"")
                    && own[0].contains(r#""2" "processed:b" "processed:c""#),
                "{own:?}"
            );
            assert_eq!(own[1..], granted);
        }
    }

    // A duplicate needs only that one command.
    assert_eq!(
        verdicts(&store, &[claim("b", 11)]).await,
        [Verdict::Duplicate]
    );
    let commands = monitor.commands();
    assert_eq!(commands.len(), 1, "{commands:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_attempt_without_effect_is_cleared_by_one_command_where_the_server_compares_values()
{
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let on = |id, kind, attempt| operation(id, kind, 7, attempt, terms(Guarantee::EffectivelyOnce));
    let clear = |id, attempt| on(id, OperationKind::Clear(Effect::Nothing), attempt);
    let reject = |id, attempt| on(id, OperationKind::Reject(Effect::Nothing), attempt);
    // Loads the script, and finds out what the server has: at most one command of each kind fails.
    verdicts(&store, &[complete("lost", 7, 1)]).await;
    for id in ["w", "x", "y"] {
        assert_eq!(
            verdicts(&store, &[claim(id, 7), clear(id, 1)]).await,
            [GRANTED, Verdict::Applied]
        );
    }
    let claims: Vec<Operation> = ["a", "b", "c"].map(|id| claim(id, 7)).into();
    verdicts(&store, &claims).await;
    let mut monitor = Monitor::of(server.port());
    let answers = verdicts(&store, &[clear("a", 1), reject("b", 1), clear("c", 2)]).await;
    assert_eq!(
        answers,
        [Verdict::Applied, Verdict::Applied, Verdict::Lost],
        "the attempt of c is the first"
    );
    let record = format!("v1 p {:032x} 1 0 0 n 30000 600000 e -", 7);
    let sent: Vec<String> = monitor
        .commands()
        .into_iter()
        .filter(|command| !is_inside_script(command) && !command.starts_with("\"DEL\""))
        .collect();
    let deleted = |before: &str, after: &str| {
        ["a", "b"].map(|id| format!(r#""{before}" "processed:{id}" {after}"{record}""#))
    };
    let (mut single, calls): (Vec<String>, Vec<String>) = sent
        .into_iter()
        .partition(|command| !command.starts_with("\"EVALSHA\""));
    single.sort();
    let (expected_single, expected_calls) = match expected(&server).1 {
        Sent::DelIfEq => (deleted("DELIFEQ", "").to_vec(), 1),
        Sent::DelEx => (deleted("DELEX", "\"IFEQ\" ").to_vec(), 1),
        _ => (Vec::new(), 2),
    };
    assert_eq!((single, calls.len()), (expected_single, expected_calls));
}

/// Also a server that does not have the command logs one error per connection, not one per message.
#[tokio::test(flavor = "multi_thread")]
async fn one_completion_finds_out_whether_the_server_compares_values() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let ids = ["a", "b", "c", "d"];
    verdicts(&store, &ids.map(|id| claim(id, 7))).await;
    let mut monitor = Monitor::of(server.port());
    assert_eq!(
        verdicts(&store, &ids.map(|id| complete(id, 7, 1))).await,
        [DONE; 4]
    );
    let sent = monitor.commands();
    let conditional = sent.iter().filter(|it| it.contains("\"IFEQ\"")).count();
    assert_eq!(conditional, 1, "{sent:?}");
}

/// Each server of a Cluster is asked anew after a failover.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_gets_commands_instead_of_scripts_also_after_a_failover() {
    const COUNT: usize = 60;
    let mut cluster = ClusterServers::start().expect("a Cluster");
    let store = Redis::cluster(cluster.urls()).timeout(5 * SECOND);
    let how = expected(&cluster.nodes()[0]);
    let clear = |id: &str| {
        let kind = OperationKind::Clear(Effect::Nothing);
        operation(id, kind, 7, 1, terms(Guarantee::EffectivelyOnce))
    };
    for round in ["before", "after"] {
        let ids = |purpose: &str| -> Vec<String> {
            let numbers = 0..COUNT;
            numbers
                .map(|it| format!("{round}-{purpose}-{it}"))
                .collect()
        };
        // The first commands on a connection find out what its server has.
        for id in ids("first") {
            assert_eq!(until_answered(&store, claim(&id, 7)).await, GRANTED);
            until_answered(&store, complete(&id, 7, 1)).await;
        }
        for id in ids("second") {
            assert_eq!(until_answered(&store, claim(&id, 7)).await, GRANTED);
            until_answered(&store, clear(&id)).await;
        }
        let primaries = cluster.primaries();
        assert_eq!(primaries.len(), 3);
        let ports = primaries.iter().map(|it| cluster.nodes()[*it].port());
        let mut monitors: Vec<Monitor> = ports.map(Monitor::of).collect();
        let (completed, cleared) = (ids("completed"), ids("cleared"));
        let all = completed.iter().chain(&cleared);
        let claims: Vec<Operation> = all.map(|id| claim(id, 7)).collect();
        assert_eq!(verdicts(&store, &claims).await, vec![GRANTED; 2 * COUNT]);
        let completions: Vec<Operation> = completed.iter().map(|id| complete(id, 7, 1)).collect();
        assert_eq!(verdicts(&store, &completions).await, vec![DONE; COUNT]);
        let clears: Vec<Operation> = cleared.iter().map(|id| clear(id)).collect();
        let answers = verdicts(&store, &clears).await;
        assert_eq!(answers, vec![Verdict::Applied; COUNT]);

        let sent: Vec<String> = monitors.iter_mut().flat_map(Monitor::commands).collect();
        assert!(!sent.iter().any(|command| command.contains("MSETEX")));
        let number = |what: &str| {
            let matching = sent.iter().filter(|command| command.contains(what));
            matching.count()
        };
        let scripts = [how.0, how.1].map(|it| if it == Sent::Script { COUNT } else { 0 });
        assert_eq!(number("\"EVALSHA\""), scripts[0] + scripts[1], "{round}");
        assert_eq!(number("\"1\" \"IFEQ\""), COUNT - scripts[0], "{round}");
        let deleted = number("\"DELIFEQ\"") + number("\"DELEX\"");
        assert_eq!(deleted, COUNT - scripts[1], "{round}");
        if round == "before" {
            drop(monitors);
            cluster.node_mut(primaries[0]).kill();
        }
    }
}

/// A user without a right to the newer commands is served by the script, from the first command of
/// each connection on.
#[tokio::test(flavor = "multi_thread")]
async fn the_script_replaces_commands_that_are_not_permitted() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    server
        .command("ACL SETUSER some on nopass ~processed:* -@all +set +get +mget +del +pttl +pexpire +eval +evalsha +info +hello")
        .expect("a reply");
    for round in 0..3 {
        let store = at(&format!("redis://some:x@127.0.0.1:{}", server.port()));
        let ids = [format!("a{round}"), format!("b{round}")];
        let answers = verdicts(
            &store,
            &[
                claim(&ids[0], 7),
                claim(&ids[1], 7),
                complete(&ids[0], 7, 1),
                operation(
                    &ids[1],
                    OperationKind::Clear(Effect::Nothing),
                    7,
                    1,
                    terms(Guarantee::EffectivelyOnce),
                ),
            ],
        )
        .await;
        assert_eq!(answers, [GRANTED, GRANTED, DONE, Verdict::Applied]);
    }
}

/// The number of claims in the batches of the next tests.
const BATCH: usize = 50;

fn claims(purpose: &str) -> Vec<Operation> {
    let ids = (0..BATCH).map(|it| claim(&format!("{purpose}-{it}"), 7));
    ids.collect()
}

/// If one id of a group has a marker, each is claimed singly; after many, so are the next batches.
#[tokio::test(flavor = "multi_thread")]
async fn new_ids_are_claimed_by_one_command_where_the_server_has_it() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let all_granted = vec![GRANTED; BATCH];
    verdicts(&store, &claims("finds out what the server has")).await;
    let ids = (0..BATCH).map(|it| format!("done-{it}"));
    let (done, duplicates): (Vec<Operation>, Vec<Operation>) =
        ids.map(|id| (complete(&id, 7, 1), claim(&id, 8))).unzip();
    verdicts(&store, &done).await;
    let can_group = has_msetex(&server);
    let mut monitor = Monitor::of(server.port());
    let mut is_sent_by = |groups: usize, singles: usize| {
        let expected = if can_group {
            (groups, singles)
        } else {
            (0, BATCH)
        };
        let sent = monitor.commands();
        let number = |name: &str| sent.iter().filter(|it| it.starts_with(name)).count();
        let counted = (number("\"MSETEX\""), number("\"SET\""));
        assert_eq!(counted, expected, "{sent:?}");
        assert_eq!(counted.0 + counted.1, sent.len(), "{sent:?}");
    };
    assert_eq!(verdicts(&store, &claims("new")).await, all_granted);
    is_sent_by(1, 0);

    let mut one_duplicate = claims("more");
    one_duplicate[20] = claim("done-20", 8);
    let mut answers = verdicts(&store, &one_duplicate).await;
    assert_eq!(answers.remove(20), Verdict::Duplicate);
    assert_eq!(answers, all_granted[1..]);
    is_sent_by(1, BATCH);
    assert_eq!(verdicts(&store, &claims("next")).await, all_granted);
    is_sent_by(1, 0);

    let all_duplicates = vec![Verdict::Duplicate; BATCH];
    assert_eq!(verdicts(&store, &duplicates).await, all_duplicates);
    is_sent_by(1, BATCH);
    assert_eq!(verdicts(&store, &duplicates).await, all_duplicates);
    is_sent_by(0, BATCH);
    assert_eq!(verdicts(&store, &claims("last")).await, all_granted);
    is_sent_by(0, BATCH);
}

/// A replica of an older release skips an `MSETEX`, and confirms it.
#[tokio::test(flavor = "multi_thread")]
async fn claims_of_at_most_once_or_with_replicas_are_single() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let strict = |batch: &str| -> Vec<Operation> {
        let strict = |claim| Operation {
            terms: terms(Guarantee::AtMostOnce),
            ..claim
        };
        claims(batch).into_iter().map(strict).collect()
    };
    let store = at(&server.url());
    for batch in ["first", "second"] {
        let granted = verdicts(&store, &strict(batch)).await;
        assert_eq!(granted, vec![GRANTED; BATCH]);
    }
    let replicas = Durability::Replicas {
        count: 1,
        timeout: SECOND / 100,
    };
    let store = at(&server.url()).durability(replicas);
    let _ = oncegate_core::Store::apply(&store, &claims("third")).await; // no replica confirms it
    assert_eq!(groups_sent_to(&server), 0);
}

/// `MSETEX` sets the last of several values for one key, and would grant all of its claims.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_claims_of_one_id_in_a_batch_of_new_ids_the_first_is_granted() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    verdicts(&store, &claims("finds out what the server has")).await;
    let mut batch = claims("new");
    batch[20] = claim("new-10", 8);
    let mut answers = verdicts(&store, &batch).await;
    let second = answers.remove(20);
    assert!(matches!(second, Verdict::Busy { .. }), "{second:?}");
    assert_eq!(answers, vec![GRANTED; BATCH - 1]);
    assert_eq!(verdicts(&store, &[complete("new-10", 7, 1)]).await, [DONE]);
}

/// A server that does not have the command logs one error per connection.
#[tokio::test(flavor = "multi_thread")]
async fn one_group_of_claims_finds_out_whether_the_server_has_the_command() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let errors = || -> u32 {
        let stats = server.reply("INFO errorstats").expect("a reply");
        let mut counts = stats
            .lines()
            .filter_map(|line| line.strip_prefix("errorstat_ERR:count="));
        counts
            .next()
            .map_or(0, |it| it.trim().parse().expect("a number"))
    };
    for connection in ["first", "second"] {
        until_answered(&store, claim(connection, 7)).await;
        let before = errors();
        let [a, b, c] = ["a", "b", "c"].map(|it| claims(&format!("{connection}-{it}")));
        for ids in [[a, b].concat(), c] {
            assert_eq!(verdicts(&store, &ids).await, vec![GRANTED; ids.len()]);
        }
        assert_eq!(errors() - before, u32::from(!has_msetex(&server)));
        server
            .command("CLIENT KILL TYPE normal SKIPME yes")
            .expect("a reply");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_one_id_share_a_script_call() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    verdicts(&store, &[complete("loads the script", 1, 1)]).await;
    let mut monitor = Monitor::of(server.port());
    let copies: Vec<Operation> = (0..50).map(|token| claim("k", token)).collect();
    let answers = verdicts(&store, &copies).await;
    assert_eq!(answers[0], GRANTED);
    assert!(
        answers[1..]
            .iter()
            .all(|verdict| matches!(verdict, Verdict::Busy { .. })),
        "{answers:?}"
    );
    let calls = monitor
        .commands()
        .iter()
        .filter(|command| command.starts_with("\"EVALSHA\""))
        .count();
    assert_eq!(calls, 1, "one script call for all that were contended");
}

/// MONITOR also shows the commands of scripts; their SET has neither NX nor IFEQ.
fn is_inside_script(command: &str) -> bool {
    command.starts_with("\"GET\"")
        || command.starts_with("\"MGET\"")
        || (command.starts_with("\"SET\"")
            && !command.contains("\"NX\"")
            && !command.contains("\"IFEQ\""))
}
