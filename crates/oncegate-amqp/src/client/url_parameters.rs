//! The query parameters of a URL.
//!
//! # Workaround
//! - *Symptom:* a parameter that the client does not have is ignored, such as `verify` or `cacertfile`
//!   of other clients. *Version:* amq-protocol-uri 10.6.3.
//! - *Upstream:* nothing: other clients do the same; rabbitmq/rabbitmq-dotnet-client#1991 (open)
//!   describes it.
//! - *Test:* `a_query_parameter_that_lapin_would_ignore_is_refused` in `node`.
//! - *May be removed* when amq-protocol-uri returns an error.

/// The parameters that lapin reads.
const SUPPORTED: [&str; 5] = [
    "heartbeat",
    "connection_timeout",
    "frame_max",
    "channel_max",
    "auth_mechanism",
];

/// Rejects a query with any other parameter.
///
/// # Errors
/// The problem and the remedy, without the text of the query.
pub(crate) fn check(query: &str) -> Result<(), String> {
    let mut names = query
        .split('&')
        .filter(|part| !part.is_empty())
        .map(|part| part.split('=').next().unwrap_or_default());
    if names.all(|name| SUPPORTED.contains(&name)) {
        return Ok(());
    }
    Err(format!(
        "it has an unsupported query parameter; the supported ones are {}",
        SUPPORTED.join(", ")
    ))
}
