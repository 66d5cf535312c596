//! The end of assignments.

use super::{SharedState, StateLock};

/// Whether the partitions still belong to this member when they are revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RevocationKind {
    /// Yes: no other member is assigned them before the revocation ends.
    Revoked,
    /// No: another member may be assigned them already, and a commit would overwrite its offsets.
    Lost,
}

impl<M: StateLock> SharedState<M> {
    /// Ends assignments: waits for deliveries with `drain`, stores the offsets with `store`, and
    /// removes the assignments. Both are skipped for lost partitions. Returns the number of unsettled
    /// deliveries.
    pub(crate) fn end_assignments(
        &self,
        partitions: &[(String, i32)],
        kind: RevocationKind,
        drain: impl FnOnce(&[u64]),
        store: impl FnOnce(),
    ) -> usize {
        let epochs = self.revoke(partitions);
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
