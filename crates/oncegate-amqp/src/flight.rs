//! One batch of copies on its way to one queue.

use std::time::Duration;

use futures_util::future::join_all;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection};

use crate::copy::Copy;
use crate::settings::Settings;
use crate::topology;

/// How long the broker may take to confirm a batch.
const PATIENCE: Duration = Duration::from_secs(30);

/// The channel that a batch flies on; opened for the first, kept for the next.
///
/// A channel of its own for each batch that is under way, because the client hands a returned
/// message to whichever confirmation comes next on the channel: which copy of a batch was returned
/// cannot be told, only that one was.
#[derive(Default)]
pub(crate) struct Flight(Option<Channel>);

/// What came of a batch, once all of it was answered.
pub(crate) struct Landed {
    pub(crate) flight: Flight,
    /// These stand in the queue.
    pub(crate) confirmed: Vec<Copy>,
    /// These may not, in their order: publish them again.
    pub(crate) unsure: Vec<Copy>,
    /// Why, if there are some.
    pub(crate) trouble: Option<Trouble>,
}

/// Why a copy does not stand in its queue.
pub(crate) enum Trouble {
    /// The broker did not take one of the batch.
    Refused(String),
    /// The channel is gone.
    Lost(String),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(problem) | Self::Lost(problem) => f.write_str(problem),
        }
    }
}

impl Flight {
    /// Publishes a batch to its one queue, and waits until all of it was answered. A queue that
    /// turns out to be missing is created again, where that was asked for.
    pub(crate) async fn fly(
        self,
        connection: &Connection,
        settings: &Settings,
        mut batch: Vec<Copy>,
    ) -> Landed {
        let channel = match self.channel(connection).await {
            Ok(channel) => channel,
            Err(error) => {
                let trouble = Some(Trouble::Lost(error.to_string()));
                return Landed {
                    flight: Self(None),
                    confirmed: Vec::new(),
                    unsure: batch,
                    trouble,
                };
            }
        };
        let frame_max = connection.configuration().frame_max();
        if batch.iter().any(|copy| copy.withdrawal.is_some()) {
            match answered(connection, sound(&channel)).await {
                Some(Ok(())) => batch.retain(|copy| {
                    !copy.is_withdrawn() && (copy.withdrawal.is_none() || copy.fits(frame_max))
                }),
                sounded => {
                    let problem = sounded
                        .and_then(Result::err)
                        .map_or_else(unanswered, |error| error.to_string());
                    return Landed {
                        flight: Self(None),
                        confirmed: Vec::new(),
                        unsure: batch,
                        trouble: Some(Trouble::Lost(problem)),
                    };
                }
            }
        }
        batch.iter_mut().for_each(|copy| copy.fit(frame_max));
        let Some(answers) = answered(
            connection,
            join_all(batch.iter().map(|copy| publish(&channel, copy))),
        )
        .await
        else {
            let trouble = Some(Trouble::Lost(unanswered()));
            return Landed {
                flight: Self(None),
                confirmed: Vec::new(),
                unsure: batch,
                trouble,
            };
        };
        let to = batch.first().map(|copy| copy.to.clone());
        let (confirmed, unsure, trouble) = judge(batch, answers);
        match (&trouble, to) {
            (Some(Trouble::Lost(_)), _) => {
                return Landed {
                    flight: Self(None),
                    confirmed,
                    unsure,
                    trouble,
                };
            }
            (Some(Trouble::Refused(_)), Some(to)) => {
                if let Err(problem) = topology::restore(connection, settings, &to).await {
                    tracing::warn!(queue = to.as_str(), %problem, "the queue could not be prepared");
                }
                // A quorum queue that was full stays so for a channel that it has refused, until
                // something leaves it, even if it has room meanwhile because its limit was raised.
                // So the next try comes by another channel.
                let _ = channel.close(200, "OK".into()).await;
                return Landed {
                    flight: Self(None),
                    confirmed,
                    unsure,
                    trouble,
                };
            }
            _ => {}
        }
        Landed {
            flight: Self(Some(channel)),
            confirmed,
            unsure,
            trouble,
        }
    }

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

/// Publishes something that reaches nobody, and waits until the broker has confirmed it.
///
/// One that is short of memory says so only to those who publish, and what was published to it by
/// then cannot be taken back. A copy that may yet be withdrawn is therefore published only to one
/// that has just read something.
async fn sound(channel: &Channel) -> lapin::Result<()> {
    // Twice, and with a body: on a new connection RabbitMQ stops reading only behind the header of
    // the first.
    for _ in 0..2 {
        // No queue has an empty name.
        let nowhere = channel.basic_publish(
            "".into(),
            "".into(),
            BasicPublishOptions::default(),
            b"?",
            BasicProperties::default(),
        );
        nowhere.await?.await?;
    }
    Ok(())
}

fn unanswered() -> String {
    format!("no confirmation came within {PATIENCE:?}")
}

/// Waits for the answers, as long as there may be some; `None` once none is to be expected any
/// more. A node whose queue moved away may take what is published and never answer; one that is
/// short of memory answers when that is over.
async fn answered<T>(connection: &Connection, answers: impl Future<Output = T>) -> Option<T> {
    let mut answers = std::pin::pin!(answers);
    loop {
        match tokio::time::timeout(PATIENCE, &mut answers).await {
            Ok(answers) => return Some(answers),
            Err(_) if connection.status().blocked() => {}
            Err(_) => return None,
        }
    }
}

/// Sorts a batch by its answers. With one refusal in it, no confirmation counts: it may have been
/// another's.
///
/// Without one, each counts, even if the channel was lost in the middle: a returned message comes
/// before its own confirmation, so the confirmation that took it up is among the answers, as a
/// refusal.
fn judge(
    batch: Vec<Copy>,
    answers: Vec<Result<(), Trouble>>,
) -> (Vec<Copy>, Vec<Copy>, Option<Trouble>) {
    let mut trouble = None;
    let mut stands = Vec::with_capacity(batch.len());
    for answer in answers {
        stands.push(answer.is_ok());
        match (answer, &trouble) {
            (Err(refused @ Trouble::Refused(_)), _) => return (Vec::new(), batch, Some(refused)),
            (Err(lost), None) => trouble = Some(lost),
            _ => {}
        }
    }
    let mut stands = stands.into_iter();
    let (confirmed, unsure) = batch
        .into_iter()
        .partition(|_| stands.next().unwrap_or(false));
    (confirmed, unsure, trouble)
}

async fn publish(channel: &Channel, copy: &Copy) -> Result<(), Trouble> {
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    point(copy, "amqp.delay.before", "amqp.letter.before");
    let publishing = channel.basic_publish(
        "".into(),
        copy.to.clone(),
        options,
        &copy.body,
        copy.properties.clone(),
    );
    let answer = match publishing.await {
        Ok(confirm) => confirm.await,
        Err(error) => Err(error),
    };
    let refused = |problem: &str| {
        Err(Trouble::Refused(format!(
            "`{}` did not take the copy: {problem}",
            copy.to
        )))
    };
    match answer {
        Ok(Confirmation::Ack(None)) => {
            point(copy, "amqp.delay.confirmed", "amqp.letter.confirmed");
            Ok(())
        }
        Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned))) => {
            refused(returned.reply_text.as_str())
        }
        Ok(Confirmation::Nack(None)) => refused("the broker refused it"),
        Ok(Confirmation::NotRequested) => Err(Trouble::Lost("the broker confirms nothing".into())),
        Err(error) => Err(Trouble::Lost(error.to_string())),
    }
}

/// Where the chaos harness ends the process: one name for what waits, one for what is set aside.
#[inline(always)]
fn point(copy: &Copy, delay: &str, letter: &str) {
    #[cfg(oncegate_chaos)]
    oncegate_core::fault::point(if copy.to.as_str().contains(".delay.") {
        delay
    } else {
        letter
    });
    #[cfg(not(oncegate_chaos))]
    let _ = (copy, delay, letter);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(answers: Vec<Result<(), Trouble>>) -> (Vec<u64>, Vec<u64>) {
        let copy = |tag| Copy {
            epoch: 1,
            tag,
            to: "q".into(),
            properties: BasicProperties::default(),
            body: "".into(),
            withdrawal: None,
        };
        let batch = (1..=answers.len() as u64).map(copy).collect();
        let (confirmed, unsure, trouble) = judge(batch, answers);
        assert_eq!(trouble.is_some(), !unsure.is_empty());
        let tags = |copies: Vec<Copy>| copies.iter().map(|copy| copy.tag).collect();
        (tags(confirmed), tags(unsure))
    }

    fn refused() -> Result<(), Trouble> {
        Err(Trouble::Refused("NO_ROUTE".into()))
    }

    fn lost() -> Result<(), Trouble> {
        Err(Trouble::Lost("closed".into()))
    }

    #[test]
    fn beside_a_returned_copy_no_confirmation_counts() {
        assert_eq!(tags(vec![Ok(()), Ok(())]), (vec![1, 2], vec![]));
        assert_eq!(
            tags(vec![Ok(()), refused(), Ok(())]),
            (vec![], vec![1, 2, 3])
        );
        assert_eq!(
            tags(vec![Ok(()), lost(), refused()]),
            (vec![], vec![1, 2, 3])
        );
    }

    #[test]
    fn what_was_confirmed_before_the_channel_was_lost_counts() {
        assert_eq!(tags(vec![Ok(()), lost(), Ok(())]), (vec![1, 3], vec![2]));
        assert_eq!(tags(vec![refused()]), (vec![], vec![1]));
    }
}
