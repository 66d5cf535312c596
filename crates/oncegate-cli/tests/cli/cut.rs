//! The program, killed or told to stop in the midst of an act: no message is lost, and none is
//! charged twice.

use std::process::{Command, Stdio};
use std::sync::Arc;

use oncegate_testkit::proxy::{Fate, Proxy, holds};

use crate::desk::Desk;
use crate::letters::{ids, on_both_brokers};
use crate::redrive::write_marker;
use crate::world::{Broker, Provider, World};

on_both_brokers!(
    a_redrive_is_killed_at_each_step,
    a_redrive_that_is_told_to_stop_ends_after_the_letter_at_hand,
    a_resolve_is_killed_before_it_is_written_down,
    a_letter_that_was_sent_and_not_taken_out,
);

/// A world whose Redis is behind a proxy.
async fn world(broker: Broker) -> (Arc<World>, Proxy) {
    let url = oncegate_testkit::redis_url().expect("ONCEGATE_REDIS is set");
    let port = url
        .rsplit(':')
        .next()
        .and_then(|port| port.trim_end_matches('/').parse().ok())
        .expect("a port");
    let proxy = Proxy::to(port).expect("a port is free");
    let desk = Desk::at(&format!("redis://127.0.0.1:{}", proxy.port()));
    (Arc::new(World::at(desk, broker).await), proxy)
}

/// Whether a request is the one that is meant.
type Meant = fn(&[u8]) -> bool;

/// Kills the program (SIGKILL) when it asks Redis for what is meant, which never arrives there.
async fn killed_at(world: &World, proxy: &Proxy, meant: Meant, arguments: &[&str]) {
    let (met, mut meets) = tokio::sync::mpsc::unbounded_channel();
    proxy.judge(move |request| {
        if !meant(request) {
            return Fate::Pass;
        }
        let _ = met.send(());
        // Longer than the program lives, and than the test does.
        Fate::Delay(std::time::Duration::from_secs(3_600))
    });
    let mut program = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .current_dir(world.desk.path(""))
        .args(arguments)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program was built");
    tokio::time::timeout(crate::world::PATIENCE, meets.recv())
        .await
        .expect("it comes to that")
        .expect("the proxy runs");
    program.kill().expect("it runs still");
    program.wait().expect("it ended");
    proxy.pass();
}

fn begins(request: &[u8]) -> bool {
    holds(request, r#""stage":"begun""#)
}

fn frees(request: &[u8]) -> bool {
    holds(request, "EVAL")
}

fn says_that_it_sent(request: &[u8]) -> bool {
    holds(request, r#""stage":"done""#) && holds(request, "sent to ")
}

async fn a_redrive_that_is_told_to_stop_ends_after_the_letter_at_hand(broker: Broker) {
    let (world, proxy) = world(broker).await;
    world
        .publish(&[("a", "declined"), ("b", "declined"), ("c", "declined")])
        .await;
    world.consume(Provider::Judges, 0, 3, 0).await;
    let (met, mut meets) = tokio::sync::mpsc::unbounded_channel();
    proxy.judge(move |request| {
        if !says_that_it_sent(request) || met.send(()).is_err() {
            return Fate::Pass;
        }
        // The signal comes while the letter is between its copy and its end.
        Fate::Delay(std::time::Duration::from_secs(2))
    });
    let program = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .current_dir(world.desk.path(""))
        .args(["dead-letters", "redrive", "--all", "--rate", "50", "--yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program was built");
    tokio::time::timeout(crate::world::PATIENCE, meets.recv())
        .await
        .expect("it comes to that")
        .expect("the proxy runs");
    drop(meets);
    let told = Command::new("kill")
        .args(["-TERM", &program.id().to_string()])
        .status()
        .expect("there is a kill");
    assert!(told.success());
    let ended = tokio::task::spawn_blocking(|| program.wait_with_output().expect("it ended"))
        .await
        .expect("no panic");
    let (out, err) = (
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr),
    );
    assert_eq!(ended.status.code(), Some(1), "{out}{err}");
    assert!(
        out.contains("1 redriven, 0 left where they are") && err.contains("stopped by a signal"),
        "{out}{err}"
    );
    proxy.pass();
    // The letter at hand is gone from the queue, or marked as done where nothing can be taken out;
    // nothing is half done.
    assert_eq!(
        world.json(&["dead-letters", "list"]).await["letters"]
            .as_array()
            .map(Vec::len),
        Some(2)
    );
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(0)
        .says("2 redriven");
    world
        .consume(
            Provider::Works,
            3,
            if broker == Broker::Kafka { 3 } else { 0 },
            0,
        )
        .await;
    world.end().await;
}

async fn a_redrive_is_killed_at_each_step(broker: Broker) {
    let (world, proxy) = world(broker).await;
    world
        .publish(&[("a", "declined"), ("b", "declined"), ("c", "declined")])
        .await;
    world.consume(Provider::Judges, 0, 3, 0).await;
    let steps: [(&str, Meant, &str); 3] = [
        ("a", begins, "waiting"),
        ("b", frees, "begun"),
        ("c", says_that_it_sent, "begun"),
    ];
    for (id, step, state) in steps {
        killed_at(
            &world,
            &proxy,
            step,
            &["dead-letters", "redrive", "--id", id, "--yes"],
        )
        .await;
        world.until_there_are(3, ".dead-letters").await;
        let letters = world.json(&["dead-letters", "list", "--id", id]).await;
        assert_eq!(letters["letters"][0]["state"], state, "{id}: {letters}");
    }
    // Of what nobody knows whether it was sent, nothing is sent again without a word once its
    // marker is gone; where the marker says that nothing happened, it is.
    write_marker(&world.desk, "c", None).await;
    let said = world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1);
    said.says("may have sent it, and was cut off")
        .says("2 redriven, 1 left");
    let left = if broker == Broker::Kafka { 3 } else { 1 };
    world.consume(Provider::Works, 3, left, 0).await;
    let mut charged = world.charged();
    charged.sort();
    assert_eq!(charged, ["a", "b", "c"]);
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1)
        .says("was handled meanwhile");
    // The record of it goes, as it does with the window.
    write_marker(&world.desk, "c", None).await;
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1)
        .says("--accept-unfinished");
    // On Kafka the topic keeps what was published, three and three copies; on RabbitMQ nothing is
    // left.
    world
        .until_there_are(if broker == Broker::Kafka { 6 } else { 0 }, "")
        .await;
    assert_eq!(ids(&world.json(&["dead-letters", "list"]).await), ["c"]);
    world
        .run(&["dead-letters", "drop", "--id", "c", "--yes"])
        .await
        .ended(0);
    assert_eq!(ids(&world.json(&["dead-letters", "list"]).await), [""; 0]);
    world.end().await;
}

async fn a_resolve_is_killed_before_it_is_written_down(broker: Broker) {
    let (world, proxy) = world(broker).await;
    world.publish(&[("a", "silent")]).await;
    world.consume(Provider::Judges, 0, 0, 1).await;
    let resolve = ["in-doubt", "resolve", "a", "--did-not-happen", "--yes"];
    killed_at(&world, &proxy, says_that_it_sent, &resolve).await;
    world.until_there_are(1, ".in-doubt").await;
    assert_eq!(
        world.json(&["in-doubt", "list"]).await["letters"][0]["state"],
        "begun"
    );
    // Nothing of it counts as long as the marker says so: a second copy is a duplicate to the gate.
    world.run(&resolve).await.ended(0).says("1 resolved");
    world
        .consume(
            Provider::Works,
            1,
            0,
            if broker == Broker::Kafka { 1 } else { 0 },
        )
        .await;
    assert_eq!(world.charged(), ["a"]);
    world.end().await;
}

/// The answer to the last line of the audit is lost: on RabbitMQ the letter stays, though the audit
/// says that it was sent.
async fn a_letter_that_was_sent_and_not_taken_out(broker: Broker) {
    let (world, proxy) = world(broker).await;
    world.publish(&[("a", "declined")]).await;
    world.consume(Provider::Judges, 0, 1, 0).await;
    proxy.judge(|request| {
        if says_that_it_sent(request) {
            Fate::LoseReply
        } else {
            Fate::Pass
        }
    });
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(3)
        .says("the audit could not be told so");
    proxy.pass();
    world.until_there_are(1, ".dead-letters").await;
    assert_eq!(world.json(&["audit"]).await[0]["stage"], "done");
    let waits = ids(&world.json(&["dead-letters", "list"]).await);
    let again = world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await;
    match broker {
        Broker::Kafka => {
            assert_eq!(waits, [""; 0], "the audit alone says what became of it");
            again.ended(0).says("0 redriven, 0 left");
        }
        Broker::RabbitMq => {
            // Its marker says that the first copy was not claimed: a second one is a duplicate to
            // the gate.
            assert_eq!(waits, ["a"]);
            again.ended(0).says("1 redriven, 0 left");
        }
    }
    world.until_there_are(2, "").await;
    world
        .consume(
            Provider::Works,
            1,
            if broker == Broker::Kafka { 1 } else { 0 },
            0,
        )
        .await;
    assert_eq!(world.charged(), ["a"]);
    world.end().await;
}
