//! What one reply of the server means.

use std::time::Duration;

use oncegate_core::marker::{self, Age, Attempts, Marker, Operation, Verdict};
use redis::Value;

use crate::batch::Answer;
use crate::failure::Failure;
use crate::record::{self, Unreadable};
use crate::route::At;

/// What a claim's fast path tells; `None` where the holder's age matters, or the holder is the
/// asker.
pub(crate) fn claim(reply: Value, operation: &Operation) -> Option<Answer> {
    match reply {
        Value::Nil => Some(Ok(Verdict::Granted(Attempts::new(1)))),
        Value::BulkString(record) => match record::decode(&record) {
            Ok(marker @ (Marker::Done(_) | Marker::Rejected { .. })) => {
                Some(Ok(marker::apply(marker, Age::Unknown, operation).1))
            }
            Ok(_) => None,
            Err(why) => Some(Err(Failure::unreadable(why))),
        },
        other => Some(Err(unexpected(&other))),
    }
}

/// Reads a text of `apply.lua` that is no error of a command in it.
pub(crate) fn verdict(value: &Value) -> Answer {
    let Value::BulkString(text) = value else {
        return Err(unexpected(value));
    };
    let text = String::from_utf8_lossy(text);
    let (word, rest) = text.split_once(' ').unwrap_or((&text, ""));
    let attempts = || {
        let mut counts = rest.split(' ').map(str::parse);
        match (counts.next(), counts.next(), counts.next(), counts.next()) {
            (Some(Ok(number)), Some(Ok(base)), Some(Ok(crashes)), None) => Ok(Attempts {
                number,
                base,
                crashes,
            }),
            _ => Err(unexpected(value)),
        }
    };
    Ok(match (word, rest) {
        ("granted", _) => Verdict::Granted(attempts()?),
        ("in-doubt", _) => Verdict::InDoubt(attempts()?),
        ("busy", _) => Verdict::Busy {
            remaining: rest
                .parse()
                .map(Duration::from_millis)
                .map_err(|_| unexpected(value))?,
        },
        ("duplicate", "") => Verdict::Duplicate,
        ("rejected", _) => Verdict::Rejected {
            attempt: rest.parse().map_err(|_| unexpected(value))?,
        },
        ("conflict", "") => Verdict::Conflict,
        ("kept", "") => Verdict::Kept,
        ("done", "") => Verdict::Done { marker_lost: false },
        ("done", "lost") => Verdict::Done { marker_lost: true },
        ("lost", "") => Verdict::Lost,
        ("unknown", "version") => return Err(Failure::unreadable(Unreadable::UnknownVersion)),
        ("unreadable", "") => return Err(Failure::unreadable(Unreadable::NotAMarker)),
        _ => return Err(unexpected(value)),
    })
}

pub(crate) fn unexpected(reply: &Value) -> Failure {
    let shown: String = format!("{reply:?}").chars().take(120).collect();
    Failure::unknown(format!("Redis gave an answer of the wrong kind: {shown}"))
}

/// Who serves the key, where a node says that it is not the one: `MOVED <slot> <host:port>`, `ASK
/// <slot> <host:port>`.
pub(crate) fn named_elsewhere(code: &str, detail: &str) -> Option<At> {
    let address = detail
        .split(' ')
        .nth(1)
        .filter(|address| !address.starts_with(':'))?;
    match code {
        "MOVED" => Some(At::Node(address.into())),
        "ASK" => Some(At::Asking(address.into())),
        _ => None,
    }
}
