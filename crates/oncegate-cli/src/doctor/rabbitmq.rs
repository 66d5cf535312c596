//! RabbitMQ: checks that the queues exist and lose no messages.

use std::time::Duration;

use lapin::Connection;
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate::SourceError;

use super::{DoctorFindings, Severity};
use crate::config::Config;
use crate::destination::{Destination, rabbitmq};
use crate::error::CliError;

/// The time limit of all requests together. lapin may leave one without a reply, see
/// `destination::rabbitmq::reply_timeout`.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit of closing the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) async fn check(config: &Config, findings: &mut DoctorFindings) -> Result<(), CliError> {
    let shown = config
        .text("rabbitmq.url")
        .map(crate::show_config::without_password)
        .unwrap_or_default();
    let at = format!("RabbitMQ at {shown}");
    let connection = match rabbitmq::connect(config).await {
        Ok(connection) => connection,
        Err(failure) => {
            let reply = failure.to_string();
            if reply.contains("ACCESS_REFUSED") || reply.contains("access-refused") {
                let remedy = "correct the user and password in rabbitmq.url; `guest` may only connect from the host of the broker";
                findings.error("rabbitmq-login-rejected", at, reply, remedy);
            } else if reply.contains("NOT_ALLOWED") || reply.contains("not-allowed") {
                let remedy = "configure an existing virtual host, and grant the user permissions: rabbitmqctl set_permissions";
                findings.error("rabbitmq-virtual-host-rejected", at, reply, remedy);
            } else {
                findings.error(
                    "rabbitmq-unreachable",
                    at,
                    reply,
                    "start it, or correct rabbitmq.url or the TLS settings",
                );
            }
            return Ok(());
        }
    };
    match tokio::time::timeout(TIMEOUT, check_queues(config, &connection, findings)).await {
        Ok(checked) => checked?,
        Err(_) => findings.error(
            "rabbitmq-unreachable",
            at,
            format!("not all requests were answered within {TIMEOUT:?}"),
            "check that it is not overloaded, and run this again",
        ),
    }
    // An error does not matter: nothing is sent after this.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, connection.close(200, "OK".into())).await;
    Ok(())
}

async fn check_queues(
    config: &Config,
    connection: &Connection,
    findings: &mut DoctorFindings,
) -> Result<(), CliError> {
    let queue = rabbitmq::queue(config)?;
    let dead_letters = rabbitmq::destination_queue(config, Destination::DeadLetters)?;
    let topology = if matches!(config.text("rabbitmq.topology"), None | Some("declare")) {
        QueueTopology::Declared
    } else {
        QueueTopology::Required
    };
    for (missing_code, name, role) in [
        (
            "queue-missing",
            queue,
            QueueRole::Consumed {
                dead_letters: dead_letters.clone(),
            },
        ),
        (
            "dead-letter-queue-missing",
            dead_letters,
            QueueRole::Destination,
        ),
        (
            "in-doubt-queue-missing",
            rabbitmq::destination_queue(config, Destination::InDoubt)?,
            QueueRole::Destination,
        ),
    ] {
        check_queue(connection, missing_code, &name, &role, topology, findings).await?;
    }
    let mismatch = config.rabbitmq()?.queue_mismatch(connection).await;
    if let Ok(Some(SourceError::Misconfigured { problem, .. })) = mismatch {
        findings.error(
            "queue-refused",
            format!("RabbitMQ queue {}", rabbitmq::queue(config)?),
            format!("the consumer refuses to start: {problem}"),
            "set rabbitmq.queue-kind to the type of the queue, and rabbitmq.consumers to single-active if it has x-single-active-consumer; to consume a queue with arguments of its own, set \
             rabbitmq.topology = \"check\" and make sure that it drops no message",
        );
    }
    Ok(())
}

/// Whether the consumer declares missing queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueTopology {
    /// The consumer declares them when it starts.
    Declared,
    /// The consumer does not start if a queue is missing.
    Required,
}

/// What a queue is used for.
enum QueueRole {
    /// The consumer reads the queue, and its messages are dead-lettered to `dead_letters`.
    Consumed { dead_letters: String },
    /// The queue receives dead letters or messages in doubt.
    Destination,
}

/// Adds a finding with the code `missing_code` if the queue does not exist, and findings about its
/// arguments. Compares them by declaring the queue: an existing queue stays unchanged, and the
/// broker names the first argument that differs.
async fn check_queue(
    connection: &Connection,
    missing_code: &'static str,
    name: &str,
    role: &QueueRole,
    topology: QueueTopology,
    findings: &mut DoctorFindings,
) -> Result<(), CliError> {
    let at = format!("RabbitMQ queue {name}");
    match rabbitmq::declare_passively(&connection.create_channel().await?, name).await {
        Ok(_) => {}
        Err(error) if rabbitmq::reply_code(&error) == Some(404) => {
            match topology {
                QueueTopology::Declared => findings.add(
                    Severity::Advice,
                    missing_code,
                    at,
                    "not declared yet; the consumer declares it at its first start",
                    "start the consumer; if one has run before, check that the names under [rabbitmq] and the virtual host in rabbitmq.url \
                     are those of the consumer",
                ),
                QueueTopology::Required => findings.error(
                    missing_code,
                    at,
                    "it does not exist, and rabbitmq.topology does not let the consumer declare it",
                    "declare it, or set rabbitmq.topology = \"declare\"",
                ),
            }
            return Ok(());
        }
        Err(error) => {
            findings.error(
                "queue-permission-missing",
                at,
                error.to_string(),
                "grant the user configure, write and read permissions",
            );
            return Ok(());
        }
    }
    let mut mismatches = Vec::new();
    for (arguments, meaning) in probes(role) {
        match (
            compare_arguments(connection, name, arguments).await?,
            meaning,
        ) {
            (ArgumentComparison::Same, ProbeResult::Good) => return Ok(()),
            (ArgumentComparison::Same, ProbeResult::SingleActive) => {
                findings.add(
                    Severity::Advice,
                    "single-active-consumer-delivery-limit",
                    at,
                    "with .order(Order::ByKey), each stop of its consumer counts towards the delivery limit of the messages that the consumer holds: \
                     since RabbitMQ 4.0 they are dead-lettered after 20 stops, unless a policy sets another limit",
                    format!("raise the limit: rabbitmqctl set_policy NAME '^{name}$' '{{\"delivery-limit\": 1000}}' --apply-to queues"),
                );
                return Ok(());
            }
            (ArgumentComparison::Same, ProbeResult::PlainQuorum) => {
                add_plain_quorum(role, at, findings);
                return Ok(());
            }
            (ArgumentComparison::NotPermitted(reply), _) => {
                let what = format!(
                    "whether it may lose messages is unknown: RabbitMQ compares a queue's arguments only for a user who may configure it, \
                     and a consumer that declares its queues needs that right too ({reply})"
                );
                let remedy = format!(
                    "let the user configure `{name}` (rabbitmqctl set_permissions), or check that none of its arguments loses messages, and set \
                     rabbitmq.topology = \"check\" (`Topology::Check`)"
                );
                // A consumer that declares nothing needs no configure permission.
                let severity = match topology {
                    QueueTopology::Declared => Severity::Error,
                    QueueTopology::Required => Severity::Advice,
                };
                findings.add(severity, "queue-arguments-not-checked", at, what, remedy);
                return Ok(());
            }
            (ArgumentComparison::Differs(mismatch), _) => mismatches.push(mismatch),
        }
    }
    // For a classic queue, too, the broker may name `x-delivery-limit` as the first difference,
    // although such a queue has none; the reply about `x-queue-type` shows the type.
    let is_quorum = mismatches
        .iter()
        .any(|it| it.argument == "x-queue-type" && it.reply.contains("current is 'quorum'"));
    let rank = |it: &ArgumentMismatch| {
        WORST_FIRST
            .iter()
            .position(|argument| *argument == it.argument)
            .unwrap_or(WORST_FIRST.len())
    };
    if let Some(mismatch) = mismatches.into_iter().min_by_key(rank) {
        add_mismatch(&mismatch, role, is_quorum, at, findings);
    }
    Ok(())
}

/// An argument that differs, and the reply of the broker.
struct ArgumentMismatch {
    argument: String,
    reply: String,
}

/// How the arguments of a queue compare with expected ones.
enum ArgumentComparison {
    /// All arguments are equal.
    Same,
    /// At least one argument differs; the broker names one.
    Differs(ArgumentMismatch),
    /// The user has no configure permission; the reply of the broker.
    NotPermitted(String),
}

/// Queue properties and arguments that can lose messages, the worst first. Each declaration reveals
/// only one difference, so several are compared, and the worst is reported.
const WORST_FIRST: [&str; 9] = [
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

/// Compares the arguments of an existing queue with these by declaring it.
async fn compare_arguments(
    connection: &Connection,
    name: &str,
    arguments: FieldTable,
) -> Result<ArgumentComparison, CliError> {
    let channel = connection.create_channel().await?;
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    let error = match channel.queue_declare(name.into(), options, arguments).await {
        Ok(_) => {
            channel.close(200, "OK".into()).await?;
            return Ok(ArgumentComparison::Same);
        }
        Err(error) => error,
    };
    match rabbitmq::reply_code(&error) {
        Some(403) => Ok(ArgumentComparison::NotPermitted(error.to_string())),
        // 405 RESOURCE_LOCKED: the queue is exclusive to another connection. 406
        // PRECONDITION_FAILED: an argument differs.
        Some(405 | 406) => {
            let reply = error.to_string();
            let argument = reply
                .split("inequivalent arg '")
                .nth(1)
                .and_then(|after| after.split('\'').next());
            Ok(ArgumentComparison::Differs(ArgumentMismatch {
                argument: argument.unwrap_or("exclusive").to_owned(),
                reply,
            }))
        }
        _ => Err(error.into()),
    }
}

/// Adds the finding about a quorum queue that has no arguments except its type.
fn add_plain_quorum(role: &QueueRole, at: String, findings: &mut DoctorFindings) {
    match role {
        QueueRole::Destination => findings.warning(
            "dead-letter-queue-delivery-limit",
            at,
            "it is a quorum queue with the default delivery limit: since RabbitMQ 4.0 it drops messages after 20 reads",
            format!("{REDECLARE} with x-delivery-limit=2147483647"),
        ),
        QueueRole::Consumed { dead_letters } => findings.warning(
            "queue-without-dead-letter-exchange",
            at,
            "it is a quorum queue without a dead-letter exchange: since RabbitMQ 4.0 it drops messages after 20 deliveries",
            format!("set dead-letter-exchange \"\" and dead-letter-routing-key {dead_letters} by a policy, or redeclare it"),
        ),
    }
}

const REDECLARE: &str =
    "queue arguments cannot be changed: empty the queue, delete it, and declare it";

/// Adds the finding about an argument that differs.
fn add_mismatch(
    mismatch: &ArgumentMismatch,
    role: &QueueRole,
    is_quorum: bool,
    at: String,
    findings: &mut DoctorFindings,
) {
    let ArgumentMismatch { argument, reply } = mismatch;
    match (argument.as_str(), role) {
        ("durable", _) => {
            findings.error(
                "queue-not-durable",
                at,
                format!("it is deleted with its messages when the broker restarts ({reply})"),
                REDECLARE,
            );
        }
        ("auto_delete" | "exclusive", _) => {
            findings.error(
                "queue-auto-deleted",
                at,
                format!("it is deleted with its last consumer or its connection ({reply})"),
                REDECLARE,
            );
        }
        ("x-message-ttl" | "x-expires", _) => {
            findings.error(
                "queue-expires",
                at,
                format!("its messages expire, or it is deleted when it is unused ({reply})"),
                format!("{REDECLARE} without it"),
            );
        }
        ("x-max-length" | "x-max-length-bytes", _) => {
            let what = format!("it drops or refuses messages when it is full ({reply})");
            findings.error(
                "queue-length-limit",
                at,
                what,
                format!("{REDECLARE} without it"),
            );
        }
        ("x-delivery-limit", QueueRole::Destination) if is_quorum => {
            let what = format!("each read counts, and it drops messages over the limit ({reply})");
            findings.error(
                "dead-letter-queue-delivery-limit",
                at,
                what,
                format!("{REDECLARE} with x-delivery-limit=2147483647"),
            );
        }
        (argument, QueueRole::Consumed { dead_letters })
            if argument.starts_with("x-dead-letter-") || argument == "x-delivery-limit" =>
        {
            let what =
                format!("messages over the delivery limit may not reach {dead_letters} ({reply})");
            let remedy = format!(
                "set dead-letter-exchange \"\" and dead-letter-routing-key {dead_letters} by a policy, or redeclare it"
            );
            findings.warning("queue-without-dead-letter-exchange", at, what, remedy);
        }
        _ => {
            let remedy = "check that none of its arguments loses messages, and set rabbitmq.topology = \"check\" (`Topology::Check`)";
            findings.warning("queue-arguments-differ", at, reply.clone(), remedy);
        }
    }
}

/// What follows if a queue has exactly the arguments of a declaration in [`probes`].
#[derive(Clone, Copy)]
enum ProbeResult {
    /// The queue loses no messages.
    Good,
    /// The queue loses no messages. It is a quorum queue with a single active consumer.
    SingleActive,
    /// The queue is a quorum queue without a dead-letter exchange and with the default delivery
    /// limit.
    PlainQuorum,
}

/// The sets of arguments to compare with those of a queue. If none is equal, the broker names one
/// difference for each of them, so several sets find more differences.
fn probes(role: &QueueRole) -> Vec<(FieldTable, ProbeResult)> {
    let text = |value: &str| AMQPValue::LongString(value.into());
    let mut plain = FieldTable::default();
    plain.insert("x-queue-type".into(), text("quorum"));
    let mut declared = plain.clone();
    match role {
        QueueRole::Destination => {
            declared.insert("x-delivery-limit".into(), AMQPValue::LongInt(i32::MAX));
        }
        QueueRole::Consumed { dead_letters } => {
            for (name, value) in [
                ("x-dead-letter-exchange", ""),
                ("x-dead-letter-routing-key", dead_letters),
                ("x-dead-letter-strategy", "at-least-once"),
                ("x-overflow", "reject-publish"),
            ] {
                declared.insert(name.into(), text(value));
            }
        }
    };
    let mut single_active = declared.clone();
    single_active.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    let mut classic = FieldTable::default();
    classic.insert("x-queue-type".into(), text("classic"));
    vec![
        (declared, ProbeResult::Good),
        (FieldTable::default(), ProbeResult::Good),
        (classic, ProbeResult::Good),
        (single_active, ProbeResult::SingleActive),
        (plain, ProbeResult::PlainQuorum),
    ]
}
