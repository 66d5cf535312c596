//! The queues that a source needs.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection};
use oncegate_core::source::SourceError;

use crate::link::{Trouble, code, passes, reply_code};
use crate::settings::{Consumers, DELAYS, QueueKind, Settings, Topology};

struct Queue {
    role: Role,
    /// The setting that names it.
    setting: &'static str,
    name: ShortString,
    arguments: FieldTable,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Deliveries come from it. The broker does not say which arguments a queue has, and some of
    /// them lose messages.
    Consumed,
    /// Copies go to it.
    Target,
}

/// How often a message may be looked at and put back in a queue that a person reads. Without this,
/// the broker drops it after 20 times since 4.0; older ones know no word for "without limit".
const LOOKS: i32 = i32::MAX;

/// Creates or checks the queues, as the user chose.
pub(crate) async fn prepare(connection: &Connection, settings: &Settings) -> Result<(), Trouble> {
    if settings.topology == Topology::Trust {
        return Ok(());
    }
    // A refusal closes the channel that it was asked on, so what goes on needs another.
    let mut channel = connection.create_channel().await?;
    for queue in named_queues(settings) {
        match settings.topology {
            Topology::Check => check(&channel, &queue).await?,
            Topology::Declare | Topology::Trust => {
                declare(&mut channel, connection, &queue).await?
            }
        }
    }
    if settings.topology == Topology::Declare {
        for queue in delay_queues(settings) {
            declare(&mut channel, connection, &queue).await?;
        }
    }
    channel.close(200, "OK".into()).await?;
    Ok(())
}

/// Creates the dead-letter, in-doubt or delay queue of this name again, if it is the source that
/// creates queues.
pub(crate) async fn restore(
    connection: &Connection,
    settings: &Settings,
    name: &ShortString,
) -> Result<(), Trouble> {
    let queue = named_queues(settings)
        .into_iter()
        .chain(delay_queues(settings))
        .find(|queue| queue.name == *name);
    let Some(queue) = queue.filter(|_| settings.topology == Topology::Declare) else {
        return Ok(());
    };
    let mut channel = connection.create_channel().await?;
    declare(&mut channel, connection, &queue).await?;
    channel.close(200, "OK".into()).await?;
    Ok(())
}

async fn check(channel: &Channel, queue: &Queue) -> Result<(), Trouble> {
    match passively(channel, queue).await {
        Ok(()) => Ok(()),
        Err(error) if reply_code(&error) == Some(code::NOT_FOUND) && !passes(&error) => {
            Err(Trouble::Wrong(SourceError::misconfigured(
                queue.setting,
                format!("the queue `{}` does not exist", queue.name),
                "create it, or let `Topology::Declare` do so",
            )))
        }
        Err(error) => Err(refusal(error, queue)),
    }
}

async fn declare(
    channel: &mut Channel,
    connection: &Connection,
    queue: &Queue,
) -> Result<(), Trouble> {
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    let error = match channel
        .queue_declare(queue.name.clone(), options, queue.arguments.clone())
        .await
    {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    if reply_code(&error) != Some(code::PRECONDITION_FAILED) {
        return Err(refusal(error, queue));
    }
    if queue.role == Role::Consumed {
        return Err(Trouble::Mismatch(SourceError::misconfigured(
            queue.setting,
            format!(
                "the queue `{}` exists with other arguments ({error})",
                queue.name
            ),
            "if it is a classic queue, say `.queue_kind(QueueKind::Classic)`; if it is yours and loses nothing (a delivery limit needs a dead-letter exchange), create the dead-letter and in-doubt queues too and choose `Topology::Check`",
        )));
    }
    *channel = connection.create_channel().await?;
    passively(channel, queue)
        .await
        .map_err(|error| refusal(error, queue))?;
    tracing::warn!(
        queue = queue.name.as_str(), %error,
        "the queue exists with other arguments than oncegate would give it; it is used as it is. A delivery limit, a length limit or a time to live loses messages"
    );
    Ok(())
}

async fn passively(channel: &Channel, queue: &Queue) -> lapin::Result<()> {
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(queue.name.clone(), options, FieldTable::default())
        .await
        .map(drop)
}

fn refusal(error: lapin::Error, queue: &Queue) -> Trouble {
    if reply_code(&error) != Some(code::ACCESS_REFUSED) {
        return error.into();
    }
    Trouble::Wrong(SourceError::misconfigured(
        queue.setting,
        format!("the queue `{}` may not be declared ({error})", queue.name),
        "give the user the right to configure it, or create the queues and choose `Topology::Check`",
    ))
}

fn named_queues(settings: &Settings) -> [Queue; 3] {
    let mut consumed = of_kind(settings.kind);
    if settings.kind == QueueKind::Quorum {
        // What the broker gives up on (a delivery limit, 20 by default since 4.0) is not to be
        // dropped.
        dead_letters_to(&mut consumed, &settings.dead_letters, settings.kind);
    }
    if settings.consumers == Consumers::SingleActive {
        consumed.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    }
    let mut kept = of_kind(settings.kind);
    if settings.kind == QueueKind::Quorum {
        kept.insert("x-delivery-limit".into(), AMQPValue::LongInt(LOOKS));
    }
    let target = |setting, name: &ShortString| Queue {
        role: Role::Target,
        setting,
        name: name.clone(),
        arguments: kept.clone(),
    };
    [
        Queue {
            role: Role::Consumed,
            setting: "queue",
            name: settings.queue.clone(),
            arguments: consumed,
        },
        target("dead_letters", &settings.dead_letters),
        target("in_doubt", &settings.in_doubt),
    ]
}

fn delay_queues(settings: &Settings) -> impl Iterator<Item = Queue> {
    DELAYS.into_iter().map(|delay| {
        let mut arguments = of_kind(settings.kind);
        // At most ten minutes.
        arguments.insert(
            "x-message-ttl".into(),
            AMQPValue::LongInt(delay.as_millis() as i32),
        );
        dead_letters_to(&mut arguments, &settings.queue, settings.kind);
        Queue {
            role: Role::Target,
            setting: "queue",
            name: settings.delay_queue(delay),
            arguments,
        }
    })
}

fn of_kind(kind: QueueKind) -> FieldTable {
    let mut arguments = FieldTable::default();
    let kind = match kind {
        QueueKind::Quorum => "quorum",
        QueueKind::Classic => "classic",
    };
    arguments.insert("x-queue-type".into(), AMQPValue::LongString(kind.into()));
    arguments
}

fn dead_letters_to(arguments: &mut FieldTable, target: &ShortString, kind: QueueKind) {
    let mut set = |name: &str, value: &str| {
        arguments.insert(name.into(), AMQPValue::LongString(value.into()));
    };
    set("x-dead-letter-exchange", "");
    set("x-dead-letter-routing-key", target.as_str());
    if kind == QueueKind::Quorum {
        // Confirmed dead-lettering; the broker asks for this overflow with it.
        set("x-dead-letter-strategy", "at-least-once");
        set("x-overflow", "reject-publish");
    }
}
