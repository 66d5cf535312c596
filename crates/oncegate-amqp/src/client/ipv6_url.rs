//! Parses AMQP URLs, also those with an IPv6 address.
//!
//! # Workaround
//! - *Symptom:* the parser ignores an IPv6 address and returns the host `localhost`, so that the
//!   client connects to another broker. *Version:* amq-protocol-uri 10.6.3.
//! - *Upstream:* `docs/upstream/amq-protocol-uri-ipv6.md`.
//! - *Test:* `nodes::a_broker_is_reached_by_its_ipv6_address` in `tests/amqp`.
//! - *May be removed* when the parser returns the address.

use std::net::Ipv6Addr;

use lapin::uri::AMQPUri;

/// Parses the URL that consists of these parts. `path` includes the query.
///
/// # Errors
/// The problem, without the URL: it may contain a password.
pub(crate) fn parse(scheme: &str, authority: &str, path: &str) -> Result<AMQPUri, &'static str> {
    let (credentials, host) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    let literal = ipv6_literal(host)?;
    let authority = match literal {
        Some((_, port)) => format!("{credentials}literal{port}"),
        None => authority.to_owned(),
    };
    let mut uri: AMQPUri = format!("{scheme}://{authority}{path}")
        .parse()
        .map_err(|_| "it is not an AMQP URL")?;
    if let Some((address, _)) = literal {
        uri.authority.host = address.to_string();
    }
    Ok(uri)
}

/// An IPv6 address in brackets, and the text after it (empty, or a colon and the port); `None` for any
/// other host.
fn ipv6_literal(host: &str) -> Result<Option<(Ipv6Addr, &str)>, &'static str> {
    let Some(rest) = host.strip_prefix('[') else {
        return Ok(None);
    };
    let parsed = rest
        .split_once(']')
        .and_then(|(address, port): (_, &str)| Some((address.parse().ok()?, port)));
    let parsed = parsed.filter(|(_, port)| port.is_empty() || port.starts_with(':'));
    parsed
        .map(Some)
        .ok_or("the host in brackets is not an IPv6 address")
}
