//! Reads replies of the server.

use std::time::Duration;

use oncegate_core::marker::{self, Age, Attempts, Marker, Operation, Verdict};
use redis::Value;

use crate::batch::VerdictResult;
use crate::failure::StoreFailure;
use crate::record::{self, DecodeError};
use crate::router::CommandTarget;

/// Reads the reply to a claim's `SET … NX GET`; `None` if the script must decide: a marker exists,
/// and the claim may be granted over it, or its age or holder matters.
pub(crate) fn claim(reply: Value, operation: &Operation) -> Option<VerdictResult> {
    match reply {
        Value::Nil => Some(Ok(Verdict::Granted(Attempts::new(1)))),
        Value::BulkString(record) => match record::decode(&record) {
            Ok(marker @ (Marker::Done(_) | Marker::Rejected { .. })) => {
                Some(Ok(marker::apply(marker, Age::Unknown, operation).1))
            }
            Ok(_) => None,
            Err(why) => Some(Err(crate::failure::unreadable(why))),
        },
        other => Some(Err(unexpected(&other))),
    }
}

/// Reads an answer of `apply.lua` other than `error …`.
pub(crate) fn verdict(value: &Value) -> VerdictResult {
    let Value::BulkString(text) = value else {
        return Err(unexpected(value));
    };
    let text = String::from_utf8_lossy(text);
    let (word, arguments) = text.split_once(' ').unwrap_or((&text, ""));
    let attempts = || {
        let mut counts = arguments.split(' ').map(str::parse);
        match (counts.next(), counts.next(), counts.next(), counts.next()) {
            (Some(Ok(number)), Some(Ok(base)), Some(Ok(crashes)), None) => Ok(Attempts {
                number,
                base,
                crashes,
            }),
            _ => Err(unexpected(value)),
        }
    };
    Ok(match (word, arguments) {
        ("granted", _) => Verdict::Granted(attempts()?),
        ("in-doubt", _) => Verdict::InDoubt(attempts()?),
        ("busy", _) => Verdict::Busy {
            remaining: arguments
                .parse()
                .map(Duration::from_millis)
                .map_err(|_| unexpected(value))?,
        },
        ("duplicate", "") => Verdict::Duplicate,
        ("rejected", _) => Verdict::Rejected {
            attempt: arguments.parse().map_err(|_| unexpected(value))?,
        },
        ("conflict", "") => Verdict::Conflict,
        ("kept", "") => Verdict::Applied,
        ("done", "") => Verdict::Done { marker_lost: false },
        ("done", "lost") => Verdict::Done { marker_lost: true },
        ("lost", "") => Verdict::Lost,
        ("version", _) => {
            let version = record::read_version(arguments);
            return Err(crate::failure::unreadable(DecodeError::UnknownVersion(
                version,
            )));
        }
        ("unreadable", "") => return Err(crate::failure::unreadable(DecodeError::NotAMarker)),
        _ => return Err(unexpected(value)),
    })
}

/// Reads an answer of `apply.lua`, which may be `error …`.
pub(crate) fn answer(value: &Value) -> VerdictResult {
    match value {
        Value::BulkString(text) if text.starts_with(b"error ") => {
            let text = String::from_utf8_lossy(&text[b"error ".len()..]);
            let (code, detail) = text.split_once(' ').unwrap_or((&text, ""));
            Err(crate::failure::from_server_error(code, detail))
        }
        value => verdict(value),
    }
}

/// The failure for a reply of a type that the command never returns.
pub(crate) fn wrong_type(command: &str) -> StoreFailure {
    StoreFailure::unknown(format!("unexpected type of reply from Redis to {command}"))
}

/// The reply, or its failure if it is an error or missing.
pub(crate) fn success(reply: Option<Value>) -> Result<Value, StoreFailure> {
    match reply {
        Some(Value::ServerError(error)) => Err(crate::failure::of_reply(&error)),
        Some(reply) => Ok(reply),
        None => Err(StoreFailure::unknown("no reply from Redis")),
    }
}

/// The failure for a reply that has no meaning here; its text has the first 120 characters.
pub(crate) fn unexpected(reply: &Value) -> StoreFailure {
    let shown: String = format!("{reply:?}").chars().take(120).collect();
    StoreFailure::unknown(format!("unexpected reply from Redis: {shown}"))
}

/// The target of a redirection: `MOVED <slot> <host:port>` or `ASK <slot> <host:port>`.
pub(crate) fn redirection(code: &str, detail: &str) -> Option<CommandTarget> {
    let address = detail
        .split(' ')
        .nth(1)
        .filter(|address| !address.starts_with(':'))?;
    match code {
        "MOVED" => Some(CommandTarget::Moved(address.into())),
        "ASK" => Some(CommandTarget::Ask(address.into())),
        _ => None,
    }
}
