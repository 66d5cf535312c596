//! Fetches the slot map again, or reconnects, after a batch that found its server changed.

use crate::router::CommandRouter;

/// If the batch found a reason, dropping this guard invalidates the topology: before the next
/// command the store fetches the slot map again (Cluster), or reconnects (single server). It does
/// so on drop because a caller may cancel the batch: a renewal waits only for a part of its lease.
pub(crate) struct TopologyRefresh<'a> {
    router: &'a CommandRouter,
    /// Whether a server replied that it does not own the key or is no primary, or, in a Cluster, did
    /// not reply.
    pub(crate) stale: bool,
    /// Whether the batch is not complete: it was cancelled if it is dropped in this state.
    pub(crate) unfinished: bool,
}

impl<'a> TopologyRefresh<'a> {
    pub(crate) fn of(router: &'a CommandRouter) -> Self {
        Self {
            router,
            stale: false,
            unfinished: true,
        }
    }
}

impl Drop for TopologyRefresh<'_> {
    fn drop(&mut self) {
        // A connection to a single server counts cancelled requests as timeouts, and reconnects after
        // several in a row.
        if self.stale || (self.unfinished && matches!(self.router, CommandRouter::Cluster(_))) {
            self.router.invalidate();
        }
    }
}
