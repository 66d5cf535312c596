//! Declares or checks the queues that a source needs.

use std::collections::HashMap;

use lapin::options::QueueDeclareOptions;
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection};
use oncegate_core::internal::Lock;
use oncegate_core::source::SourceError;

use crate::client::connector::{ConnectError, code, is_transient_refusal, reply_code};
use crate::client::context::SourceContext;
use crate::protocol::topology::{QueuePurpose, QueueSpec, delay_queues, named_queues};
use crate::settings::Topology;

/// The queues for which the warning was logged that their arguments are not those that oncegate
/// declares, with the broker's text. Queues are declared at each reconnect and with each retry of a
/// copy, and the warning is logged once.
#[derive(Debug, Default)]
pub(crate) struct MismatchLog(Lock<HashMap<ShortString, String>>);

impl MismatchLog {
    /// Whether to log that the queue has arguments other than those that oncegate declares: the
    /// broker's text is new for this queue.
    pub(crate) fn is_new(&self, queue: &ShortString, text: &str) -> bool {
        let logged = self.0.lock().insert(queue.clone(), text.to_owned());
        logged.as_deref() != Some(text)
    }

    /// Forgets the text of a queue, which has the declared arguments now.
    pub(crate) fn clear(&self, queue: &ShortString) {
        self.0.lock().remove(queue);
    }
}

/// Declares or checks the queues, by [`Topology`].
pub(crate) async fn prepare(
    connection: &Connection,
    context: &SourceContext,
) -> Result<(), ConnectError> {
    if context.topology == Topology::Trust {
        return Ok(());
    }
    // Mutable, because an error closes the channel and `declare` opens another one.
    let mut channel = connection.create_channel().await?;
    for queue in named_queues(context) {
        match context.topology {
            Topology::Check => check(&channel, &queue).await?,
            Topology::Declare | Topology::Trust => {
                declare(&mut channel, connection, context, &queue).await?
            }
        }
    }
    if context.topology == Topology::Declare {
        for queue in delay_queues(context) {
            declare(&mut channel, connection, context, &queue).await?;
        }
    }
    channel.close(200, "OK".into()).await?;
    Ok(())
}

/// Declares the queue with this name again. Does nothing unless [`Topology::Declare`] is set and the
/// queue is one of the source's.
pub(crate) async fn redeclare(
    connection: &Connection,
    context: &SourceContext,
    name: &ShortString,
) -> Result<(), ConnectError> {
    let queue = named_queues(context)
        .into_iter()
        .chain(delay_queues(context))
        .find(|queue| queue.name == *name);
    let Some(queue) = queue.filter(|_| context.topology == Topology::Declare) else {
        return Ok(());
    };
    let mut channel = connection.create_channel().await?;
    declare(&mut channel, connection, context, &queue).await?;
    channel.close(200, "OK".into()).await?;
    Ok(())
}

/// The error with which a source refuses the consumed queue, if it exists with other arguments than
/// the source declares. `None` if the arguments match, the queue does not exist, the source
/// declares no queues, or the check failed.
pub(crate) async fn consumed_mismatch(
    connection: &Connection,
    context: &SourceContext,
) -> Option<SourceError> {
    if context.topology != Topology::Declare {
        return None;
    }
    let [queue, ..] = named_queues(context);
    let mut channel = connection.create_channel().await.ok()?;
    // Fails if the queue does not exist: its declaration would create it. That of an existing queue
    // changes nothing.
    declare_passive(&channel, &queue).await.ok()?;
    match declare(&mut channel, connection, context, &queue).await {
        Err(ConnectError::QueueMismatch(error)) => Some(error),
        _ => None,
    }
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
    context: &SourceContext,
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
            context.mismatches.clear(&queue.name);
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
    if !context.mismatches.is_new(&queue.name, &error.to_string()) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_arguments_of_a_queue_are_logged_once() {
        let (log, queue) = (MismatchLog::default(), ShortString::from("q"));
        assert!(log.is_new(&queue, "x-max-length"));
        assert!(!log.is_new(&queue, "x-max-length"));
        assert!(log.is_new(&"other".into(), "x-max-length"));
        assert!(log.is_new(&queue, "x-message-ttl"));
        log.clear(&queue);
        assert!(log.is_new(&queue, "x-message-ttl"));
    }
}
