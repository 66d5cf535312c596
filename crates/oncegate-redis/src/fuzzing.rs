//! For the fuzz targets of this repository. Not part of the API: any release may change this
//! module.

use oncegate_core::marker::Marker;

use crate::record;

/// The marker that a value in Redis encodes; `None` if it is not a marker of this release.
pub fn decode_marker(value: &[u8]) -> Option<Marker> {
    record::decode(value).ok()
}

/// The value in Redis that encodes a marker; empty for an absent one.
pub fn encode_marker(marker: &Marker) -> String {
    record::encode(marker)
}
