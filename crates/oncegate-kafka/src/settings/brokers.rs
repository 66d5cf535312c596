//! Checks the list of brokers in [`Kafka::brokers`](super::Kafka::brokers).

use std::net::Ipv6Addr;

/// The protocols that librdkafka accepts in front of a broker's address.
const PROTOCOLS: [&str; 4] = ["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"];

/// Rejects an invalid list of brokers, to which librdkafka would try to connect forever.
///
/// # Errors
/// The problem, as text without a password.
pub(crate) fn check(brokers: &str) -> Result<(), String> {
    brokers
        .split(',')
        .try_for_each(|entry| check_one(entry.trim()))
}

fn check_one(entry: &str) -> Result<(), String> {
    if entry.is_empty() {
        return Err("an entry is empty; remove the extra comma".to_owned());
    }
    if entry.contains('@') {
        // The error does not contain the entry, which may contain a password.
        return Err(
            "an entry contains an @; a broker's address has no user: use .login(…)".to_owned(),
        );
    }
    let invalid = |what: &str| Err(format!("`{entry}` {what}"));
    let address = match entry.split_once("://") {
        Some((protocol, address))
            if PROTOCOLS.contains(&protocol.to_ascii_lowercase().as_str()) =>
        {
            address
        }
        Some((protocol, _)) => {
            return invalid(&format!(
                "begins with {protocol}://, which is not a Kafka protocol"
            ));
        }
        None => entry,
    };
    let (host, port) = match address
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'))
    {
        Some((host, "")) => (host, None),
        Some((host, rest)) => match rest.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None => return invalid("has something other than a port after its address"),
        },
        None if address.parse::<Ipv6Addr>().is_ok() => (address, None),
        None => address
            .split_once(':')
            .map_or((address, None), |(host, port)| (host, Some(port))),
    };
    if host.is_empty() {
        return invalid("has no host");
    }
    if host.contains(|it: char| it.is_whitespace() || "/\\?#[]".contains(it)) {
        return invalid("has a host with a space or a character that no host name has");
    }
    match port {
        Some(port) if !matches!(port.parse::<u16>(), Ok(1..)) => {
            invalid("has no port between 1 and 65535")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_broker_lists_are_rejected() {
        for (brokers, problem) in [
            ("http://x y", "begins with http://"),
            ("localhost:99999", "has no port between"),
            ("localhost:0", "has no port between"),
            ("localhost:", "has no port between"),
            ("localhost:kafka", "has no port between"),
            ("a:1:2", "has no port between"),
            ("[::1]:0", "has no port between"),
            ("[::1]9092", "something other than a port"),
            ("a:9092,,b:9092", "an entry is empty"),
            ("a:9092,", "an entry is empty"),
            (":9092", "has no host"),
            ("a b:9092", "a space"),
            ("localhost/payments", "a space or a character"),
            ("SSL://", "has no host"),
            ("someone:canary@host:9092", "an entry contains an @"),
        ] {
            let error = check(brokers).expect_err(brokers);
            assert!(
                error.contains(problem) && !error.contains("canary"),
                "{brokers}: {error}"
            );
        }
    }

    #[test]
    fn valid_broker_lists_are_accepted() {
        for brokers in [
            "b",
            "localhost:9092",
            " a:9092 , b.example.com:19092",
            "127.0.0.1:1",
            "[::1]:9092",
            "::1",
            "SASL_SSL://a:9093,plaintext://b",
        ] {
            assert_eq!(check(brokers), Ok(()), "{brokers}");
        }
    }
}
