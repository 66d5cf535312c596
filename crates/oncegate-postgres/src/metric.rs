//! The metrics of this store.

use oncegate_core::metric::Metric;

pub(crate) const MARKERS_EXPIRED: &str = "oncegate_postgres_markers_expired_total";

/// The metrics of the PostgreSQL store.
pub const POSTGRES_METRICS: &[Metric] = &[Metric::counter(
    MARKERS_EXPIRED,
    &[],
    "Expired markers deleted",
)];
