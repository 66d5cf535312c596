//! RabbitMQ: are the queues there, and do they keep what they hold?

use lapin::Connection;
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};

use super::{Findings, Level};
use crate::config::Config;
use crate::failure::Failure;
use crate::letters::{Shelf, rabbitmq};

pub(super) async fn look(config: &Config, findings: &mut Findings) -> Result<(), Failure> {
    let shown = config
        .text("rabbitmq.url")
        .map(crate::show_config::without_password)
        .unwrap_or_default();
    let at = format!("RabbitMQ at {shown}");
    let connection = match rabbitmq::connect(config).await {
        Ok(connection) => connection,
        Err(failure) => {
            let said = failure.to_string();
            if said.contains("ACCESS_REFUSED") || said.contains("access-refused") {
                let remedy = "put the right user and password into rabbitmq.url; `guest` may only connect from the broker's own host";
                findings.error("rabbitmq-refuses-the-login", at, said, remedy);
            } else if said.contains("NOT_ALLOWED") || said.contains("not-allowed") {
                let remedy = "name a virtual host that exists, and let the user use it: rabbitmqctl set_permissions";
                findings.error("rabbitmq-refuses-the-virtual-host", at, said, remedy);
            } else {
                findings.error(
                    "rabbitmq-away",
                    at,
                    said,
                    "start it, or correct rabbitmq.url, or what is said of TLS",
                );
            }
            return Ok(());
        }
    };
    let queue = rabbitmq::queue(config)?;
    let dead_letters = rabbitmq::destination(config, Shelf::DeadLetters)?;
    // Who checks or trusts needs no right to configure, and still has to know that nobody compared.
    let level = if matches!(config.text("rabbitmq.topology"), None | Some("declare")) {
        Level::Error
    } else {
        Level::Advice
    };
    for (missing, name, role) in [
        (
            "queue-missing",
            queue,
            Role::Consumed {
                dead_letters: dead_letters.clone(),
            },
        ),
        ("dead-letter-queue-missing", dead_letters, Role::Letters),
        (
            "in-doubt-queue-missing",
            rabbitmq::destination(config, Shelf::InDoubt)?,
            Role::Letters,
        ),
    ] {
        judge(&connection, missing, &name, &role, level, findings).await?;
    }
    let _ = connection.close(200, "OK".into()).await;
    Ok(())
}

enum Role {
    Consumed { dead_letters: String },
    Letters,
}

/// Declares a queue that is there as it should be: it stays as it is, and the broker names the
/// first thing that differs.
async fn judge(
    connection: &Connection,
    missing: &'static str,
    name: &str,
    role: &Role,
    not_compared: Level,
    findings: &mut Findings,
) -> Result<(), Failure> {
    let at = format!("RabbitMQ queue {name}");
    match rabbitmq::passively(&connection.create_channel().await?, name).await {
        Ok(_) => {}
        Err(error) if rabbitmq::reply_code(&error) == Some(404) => {
            let remedy =
                "start the consumer with `Topology::Declare`, which is the default, or create it";
            findings.error(missing, at, "it does not exist", remedy);
            return Ok(());
        }
        Err(error) => {
            findings.error(
                "queue-cannot-be-used",
                at,
                error.to_string(),
                "let the user configure, read and write it",
            );
            return Ok(());
        }
    }
    let mut differs = Vec::new();
    for (arguments, answer) in probes(role) {
        match (differs_from(connection, name, arguments).await?, answer) {
            (Compared::Same, Probe::Good) => return Ok(()),
            (Compared::Same, Probe::PlainQuorum) => {
                plain_quorum(role, at, findings);
                return Ok(());
            }
            (Compared::Not(said), _) => {
                let what = format!(
                    "whether it keeps what it holds is not known: RabbitMQ compares a queue's arguments only for a user who may configure it, \
                     and `Topology::Declare` needs that right too ({said})"
                );
                let remedy = format!(
                    "let the user configure `{name}` (rabbitmqctl set_permissions), or see that nothing of it loses messages, and use \
                     `Topology::Check` in the consumer (rabbitmq.topology = \"check\")"
                );
                findings.add(not_compared, "queue-not-compared", at, what, remedy);
                return Ok(());
            }
            (Compared::Differs(differing), _) => differs.push(differing),
        }
    }
    // A classic queue differs from a classic one in something else than its kind.
    let is_quorum = differs
        .iter()
        .any(|it| it.argument == "x-queue-type" && it.said.contains("current is 'quorum'"));
    let rank = |it: &Differing| {
        TELLING
            .iter()
            .position(|argument| *argument == it.argument)
            .unwrap_or(TELLING.len())
    };
    if let Some(differing) = differs.into_iter().min_by_key(rank) {
        differs_in(&differing, role, is_quorum, at, findings);
    }
    Ok(())
}

/// An argument of a queue, and what the broker says of it.
struct Differing {
    argument: String,
    said: String,
}

/// What became of comparing a queue's arguments.
enum Compared {
    /// They are just so.
    Same,
    /// Something differs.
    Differs(Differing),
    /// The user may not ask: what the broker says to that.
    Not(String),
}

/// Arguments that lose messages, the worst first: the broker names one alone, and another one each
/// time.
const TELLING: [&str; 9] = [
    "durable",
    "auto_delete",
    "exclusive",
    "x-message-ttl",
    "x-expires",
    "x-max-length",
    "x-max-length-bytes",
    "x-delivery-limit",
    "x-dead-letter-exchange",
];

/// What differs first.
async fn differs_from(
    connection: &Connection,
    name: &str,
    arguments: FieldTable,
) -> Result<Compared, Failure> {
    let channel = connection.create_channel().await?;
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    let error = match channel.queue_declare(name.into(), options, arguments).await {
        Ok(_) => {
            channel.close(200, "OK".into()).await?;
            return Ok(Compared::Same);
        }
        Err(error) => error,
    };
    match rabbitmq::reply_code(&error) {
        Some(403) => Ok(Compared::Not(error.to_string())),
        // An exclusive queue is locked.
        Some(405 | 406) => {
            let said = error.to_string();
            let argument = said
                .split("inequivalent arg '")
                .nth(1)
                .and_then(|rest| rest.split('\'').next());
            Ok(Compared::Differs(Differing {
                argument: argument.unwrap_or("exclusive").to_owned(),
                said,
            }))
        }
        _ => Err(error.into()),
    }
}

fn plain_quorum(role: &Role, at: String, findings: &mut Findings) {
    match role {
        Role::Letters => findings.warning(
            "letters-are-dropped-when-looked-at",
            at,
            "it is a quorum queue without a delivery limit of its own: since RabbitMQ 4.0 it drops what was looked at 20 times",
            format!("{ANEW} with x-delivery-limit=2147483647"),
        ),
        Role::Consumed { dead_letters } => findings.warning(
            "queue-drops-what-it-gives-up",
            at,
            "it is a quorum queue that dead-letters to nowhere: since RabbitMQ 4.0 it drops what was delivered 20 times",
            format!("set dead-letter-exchange \"\" and dead-letter-routing-key {dead_letters} by a policy, or declare it anew"),
        ),
    }
}

const ANEW: &str =
    "such a thing cannot be changed: let the queue run empty, delete it, and declare it anew";

fn differs_in(
    differing: &Differing,
    role: &Role,
    is_quorum: bool,
    at: String,
    findings: &mut Findings,
) {
    let Differing { argument, said } = differing;
    match (argument.as_str(), role) {
        ("durable", _) => {
            findings.error(
                "queue-not-durable",
                at,
                format!("it goes when the broker starts again, with all that it holds ({said})"),
                ANEW,
            );
        }
        ("auto_delete" | "exclusive", _) => {
            findings.error(
                "queue-deletes-itself",
                at,
                format!("it goes when its last consumer or its owner does ({said})"),
                ANEW,
            );
        }
        ("x-message-ttl" | "x-expires", _) => {
            findings.error(
                "queue-expires",
                at,
                format!("what it holds goes after a time ({said})"),
                format!("{ANEW} without it"),
            );
        }
        ("x-max-length" | "x-max-length-bytes", _) => {
            let what = format!("it drops or refuses messages when it is full ({said})");
            findings.error(
                "queue-has-a-length-limit",
                at,
                what,
                format!("{ANEW} without it"),
            );
        }
        ("x-delivery-limit", Role::Letters) if is_quorum => {
            let what = format!("it drops what was looked at too often: each look counts ({said})");
            findings.error(
                "letters-are-dropped-when-looked-at",
                at,
                what,
                format!("{ANEW} with x-delivery-limit=2147483647"),
            );
        }
        (it, Role::Consumed { dead_letters })
            if it.starts_with("x-dead-letter-") || it == "x-delivery-limit" =>
        {
            let what = format!(
                "what the broker gives up on, at a delivery limit say, does not go to {dead_letters} ({said})"
            );
            let remedy = format!(
                "set dead-letter-exchange \"\" and dead-letter-routing-key {dead_letters} by a policy, or declare it anew"
            );
            findings.warning("queue-drops-what-it-gives-up", at, what, remedy);
        }
        _ => {
            let remedy =
                "see that nothing of it loses messages, and use `Topology::Check` in the consumer";
            findings.warning("queue-has-other-arguments", at, said.clone(), remedy);
        }
    }
}

/// What it means that a queue is just so.
#[derive(Clone, Copy)]
enum Probe {
    Good,
    PlainQuorum,
}

/// As the source declares them; as a classic queue; and as what tells more.
fn probes(role: &Role) -> Vec<(FieldTable, Probe)> {
    let text = |value: &str| AMQPValue::LongString(value.into());
    let mut plain = FieldTable::default();
    plain.insert("x-queue-type".into(), text("quorum"));
    let mut ours = plain.clone();
    match role {
        Role::Letters => {
            ours.insert("x-delivery-limit".into(), AMQPValue::LongInt(i32::MAX));
        }
        Role::Consumed { dead_letters } => {
            for (name, value) in [
                ("x-dead-letter-exchange", ""),
                ("x-dead-letter-routing-key", dead_letters),
                ("x-dead-letter-strategy", "at-least-once"),
                ("x-overflow", "reject-publish"),
            ] {
                ours.insert(name.into(), text(value));
            }
        }
    };
    let mut single = ours.clone();
    single.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    let mut classic = FieldTable::default();
    classic.insert("x-queue-type".into(), text("classic"));
    vec![
        (ours, Probe::Good),
        (FieldTable::default(), Probe::Good),
        (classic, Probe::Good),
        (single, Probe::Good),
        (plain, Probe::PlainQuorum),
    ]
}
