//! The parsers of bytes from a broker or from the configuration, for the fuzz targets of this
//! repository. Not part of the API: any release may change this module.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::message::Delivery;
use lapin::uri::AMQPUri;
use oncegate_core::source::SourceError;

use crate::client::frame_sanitizer;
use crate::client::node::BrokerNode;
use crate::protocol::incoming;
use crate::settings::RabbitMq;

/// The character that replaces each byte of a short string that is not UTF-8.
pub const INVALID_UTF8_MARK: char = incoming::INVALID_UTF8_MARK;

/// Replaces invalid UTF-8 in frames.
#[derive(Default)]
pub struct SanitizedFrames(frame_sanitizer::FrameSanitizer);

impl SanitizedFrames {
    /// Adds bytes from the broker.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.push(bytes);
    }

    /// Ends the input: the broker closed the connection.
    pub fn finish(&mut self) {
        self.0.finish();
    }

    /// Moves bytes to the client. Returns their number.
    pub fn read(&mut self, into: &mut [u8]) -> usize {
        self.0.read(into)
    }
}

/// What the source reads from a delivery before it passes it to the consumer.
pub struct ParsedDelivery {
    /// Whether a short string of the delivery was not UTF-8.
    pub has_invalid_utf8: bool,
    /// How many attempts failed.
    pub failures: u32,
    /// The remaining delay of a delayed copy.
    pub remaining_delay: Option<Duration>,
}

/// Parses a delivery as a consumer with these settings does.
///
/// # Errors
/// The settings are invalid.
pub fn parse_delivery(raw: Delivery, settings: RabbitMq) -> Result<ParsedDelivery, SourceError> {
    let settings = settings.check()?;
    let has_invalid_utf8 = incoming::has_invalid_utf8(&raw);
    let received = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let (delivery, _) = incoming::parse_delivery(raw, &settings, 1, received);
    Ok(ParsedDelivery {
        has_invalid_utf8,
        failures: delivery.failures,
        remaining_delay: incoming::remaining_delay(&delivery, &settings, received),
    })
}

/// Parses the URL of a broker. Returns its parts, and its text without the password.
///
/// # Errors
/// The URL is invalid.
pub fn parse_url(url: &str) -> Result<(AMQPUri, String), SourceError> {
    BrokerNode::parse(url).map(|node| (node.uri, node.redacted_url))
}
