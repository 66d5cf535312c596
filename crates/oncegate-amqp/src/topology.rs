//! Declares or checks the queues that a source needs.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection};
use oncegate_core::source::SourceError;

use crate::connector::{ConnectError, code, is_transient_refusal, reply_code};
use crate::queue_settings::{ConsumerMode, DELAYS, QueueSettings};
use crate::settings::{QueueKind, Topology};

/// A queue and the arguments to declare it with.
struct QueueSpec {
    purpose: QueuePurpose,
    /// The setting that has the name of the queue.
    setting: &'static str,
    name: ShortString,
    arguments: FieldTable,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum QueuePurpose {
    /// The source consumes it. It must have the declared arguments: a queue with others may lose
    /// messages, and AMQP does not report the arguments of a queue.
    Consumed,
    /// The source publishes dead letters or in-doubt messages to it.
    Target,
    /// The source publishes delayed copies to it, and the broker returns them to the consumed queue.
    Delay,
}

/// The delivery limit of the dead-letter and in-doubt queues: operators read and requeue their messages
/// often, and RabbitMQ 4 drops a message after 20 redeliveries by default. The maximum of the argument,
/// because older releases have no value for "unlimited".
const UNLIMITED_DELIVERIES: i32 = i32::MAX;

/// Declares or checks the queues, by [`Topology`].
pub(crate) async fn prepare(
    connection: &Connection,
    settings: &QueueSettings,
) -> Result<(), ConnectError> {
    if settings.topology == Topology::Trust {
        return Ok(());
    }
    // Mutable, because an error closes the channel and `declare` opens another one.
    let mut channel = connection.create_channel().await?;
    for queue in named_queues(settings) {
        match settings.topology {
            Topology::Check => check(&channel, &queue).await?,
            Topology::Declare | Topology::Trust => {
                declare(&mut channel, connection, settings, &queue).await?
            }
        }
    }
    if settings.topology == Topology::Declare {
        for queue in delay_queues(settings) {
            declare(&mut channel, connection, settings, &queue).await?;
        }
    }
    channel.close(200, "OK".into()).await?;
    Ok(())
}

/// Declares the queue with this name again. Does nothing unless [`Topology::Declare`] is set and the
/// queue is one of the source's.
pub(crate) async fn redeclare(
    connection: &Connection,
    settings: &QueueSettings,
    name: &ShortString,
) -> Result<(), ConnectError> {
    let queue = named_queues(settings)
        .into_iter()
        .chain(delay_queues(settings))
        .find(|queue| queue.name == *name);
    let Some(queue) = queue.filter(|_| settings.topology == Topology::Declare) else {
        return Ok(());
    };
    let mut channel = connection.create_channel().await?;
    declare(&mut channel, connection, settings, &queue).await?;
    channel.close(200, "OK".into()).await?;
    Ok(())
}

/// Checks that the queue exists.
async fn check(channel: &Channel, queue: &QueueSpec) -> Result<(), ConnectError> {
    match declare_passive(channel, queue).await {
        Ok(()) => Ok(()),
        Err(error)
            if reply_code(&error) == Some(code::NOT_FOUND) && !is_transient_refusal(&error) =>
        {
            Err(ConnectError::Misconfigured(SourceError::misconfigured(
                queue.setting,
                format!("the queue `{}` does not exist", queue.name),
                "create it, or choose `Topology::Declare`",
            )))
        }
        Err(error) => Err(classify(error, queue)),
    }
}

/// Declares the queue. If it exists with other arguments, that is an error for the consumed queue and
/// a warning for any other.
async fn declare(
    channel: &mut Channel,
    connection: &Connection,
    settings: &QueueSettings,
    queue: &QueueSpec,
) -> Result<(), ConnectError> {
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    let error = match channel
        .queue_declare(queue.name.clone(), options, queue.arguments.clone())
        .await
    {
        Ok(_) => {
            settings.mismatches.clear(&queue.name);
            return Ok(());
        }
        Err(error) => error,
    };
    if reply_code(&error) != Some(code::PRECONDITION_FAILED) {
        return Err(classify(error, queue));
    }
    if queue.purpose == QueuePurpose::Consumed {
        return Err(ConnectError::QueueMismatch(SourceError::misconfigured(
            queue.setting,
            format!(
                "the queue `{}` exists with other arguments ({error})",
                queue.name
            ),
            "if it is of another type (quorum or classic), set `.queue_kind(…)` to the type that it has; to consume a queue with arguments of your own, choose `Topology::Check`, create the dead-letter and in-doubt queues, and make sure that the queue drops no message (a delivery limit needs a dead-letter exchange)",
        )));
    }
    *channel = connection.create_channel().await?;
    declare_passive(channel, queue)
        .await
        .map_err(|error| classify(error, queue))?;
    if !settings.mismatches.is_new(&queue.name, &error.to_string()) {
        return Ok(());
    }
    let name = queue.name.as_str();
    if queue.purpose == QueuePurpose::Delay {
        tracing::warn!(
            queue = name, %error,
            "the delay queue exists with other arguments than oncegate declares; using it as it is; check that x-message-ttl is the delay in its name and that it dead-letters to the consumed queue, or delete it while it is empty"
        );
    } else {
        tracing::warn!(
            queue = name, %error,
            "the queue exists with other arguments than oncegate declares; using it as it is; check that no delivery limit, length limit or TTL drops its messages"
        );
    }
    Ok(())
}

async fn declare_passive(channel: &Channel, queue: &QueueSpec) -> lapin::Result<()> {
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(queue.name.clone(), options, FieldTable::default())
        .await
        .map(drop)
}

fn classify(error: lapin::Error, queue: &QueueSpec) -> ConnectError {
    if reply_code(&error) != Some(code::ACCESS_REFUSED) {
        return error.into();
    }
    ConnectError::Misconfigured(SourceError::misconfigured(
        queue.setting,
        format!("the queue `{}` cannot be declared ({error})", queue.name),
        "grant the user all that a declaration needs (configure on the queue; for a queue with a dead-letter exchange also read on the queue and write on the exchange), or create the queues and choose `Topology::Check`",
    ))
}

fn named_queues(settings: &QueueSettings) -> [QueueSpec; 3] {
    let mut consumed = queue_arguments(settings.kind);
    if settings.kind == QueueKind::Quorum {
        // A message over the delivery limit (20 by default since RabbitMQ 4.0) must not be
        // dropped.
        dead_letter_to(&mut consumed, &settings.dead_letters, settings.kind);
    }
    if settings.consumers == ConsumerMode::SingleActive {
        consumed.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    }
    let mut target_arguments = queue_arguments(settings.kind);
    if settings.kind == QueueKind::Quorum {
        target_arguments.insert(
            "x-delivery-limit".into(),
            AMQPValue::LongInt(UNLIMITED_DELIVERIES),
        );
    }
    let target = |setting, name: &ShortString| QueueSpec {
        purpose: QueuePurpose::Target,
        setting,
        name: name.clone(),
        arguments: target_arguments.clone(),
    };
    [
        QueueSpec {
            purpose: QueuePurpose::Consumed,
            setting: "queue",
            name: settings.queue.clone(),
            arguments: consumed,
        },
        target("dead_letters", &settings.dead_letters),
        target("in_doubt", &settings.in_doubt),
    ]
}

fn delay_queues(settings: &QueueSettings) -> impl Iterator<Item = QueueSpec> {
    DELAYS.into_iter().map(|delay| {
        let mut arguments = queue_arguments(settings.kind);
        // Fits an `i32`: the longest delay is ten minutes.
        arguments.insert(
            "x-message-ttl".into(),
            AMQPValue::LongInt(delay.as_millis() as i32),
        );
        dead_letter_to(&mut arguments, &settings.queue, settings.kind);
        QueueSpec {
            purpose: QueuePurpose::Delay,
            setting: "queue",
            name: settings.delay_queue(delay),
            arguments,
        }
    })
}

fn queue_arguments(kind: QueueKind) -> FieldTable {
    let mut arguments = FieldTable::default();
    let queue_type = match kind {
        QueueKind::Quorum => "quorum",
        QueueKind::Classic => "classic",
    };
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString(queue_type.into()),
    );
    arguments
}

fn dead_letter_to(arguments: &mut FieldTable, target: &ShortString, kind: QueueKind) {
    let mut set = |name: &str, value: &str| {
        arguments.insert(name.into(), AMQPValue::LongString(value.into()));
    };
    set("x-dead-letter-exchange", "");
    set("x-dead-letter-routing-key", target.as_str());
    if kind == QueueKind::Quorum {
        // At-least-once dead-lettering, which requires this overflow behaviour.
        set("x-dead-letter-strategy", "at-least-once");
        set("x-overflow", "reject-publish");
    }
}
