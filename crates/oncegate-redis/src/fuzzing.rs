//! For the fuzz targets and measurements of this repository. No part of the API: any release may
//! change it.

use oncegate_core::marker::Marker;

use crate::record;
use crate::store::Redis;

/// The marker of a value in Redis, if it is one.
pub fn decode_marker(value: &[u8]) -> Option<Marker> {
    record::decode(value).ok()
}

/// The value of a marker.
pub fn encode_marker(marker: &Marker) -> String {
    record::encode(marker)
}

/// The store, with the script also where the server has commands that compare values.
pub fn script_only(mut store: Redis) -> Redis {
    store.script_only = true;
    store
}
