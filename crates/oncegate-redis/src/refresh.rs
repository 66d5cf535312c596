//! Refreshes the topology after a batch that found it stale.

use crate::router::Router;

/// Invalidates the topology when it is dropped, if the batch found a reason. Works on drop because
/// a caller may cancel the batch: a renewal waits only for a part of its lease.
pub(crate) struct TopologyRefresh<'a> {
    router: &'a Router,
    /// Whether a server replied that it no longer serves the key, or did not reply.
    pub(crate) stale: bool,
    /// Whether the batch is not complete: it was cancelled if it is dropped in this state.
    pub(crate) unfinished: bool,
}

impl<'a> TopologyRefresh<'a> {
    pub(crate) fn of(router: &'a Router) -> Self {
        Self {
            router,
            stale: false,
            unfinished: true,
        }
    }
}

impl Drop for TopologyRefresh<'_> {
    fn drop(&mut self) {
        // For a single server the connection itself counts cancelled requests.
        if self.stale || (self.unfinished && matches!(self.router, Router::Cluster(_))) {
            self.router.invalidate();
        }
    }
}
