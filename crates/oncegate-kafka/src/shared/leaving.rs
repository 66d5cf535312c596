//! How partitions leave.

use super::{Monitor, Shared};

/// Whether partitions are still ours when they leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// Nobody has them before they are given back.
    GivenBack,
    /// Somebody else has them already: what is committed for them now would be set back, or
    /// forward, under their hands.
    Lost,
}

impl<M: Monitor> Shared<M> {
    /// Ends assignments: lets what was handed out be settled by `drain`, has `store` commit how far
    /// that came, and forgets them. Of those that are lost nothing is waited for and nothing is
    /// committed. Answers how many deliveries were not settled.
    pub(crate) fn give_up(
        &self,
        leaving: &[(String, i32)],
        how: Leave,
        drain: impl FnOnce(&[u64]),
        store: impl FnOnce(),
    ) -> usize {
        let epochs = self.revoke(leaving);
        if how == Leave::GivenBack {
            drain(&epochs);
            store();
        }
        let mut state = self.lock();
        let unsettled = state.out(&epochs);
        state.forget(&epochs);
        unsettled
    }
}
