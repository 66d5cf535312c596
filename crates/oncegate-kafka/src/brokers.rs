//! A list of brokers, as a user writes it.

use std::net::Ipv6Addr;

/// What librdkafka takes in front of a broker.
const PROTOCOLS: [&str; 4] = ["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"];

/// Refuses what can never be a list of brokers: librdkafka would look for it for ever.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check(brokers: &str) -> Result<(), String> {
    brokers
        .split(',')
        .try_for_each(|entry| check_one(entry.trim()))
}

fn check_one(entry: &str) -> Result<(), String> {
    if entry.is_empty() {
        return Err("an entry is empty: there is a comma too many".to_owned());
    }
    if entry.contains('@') {
        // Not repeated: a password may stand in it.
        return Err("an entry has an @ in it, and a broker's name has no user".to_owned());
    }
    let wrong = |what: &str| Err(format!("`{entry}` {what}"));
    let address = match entry.split_once("://") {
        Some((protocol, address))
            if PROTOCOLS.contains(&protocol.to_ascii_lowercase().as_str()) =>
        {
            address
        }
        Some((protocol, _)) => {
            return wrong(&format!(
                "begins with {protocol}://, which is no protocol of Kafka's"
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
            None => return wrong("has something other than a port behind its address"),
        },
        None if address.parse::<Ipv6Addr>().is_ok() => (address, None),
        None => address
            .split_once(':')
            .map_or((address, None), |(host, port)| (host, Some(port))),
    };
    if host.is_empty() {
        return wrong("has no host");
    }
    if host.contains(|letter: char| letter.is_whitespace() || "/\\?#[]".contains(letter)) {
        return wrong("has a host with a space or a sign in it that no host's name has");
    }
    match port {
        Some(port) if !matches!(port.parse::<u16>(), Ok(1..)) => {
            wrong("has no port between 1 and 65535")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_never_be_a_broker_is_told() {
        for (brokers, what) in [
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
            ("localhost/payments", "a space or a sign"),
            ("SSL://", "has no host"),
            ("someone:canary@host:9092", "an entry has an @"),
        ] {
            let told = check(brokers).expect_err(brokers);
            assert!(
                told.contains(what) && !told.contains("canary"),
                "{brokers}: {told}"
            );
        }
    }

    #[test]
    fn what_librdkafka_takes_is_taken() {
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
