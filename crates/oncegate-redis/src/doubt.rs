//! Whether the servers are still the right ones.

use crate::route::Route;

/// Looks for the servers anew after the batch where there is reason to, even if nobody waited for
/// its end: a renewal waits for a part of its lease alone.
pub(crate) struct Doubt<'a> {
    route: &'a Route,
    /// Whether a server said, or was too silent to say, that it may not be the right one any more.
    pub(crate) doubted: bool,
    pub(crate) unfinished: bool,
}

impl<'a> Doubt<'a> {
    pub(crate) fn of(route: &'a Route) -> Self {
        Self {
            route,
            doubted: false,
            unfinished: true,
        }
    }
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        // Of a single server the connection itself counts how often nobody waited.
        if self.doubted || (self.unfinished && matches!(self.route, Route::Cluster(_))) {
            self.route.distrust();
        }
    }
}
