//! For the fuzz targets of this repository. No part of the API: any release may
//! change it.

use oncegate_core::marker::Marker;

use crate::record;

/// The marker of a value in Redis, if it is one.
pub fn decode_marker(value: &[u8]) -> Option<Marker> {
    record::decode(value).ok()
}

/// The value of a marker.
pub fn encode_marker(marker: &Marker) -> String {
    record::encode(marker)
}
