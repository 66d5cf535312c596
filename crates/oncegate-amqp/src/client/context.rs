//! What all parts of a source share.

use std::ops::Deref;

use crate::client::connector::BrokerConnector;
use crate::client::declare::MismatchLog;
use crate::protocol::queue_settings::QueueSettings;
use crate::status::SourceMetrics;

/// The settings of a source, and what its parts share. It dereferences to the settings.
pub(crate) struct SourceContext {
    pub(crate) settings: QueueSettings,
    pub(crate) connector: BrokerConnector,
    pub(crate) metrics: SourceMetrics,
    pub(crate) mismatches: MismatchLog,
}

impl SourceContext {
    /// The URL of the current node, without the password.
    pub(crate) fn redacted_url(&self) -> &str {
        &self.connector.nodes.current().redacted_url
    }
}

impl Deref for SourceContext {
    type Target = QueueSettings;

    fn deref(&self) -> &QueueSettings {
        &self.settings
    }
}
