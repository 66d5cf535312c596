//! What the consumer settles, taken in as a whole.

use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::{Delivery, FailureHistory, Receipt, Settled};

use super::{Fate, Monitor, Shared, State};

/// A delivery that is to go to the dead letters.
pub(crate) struct Rejected {
    pub(crate) delivery: Delivery,
    pub(crate) reason: Reason,
    pub(crate) story: Option<Box<FailureHistory>>,
}

/// What a delivery is accepted on, where nothing ran: its id was done before.
const DUPLICATE: &str = "duplicate";

impl<M: Monitor> Shared<M> {
    /// Takes in what was settled, and wakes the polling thread. Answers what is to be published.
    pub(crate) fn settle(&self, settled: &mut Vec<Settled>) -> Vec<Rejected> {
        let mut rejected = Vec::new();
        let mut state = self.lock();
        for Settled {
            delivery,
            settlement,
            story,
        } in settled.drain(..)
        {
            let fate = match settlement {
                Settlement::Accept(proof) => {
                    if proof.as_str() == DUPLICATE {
                        state.look_at_duplicate(&delivery);
                    }
                    state.accept(&delivery.receipt)
                }
                Settlement::Release { after, failures } => state.release(
                    Delivery {
                        failures,
                        ..delivery
                    },
                    after,
                ),
                Settlement::Reject(reason) => {
                    let fate = state.reject(&delivery);
                    if fate == Fate::Counted {
                        rejected.push(Rejected {
                            delivery,
                            reason,
                            story,
                        });
                    }
                    fate
                }
            };
            fate.count();
        }
        drop(state);
        self.wake_poller();
        rejected
    }
}

impl State {
    /// Positions come again in a topic that was made anew or is a replica, and where a log has lost
    /// its end. Ids that come from them are those of other messages, which the store may remember,
    /// and a message that bears one is skipped: that is said, since nobody else can know.
    fn look_at_duplicate(&mut self, delivery: &Delivery) {
        let Receipt {
            epoch,
            partition,
            position,
        } = delivery.receipt;
        // Offsets came from an `i64`.
        let Some(assigned) = self
            .assigned
            .get_mut(&epoch)
            .filter(|it| it.log.ids.may_repeat(position as i64))
        else {
            return;
        };
        metrics::counter!(crate::metric::IDS_REPEATED).increment(1);
        if !std::mem::replace(&mut assigned.has_repeated, true) {
            tracing::error!(
                topic = &*assigned.topic,
                partition,
                offset = position,
                "ids repeated: the topic was created again, is a replica, or its log lost its end, and the ids of its messages were handled \
                 before. Where they come from positions these are other messages, which are skipped: give the consumer another .scope(…) and set the group's \
                 offsets back. Where producers send ids of their own, these were sent again, or handled before a rebalance"
            );
        }
    }
}
