//! The end of assignments.

use super::{SharedState, StateLock};

/// Whether the partitions still belong to this member when they are revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RevocationKind {
    /// No other member has them before they are revoked.
    Revoked,
    /// Another member has them already, and a commit would overwrite that member's offsets.
    Lost,
}

impl<M: StateLock> SharedState<M> {
    /// Ends assignments: waits for deliveries with `drain`, commits with `store`, and forgets the
    /// partitions. Lost partitions are neither drained nor committed. Returns the number of
    /// unsettled deliveries.
    pub(crate) fn end_assignments(
        &self,
        leaving: &[(String, i32)],
        kind: RevocationKind,
        drain: impl FnOnce(&[u64]),
        store: impl FnOnce(),
    ) -> usize {
        let epochs = self.revoke(leaving);
        if kind == RevocationKind::Revoked {
            drain(&epochs);
            store();
        }
        let mut state = self.lock();
        let unsettled = state.handed_out(&epochs);
        state.forget(&epochs);
        unsettled
    }
}
