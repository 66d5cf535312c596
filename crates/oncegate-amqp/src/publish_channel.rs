//! Publishes batches of copies to one queue, with publisher confirms.

use futures_util::future::join_all;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation, Connection};

use crate::client::alarm_probe;
use crate::client::confirm_timeout::{CONFIRM_TIMEOUT, await_confirms};
use crate::connector::{code, reply_code};
use crate::message_copy::MessageCopy;
use crate::queue_settings::QueueSettings;
use crate::topology;

/// A channel with publisher confirms. It is opened for the first batch and used again for later ones.
///
/// It publishes one batch at a time: lapin attaches a returned message to the next confirm on the
/// channel, so a return shows only that one copy of the batch was returned, not which one.
#[derive(Default)]
pub(crate) struct PublishChannel(Option<Channel>);

/// The outcome of a batch.
pub(crate) struct BatchOutcome {
    pub(crate) channel: PublishChannel,
    /// Copies that the broker has confirmed.
    pub(crate) confirmed: Vec<MessageCopy>,
    /// Copies that may not be in the queue, in their order. The caller publishes them again.
    pub(crate) unconfirmed: Vec<MessageCopy>,
    /// Why there are unconfirmed copies.
    pub(crate) error: Option<CopyPublishError>,
}

/// Why a copy is not confirmed.
pub(crate) enum CopyPublishError {
    /// The broker returned a copy of the batch (`basic.return`), or refused it (`basic.nack`).
    ReturnedOrNacked(String),
    /// The channel was closed, or the confirm did not arrive in time.
    ChannelClosed(String),
}

impl std::fmt::Display for CopyPublishError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ReturnedOrNacked(problem) | Self::ChannelClosed(problem) => f.write_str(problem),
        }
    }
}

impl BatchOutcome {
    /// The outcome of a batch without confirms, whose channel is not used again.
    fn failed(unconfirmed: Vec<MessageCopy>, problem: String) -> Self {
        Self {
            channel: PublishChannel(None),
            confirmed: Vec::new(),
            unconfirmed,
            error: Some(CopyPublishError::ChannelClosed(problem)),
        }
    }
}

impl PublishChannel {
    /// Publishes a batch of copies for one queue, and waits for all confirms. If a copy is returned or
    /// nacked, the queue is declared again with `Topology::Declare`.
    pub(crate) async fn publish_batch(
        self,
        connection: &Connection,
        settings: &QueueSettings,
        mut batch: Vec<MessageCopy>,
    ) -> BatchOutcome {
        let channel = match self.channel(connection).await {
            Ok(channel) => channel,
            Err(error) => return BatchOutcome::failed(batch, error.to_string()),
        };
        let frame_max = connection.configuration().frame_max();
        if batch.iter().any(|copy| copy.cancellation.is_some()) {
            match await_confirms(connection, alarm_probe::confirm(&channel)).await {
                Some(Ok(())) => batch.retain(|copy| {
                    !copy.is_cancelled()
                        && (copy.cancellation.is_none() || copy.fits_frame(frame_max))
                }),
                Some(Err(error)) => return BatchOutcome::failed(batch, error.to_string()),
                None => return BatchOutcome::failed(batch, confirm_timed_out()),
            }
        }
        batch
            .iter_mut()
            .for_each(|copy| copy.drop_oversized_headers(frame_max));
        let publishing = join_all(batch.iter().map(|copy| publish(&channel, copy)));
        let Some(confirms) = await_confirms(connection, publishing).await else {
            return BatchOutcome::failed(batch, confirm_timed_out());
        };
        let destination = batch.first().map(|copy| copy.destination.clone());
        let (confirmed, unconfirmed, mut error) = split_by_confirm(batch, confirms);
        let channel = match (&error, destination) {
            (Some(CopyPublishError::ChannelClosed(_)), _) => None,
            (Some(CopyPublishError::ReturnedOrNacked(problem)), Some(destination)) => {
                let declared = topology::redeclare(connection, settings, &destination).await;
                if let Err(declare_error) = declared {
                    error = Some(CopyPublishError::ReturnedOrNacked(format!(
                        "{problem}; declaring the queue failed: {declare_error}"
                    )));
                }
                // A quorum queue may refuse later copies on this channel after it has room again; see
                // `client`.
                let _ = channel.close(200, "OK".into()).await;
                None
            }
            _ => Some(channel),
        };
        BatchOutcome {
            channel: Self(channel),
            confirmed,
            unconfirmed,
            error,
        }
    }

    /// The open channel, or a new one.
    async fn channel(self, connection: &Connection) -> lapin::Result<Channel> {
        if let Some(channel) = self.0.filter(|channel| channel.status().connected()) {
            return Ok(channel);
        }
        let channel = connection.create_channel().await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        Ok(channel)
    }
}

fn confirm_timed_out() -> String {
    format!("no publisher confirm within {CONFIRM_TIMEOUT:?}")
}

/// Splits a batch into confirmed and unconfirmed copies. If one copy was returned or nacked, the whole
/// batch is unconfirmed: lapin may have attached the returned message to the confirm of another copy.
///
/// Otherwise every confirm counts, even if the channel was closed between them: the broker sends a
/// return before the confirm of the same message, so no return is missing for a confirm that arrived.
fn split_by_confirm(
    batch: Vec<MessageCopy>,
    confirms: Vec<Result<(), CopyPublishError>>,
) -> (Vec<MessageCopy>, Vec<MessageCopy>, Option<CopyPublishError>) {
    let mut error = None;
    let mut is_confirmed = Vec::with_capacity(batch.len());
    for confirm in confirms {
        is_confirmed.push(confirm.is_ok());
        match (confirm, &error) {
            (Err(returned @ CopyPublishError::ReturnedOrNacked(_)), _) => {
                return (Vec::new(), batch, Some(returned));
            }
            (Err(closed), None) => error = Some(closed),
            _ => {}
        }
    }
    let mut is_confirmed = is_confirmed.into_iter();
    let (confirmed, unconfirmed) = batch
        .into_iter()
        .partition(|_| is_confirmed.next().unwrap_or(false));
    (confirmed, unconfirmed, error)
}

async fn publish(channel: &Channel, copy: &MessageCopy) -> Result<(), CopyPublishError> {
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    fault_point(copy, "amqp.delay.before", "amqp.letter.before");
    let publishing = channel.basic_publish(
        "".into(),
        copy.destination.clone(),
        options,
        &copy.body,
        copy.properties.clone(),
    );
    let confirm = match publishing.await {
        Ok(confirm) => confirm.await,
        Err(error) => Err(error),
    };
    let not_enqueued = |problem: &str| {
        Err(CopyPublishError::ReturnedOrNacked(format!(
            "the copy for queue `{}` was not enqueued: {problem}",
            copy.destination
        )))
    };
    match confirm {
        Ok(Confirmation::Ack(None)) => {
            fault_point(copy, "amqp.delay.confirmed", "amqp.letter.confirmed");
            Ok(())
        }
        Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned))) => not_enqueued(
            &format!("{}; check that the queue exists", returned.reply_text),
        ),
        Ok(Confirmation::Nack(None)) => not_enqueued(
            "basic.nack; check the length limit of the queue (x-max-length, x-max-length-bytes) and that a majority of its nodes runs",
        ),
        Ok(Confirmation::NotRequested) => Err(CopyPublishError::ChannelClosed(
            "publisher confirms are not enabled, which is a bug in oncegate; report this".into(),
        )),
        Err(error) if reply_code(&error) == Some(code::ACCESS_REFUSED) => {
            Err(CopyPublishError::ChannelClosed(format!(
                "{error}; grant the user the write permission on the default exchange, amq.default"
            )))
        }
        Err(error) => Err(CopyPublishError::ChannelClosed(error.to_string())),
    }
}

/// A fault point of the chaos harness, with one name for delayed copies and one for dead letters.
#[inline(always)]
fn fault_point(copy: &MessageCopy, delay: &str, letter: &str) {
    #[cfg(oncegate_chaos)]
    oncegate_core::fault::point(if copy.destination.as_str().contains(".delay.") {
        delay
    } else {
        letter
    });
    #[cfg(not(oncegate_chaos))]
    let _ = (copy, delay, letter);
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;

    use super::*;

    fn tags(confirms: Vec<Result<(), CopyPublishError>>) -> (Vec<u64>, Vec<u64>) {
        let copy = |tag| MessageCopy {
            epoch: 1,
            tag,
            destination: "q".into(),
            properties: BasicProperties::default(),
            body: "".into(),
            cancellation: None,
        };
        let batch = (1..=confirms.len() as u64).map(copy).collect();
        let (confirmed, unconfirmed, error) = split_by_confirm(batch, confirms);
        assert_eq!(error.is_some(), !unconfirmed.is_empty());
        let tags = |copies: Vec<MessageCopy>| copies.iter().map(|copy| copy.tag).collect();
        (tags(confirmed), tags(unconfirmed))
    }

    fn returned() -> Result<(), CopyPublishError> {
        Err(CopyPublishError::ReturnedOrNacked("NO_ROUTE".into()))
    }

    fn closed() -> Result<(), CopyPublishError> {
        Err(CopyPublishError::ChannelClosed("closed".into()))
    }

    #[test]
    fn no_confirm_of_a_batch_counts_beside_a_returned_copy() {
        assert_eq!(tags(vec![Ok(()), Ok(())]), (vec![1, 2], vec![]));
        assert_eq!(
            tags(vec![Ok(()), returned(), Ok(())]),
            (vec![], vec![1, 2, 3])
        );
        assert_eq!(
            tags(vec![Ok(()), closed(), returned()]),
            (vec![], vec![1, 2, 3])
        );
    }

    #[test]
    fn confirms_before_the_channel_was_closed_count() {
        assert_eq!(tags(vec![Ok(()), closed(), Ok(())]), (vec![1, 3], vec![2]));
        assert_eq!(tags(vec![returned()]), (vec![], vec![1]));
    }
}
