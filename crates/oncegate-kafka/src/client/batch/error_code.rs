//! Reads the error codes of messages as numbers.
//!
//! # Workaround
//! - *Symptom:* an error code of the broker that the enum of the bindings lacks is undefined behavior.
//!   *Version:* rdkafka-sys 4.10.0.
//! - *Upstream:* fede1024/rust-rdkafka#127 (open).
//! - *Test:* `an_error_code_that_the_bindings_do_not_have_is_unknown`.
//! - *May be removed* when the bindings have integers instead of the enum.

use rdkafka::bindings as native;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::types::RDKafkaRespErr;

/// The error of a message; `None` if it has none.
///
/// # Safety
/// `message` points to a message of librdkafka that lives until the call returns.
pub(super) unsafe fn of(message: *const native::rd_kafka_message_t) -> Option<RDKafkaErrorCode> {
    // SAFETY: the caller's promise. An enum of the bindings has the size of an `i32`, and any number
    // is a valid `i32`.
    let code = unsafe { (&raw const (*message).err).cast::<i32>().read() };
    (code != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR as i32).then(|| with_number(code))
}

/// The error code with this number, or `Unknown` if the bindings do not have it.
fn with_number(code: i32) -> RDKafkaErrorCode {
    RDKafkaRespErr::try_from(code).map_or(RDKafkaErrorCode::Unknown, Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_code_that_the_bindings_do_not_have_is_unknown() {
        assert_eq!(with_number(-185), RDKafkaErrorCode::OperationTimedOut);
        assert_eq!(with_number(2), RDKafkaErrorCode::InvalidMessage);
        for code in [i32::MIN, -200_000, 9_999, i32::from(i16::MAX)] {
            assert_eq!(with_number(code), RDKafkaErrorCode::Unknown);
        }
    }
}
