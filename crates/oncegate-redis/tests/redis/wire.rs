//! The commands that the store sends.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};

use oncegate_core::marker::{Ask, Effect, Finding, Guarantee, Marker, Operation, Terms, Verdict};
use oncegate_testkit::servers::{RedisOptions, RedisServer};

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
    let ask = |request| operation("order-1", request, 5, 1, bare);
    let mut monitor = Monitor::of(server.port());

    assert_eq!(verdicts(&store, &[ask(Ask::Claim)]).await, [GRANTED]);
    assert_eq!(
        verdicts(&store, &[ask(Ask::Claim)]).await,
        [Verdict::Duplicate]
    );
    assert_eq!(
        monitor.commands(),
        [r#""SET" "processed:order-1" "1" "EX" "86400" "NX""#; 2]
    );

    assert_eq!(
        verdicts(&store, &[ask(Ask::Complete), ask(Ask::Renew)]).await,
        [DONE, Verdict::Applied]
    );
    assert_eq!(monitor.commands(), Vec::<String>::new());

    let failures = [
        Ask::Clear(Effect::Nothing),
        Ask::Clear(Effect::Unknown),
        Ask::Withdraw,
        Ask::Reject(Effect::Nothing),
        Ask::Doubt,
        Ask::Resolve(Finding::Happened),
        Ask::Forget {
            seen: Marker::Done(None),
        },
    ];
    for request in failures {
        assert_eq!(verdicts(&store, &[ask(request)]).await, [Verdict::Applied]);
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

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_one_command_and_many_completions_are_one() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let claims: Vec<Operation> = ["a", "b", "c"].map(|id| claim(id, 7)).into();
    verdicts(&store, &claims).await;
    // Loads the script.
    verdicts(&store, &[complete("a", 7, 1)]).await;
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
    assert_eq!(own.len(), 3, "{sent:?}");
    // Both claims were unchanged, so that no key is read a second time.
    assert_eq!(inside[0], r#""MGET" "processed:b" "processed:c""#);
    assert_eq!(
        inside[1..],
        ["b", "c"].map(|id| format!(r#""SET" "processed:{id}" "1" "PX" "600000""#))
    );
    assert!(
        own[0].starts_with("\"EVALSHA\"") && own[0].contains(r#""2" "processed:b" "processed:c""#),
        "{own:?}"
    );
    let record = format!("v1 p {:032x} 1 0 0 n 30000 600000 e -", 8);
    assert_eq!(
        own[1],
        format!(r#""SET" "processed:d" "{record}" "NX" "GET" "PX" "600000""#)
    );

    // A duplicate needs only that one command.
    assert_eq!(
        verdicts(&store, &[claim("b", 11)]).await,
        [Verdict::Duplicate]
    );
    assert_eq!(monitor.commands().len(), 1);
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

/// MONITOR also shows the commands of scripts; only a claim's own SET has NX.
fn is_inside_script(command: &str) -> bool {
    command.starts_with("\"GET\"")
        || command.starts_with("\"MGET\"")
        || (command.starts_with("\"SET\"") && !command.contains("\"NX\""))
}
