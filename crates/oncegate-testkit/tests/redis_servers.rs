//! Redis with TLS, Sentinels, slow loading and Cluster, and the proxy.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use oncegate_testkit::proxy::{Proxy, RequestFault, contains};
use oncegate_testkit::servers::{
    ClusterServers, RedisOptions, RedisPersistence, RedisServer, SentinelServers, ServerSet,
};

#[test]
fn tls_is_trusted_by_its_authority_alone() {
    let server = RedisServer::start(RedisOptions::new().tls().password("secret")).unwrap();
    let port = server.url().rsplit_once(':').unwrap().1.to_owned();
    let authority = server.certificate_authority();
    let ping = |authority: &str| {
        let set = ServerSet::current().unwrap();
        let mut command = Command::new(set.redis_cli());
        command.args([
            "-p",
            &port,
            "-h",
            "localhost",
            "--tls",
            "--cacert",
            authority,
            "-a",
            "secret",
            "PING",
        ]);
        let run = set.command(&command).output();
        String::from_utf8(run.unwrap().stdout).unwrap()
    };
    assert_eq!(ping(authority.to_str().unwrap()).trim(), "PONG");
    let stranger = RedisServer::start(RedisOptions::new().tls()).unwrap();
    assert_ne!(
        ping(stranger.certificate_authority().to_str().unwrap()).trim(),
        "PONG"
    );
}

#[test]
fn sentinels_name_a_new_primary_and_a_cut_link_is_cut() {
    let mut servers = SentinelServers::start().unwrap();
    let old = servers.primary();
    servers.redis()[old].command("SET before 1").unwrap();
    assert_eq!(servers.redis()[old].command("WAIT 2 5000").unwrap(), ":2");
    servers.cut_replication().unwrap();
    servers.redis()[old].command("SET after 1").unwrap();
    assert_eq!(servers.redis()[old].command("WAIT 1 300").unwrap(), ":0");
    servers.redis_mut(old).kill();
    let new = servers.wait_for_failover(old).unwrap();
    assert_eq!(servers.redis()[new].command("EXISTS before").unwrap(), ":1");
    assert_eq!(servers.redis()[new].command("EXISTS after").unwrap(), ":0");
    servers.restore().unwrap();
    assert_eq!(servers.primary(), new);
    assert_eq!(servers.redis()[old].command("EXISTS after").unwrap(), ":0");
    assert!(
        servers.redis()[old]
            .reply("INFO replication")
            .unwrap()
            .contains("role:slave")
    );
}

#[test]
fn a_server_that_loads_slowly_says_so_until_it_has_loaded() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EverySecond)).unwrap();
    server
        .command("EVAL \"for i=1,100000 do redis.call('SET','k'..i,'v') end\" 0")
        .unwrap();
    server.kill();
    let port = server.port();
    let asking = std::thread::spawn(move || {
        // Until it has loaded; connections may be refused at first.
        let answer = || {
            Some(
                Client::of_one_that_may_not_listen(port)?
                    .ask("GET k1")
                    .unwrap_or_default(),
            )
        };
        std::iter::repeat_with(answer)
            .flatten()
            .take_while(|said| said != "$1")
            .any(|said| said.starts_with("-LOADING"))
    });
    // Loading all keys with the delay would take 40 s.
    let began = Instant::now();
    server.start_again_loading(Duration::from_secs(1)).unwrap();
    assert!(asking.join().unwrap(), "no LOADING reply was received");
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(server.command("EXISTS k100000").unwrap(), ":1");
    // The delay applies only to this start.
    assert!(
        server
            .reply("CONFIG GET key-load-delay")
            .unwrap()
            .contains("\r\n0\r\n")
    );
}

#[test]
fn a_cluster_is_whole() {
    let cluster = ClusterServers::start().unwrap();
    assert_eq!(cluster.primaries().len(), 3);
    // The slot of `foo` is 12182.
    let serving = cluster.primary_of_slot(12182);
    assert_eq!(
        cluster.nodes()[serving].command("SET foo 1").unwrap(),
        "+OK"
    );
    let other = cluster
        .primaries()
        .into_iter()
        .find(|which| *which != serving)
        .unwrap();
    assert!(
        cluster.nodes()[other]
            .command("GET foo")
            .unwrap()
            .starts_with("-MOVED 12182")
    );
}

/// A client that sends one command and reads one line.
struct Client(BufReader<TcpStream>);

impl Client {
    fn of(port: u16) -> Self {
        Self::of_one_that_may_not_listen(port).unwrap()
    }

    fn of_one_that_may_not_listen(port: u16) -> Option<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        Some(Self(BufReader::new(stream)))
    }

    fn ask(&mut self, command: &str) -> std::io::Result<String> {
        write!(self.0.get_mut(), "{command}\r\n")?;
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }
}

#[test]
fn the_proxy_loses_a_reply_after_the_command_was_carried_out() {
    let server = RedisServer::start(RedisOptions::new()).unwrap();
    let proxy = Proxy::to(server.port()).unwrap();
    proxy.inject_faults(|request| {
        if contains(request, "INCR") {
            RequestFault::LoseReply
        } else {
            RequestFault::Pass
        }
    });
    let mut client = Client::of(proxy.port());
    assert_eq!(client.ask("PING").unwrap(), "+PONG");
    assert!(
        matches!(client.ask("INCR counted").as_deref(), Ok("") | Err(_)),
        "the reply arrived"
    );
    assert_eq!(
        Client::of(proxy.port()).ask("EXISTS counted").unwrap(),
        ":1"
    );
    assert_eq!(proxy.lost_replies(), 1);
    proxy.pass();
    assert_eq!(Client::of(proxy.port()).ask("INCR counted").unwrap(), ":2");
}

#[test]
fn the_proxy_resets_delays_and_falls_silent() {
    let server = RedisServer::start(RedisOptions::new()).unwrap();
    let proxy = Proxy::to(server.port()).unwrap();
    let mut client = Client::of(proxy.port());
    proxy.inject_faults(|_| RequestFault::Delay(Duration::from_millis(100)));
    let asked = Instant::now();
    assert_eq!(client.ask("PING").unwrap(), "+PONG");
    assert!(asked.elapsed() >= Duration::from_millis(100));

    proxy.inject_faults(|_| RequestFault::Reset);
    assert!(matches!(
        client.ask("INCR never").as_deref(),
        Ok("") | Err(_)
    ));
    proxy.pass();
    let mut client = Client::of(proxy.port());
    assert_eq!(client.ask("EXISTS never").unwrap(), ":0");

    proxy.black_hole();
    client
        .0
        .get_ref()
        .set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    assert!(client.ask("INCR late").is_err(), "a black hole answered");
    assert_eq!(Client::of(server.port()).ask("EXISTS late").unwrap(), ":0");
    proxy.pass();
    client
        .0
        .get_ref()
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    assert_eq!(
        client.ask("PING").unwrap(),
        ":1",
        "what was held back arrives, and its reply first"
    );

    proxy.reset();
    assert!(matches!(client.ask("PING").as_deref(), Ok("") | Err(_)));
    let before_drop = proxy.port();
    drop(proxy);
    assert_eq!(Client::try_of(before_drop), None);
}

impl Client {
    /// `None` when nobody serves there any more.
    fn try_of(port: u16) -> Option<String> {
        let mut client = Self(BufReader::new(
            TcpStream::connect(("127.0.0.1", port)).ok()?,
        ));
        client.ask("PING").ok().filter(|said| !said.is_empty())
    }
}
