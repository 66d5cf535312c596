//! Refreshes the topology after a batch that found it stale.

use crate::router::Router;

/// Invalidates the topology when it is dropped, if the batch found a reason. Works on drop because
/// a caller may cancel the batch: a renewal waits only for a part of its lease.
pub(crate) struct TopologyRefresh<'a> {
    router: &'a Router,
    /// Whether a server replied, or its silence suggests, that it no longer serves the key.
    pub(crate) stale: bool,
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
