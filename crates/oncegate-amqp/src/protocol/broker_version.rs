//! The release of the broker, which `connection.start` contains and lapin does not return.

use std::sync::{Arc, OnceLock};

/// A release of RabbitMQ: its major and minor version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BrokerVersion(u32, u32);

/// Is set to the broker's version when its first frame arrives: `None` if that does not have it, or if
/// the broker is not RabbitMQ.
pub(crate) type VersionCell = Arc<OnceLock<Option<BrokerVersion>>>;

impl BrokerVersion {
    /// The oldest supported release.
    pub(crate) const OLDEST: Self = Self(3, 10);
    /// The first release whose quorum queues do not count `basic.nack` towards the delivery limit.
    /// One `basic.nack` of many messages keeps their order.
    pub(crate) const UNCOUNTED_NACK: Self = Self(4, 3);

    /// Reads the version from the server properties in a frame with `connection.start`.
    pub(crate) fn from_start(frame: &[u8]) -> Option<Self> {
        if property(frame, "product")? != "RabbitMQ" {
            return None;
        }
        let mut numbers = property(frame, "version")?.split('.');
        let mut number = || numbers.next()?.parse().ok();
        Some(Self(number()?, number()?))
    }
}

impl std::fmt::Display for BrokerVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The value of an entry of a table, whose type is long string (`S`).
fn property<'a>(frame: &'a [u8], name: &str) -> Option<&'a str> {
    let entry = [&[u8::try_from(name.len()).ok()?], name.as_bytes(), b"S"].concat();
    let start = frame.windows(entry.len()).position(|part| part == entry)?;
    let (length, text) = frame[start + entry.len()..].split_first_chunk()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    std::str::from_utf8(text.get(..length)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(product: &str, version: &str) -> Vec<u8> {
        let mut frame = b"\x01\0\0\0\0\x01\xfd\0\x0a\0\x0a\0\x09\0\0\0\xf0".to_vec();
        for (name, value) in [
            ("cluster_name", "version"),
            ("product", product),
            ("version", version),
        ] {
            frame.push(name.len() as u8);
            frame.extend_from_slice(name.as_bytes());
            frame.push(b'S');
            frame.extend_from_slice(&(value.len() as u32).to_be_bytes());
            frame.extend_from_slice(value.as_bytes());
        }
        frame
    }

    #[test]
    fn the_version_is_that_of_rabbitmq() {
        for (product, version, expected) in [
            ("RabbitMQ", "3.9.29", Some(BrokerVersion(3, 9))),
            ("RabbitMQ", "3.10.8", Some(BrokerVersion::OLDEST)),
            (
                "RabbitMQ",
                "4.3.0-rc.1",
                Some(BrokerVersion::UNCOUNTED_NACK),
            ),
            ("RabbitMQ", "unknown", None),
            ("LavinMQ", "2.4.0", None),
        ] {
            let frame = start(product, version);
            assert_eq!(BrokerVersion::from_start(&frame), expected, "{version}");
            for end in 0..frame.len() {
                let _ = BrokerVersion::from_start(&frame[..end]);
            }
        }
        assert!(BrokerVersion(3, 9) < BrokerVersion::OLDEST);
        assert!(BrokerVersion(4, 10) > BrokerVersion::UNCOUNTED_NACK);
    }
}
