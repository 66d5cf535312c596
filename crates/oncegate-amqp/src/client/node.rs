//! The nodes of the broker: their parsed URLs, and the URLs without passwords for logs.

use std::sync::atomic::{AtomicUsize, Ordering};

use lapin::uri::{AMQPScheme, AMQPUri};
use oncegate_core::source::SourceError;

use crate::client::{ipv6_url, url_parameters};

/// The heartbeat interval in seconds, unless the URL has one.
const HEARTBEAT: u16 = 10;
/// The timeout of the whole handshake in milliseconds, unless the URL has one.
pub(crate) const CONNECTION_TIMEOUT: u64 = 5_000;

/// One node of a broker.
pub(crate) struct BrokerNode {
    pub(crate) uri: AMQPUri,
    /// The URL without the password.
    pub(crate) redacted_url: String,
}

/// The nodes of one broker, and which of them is current.
pub(crate) struct BrokerNodes {
    /// All nodes; never empty.
    all: Vec<BrokerNode>,
    /// The index of the current node, modulo the number of nodes.
    current: AtomicUsize,
}

impl BrokerNodes {
    /// Parses the URLs. The current node is random at first, so that the connections of many consumers
    /// spread over the cluster.
    pub(crate) fn parse(urls: &[String]) -> Result<Self, SourceError> {
        let all = urls
            .iter()
            .map(|url| BrokerNode::parse(url))
            .collect::<Result<Vec<_>, _>>()?;
        let Some(first) = all.first() else {
            return Err(url_error("no URL is configured"));
        };
        if all.iter().any(|node| node.uri.vhost != first.uri.vhost) {
            return Err(url_error(
                "the URLs of one broker have different virtual hosts",
            ));
        }
        let current = AtomicUsize::new(fastrand::usize(..all.len()));
        Ok(Self { all, current })
    }

    /// The node to connect to.
    pub(crate) fn current(&self) -> &BrokerNode {
        &self.all[self.current.load(Ordering::Relaxed) % self.all.len()]
    }

    /// Makes the next node the current one.
    pub(crate) fn advance(&self) {
        self.current.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether one of the URLs is without TLS (`amqp://`).
    pub(crate) fn any_plain_text(&self) -> bool {
        self.all
            .iter()
            .any(|node| node.uri.scheme == AMQPScheme::AMQP)
    }
}

impl BrokerNode {
    /// Parses a URL. No error contains it, since it may contain a password.
    pub(crate) fn parse(url: &str) -> Result<Self, SourceError> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(url_error("it is not an AMQP URL"));
        };
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        // If the password has one of these characters, the authority ends there: the user's name
        // would be parsed as the host, and parts of the password as the port and the virtual host,
        // which are logged.
        if path.contains(['@', '#']) {
            return Err(url_error(
                "it contains a character that must be percent-encoded: / as %2f, @ as %40, # as %23, ? as %3f",
            ));
        }
        let mut uri = ipv6_url::parse(scheme, authority, path).map_err(url_error)?;
        if uri.authority.host.is_empty() {
            return Err(url_error("it has no host"));
        }
        let query = path.split_once('?').map_or("", |(_, query)| query);
        url_parameters::check(query).map_err(|problem| url_error(&problem))?;
        uri.query.heartbeat.get_or_insert(HEARTBEAT);
        uri.query
            .connection_timeout
            .get_or_insert(CONNECTION_TIMEOUT);
        let redacted_url = redacted_url(&uri);
        Ok(Self { uri, redacted_url })
    }
}

fn redacted_url(uri: &AMQPUri) -> String {
    let scheme = match uri.scheme {
        AMQPScheme::AMQP => "amqp",
        AMQPScheme::AMQPS => "amqps",
    };
    let authority = &uri.authority;
    let host = if authority.host.contains(':') {
        format!("[{}]", authority.host)
    } else {
        authority.host.clone()
    };
    format!(
        "{scheme}://{}@{host}:{}/{}",
        percent_encode(&authority.userinfo.username),
        authority.port,
        percent_encode(&uri.vhost)
    )
}

/// Percent-encodes all but letters, digits and ``-._~!$&'()*+,;=``, so that the text can be a part
/// of a URL and breaks no log line.
fn percent_encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_alphanumeric() || "-._~!$&'()*+,;=".contains(character) {
            encoded.push(character);
        } else {
            let mut buffer = [0; 4];
            character
                .encode_utf8(&mut buffer)
                .bytes()
                .for_each(|byte| encoded.push_str(&format!("%{byte:02x}")));
        }
    }
    encoded
}

fn url_error(problem: &str) -> SourceError {
    SourceError::misconfigured(
        "url",
        problem,
        "write amqp://user:password@host:port/vhost, with / as %2f and the password percent-encoded",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> BrokerNode {
        BrokerNode::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    #[test]
    fn percent_encoded_characters_are_decoded() {
        let node = parse(
            "amqps://us%40er:p%2f%40%3a%23%3f%25%5b%5d@rabbit.example:5671/pay%2fments%20%c3%a9?heartbeat=3",
        );
        let authority = &node.uri.authority;
        assert_eq!(
            (
                authority.userinfo.username.as_str(),
                authority.userinfo.password.as_str()
            ),
            ("us@er", "p/@:#?%[]")
        );
        assert_eq!(
            (
                authority.host.as_str(),
                authority.port,
                node.uri.vhost.as_str()
            ),
            ("rabbit.example", 5671, "pay/ments é")
        );
        assert_eq!(
            (node.uri.query.heartbeat, node.uri.query.connection_timeout),
            (Some(3), Some(5_000))
        );
        assert_eq!(
            node.redacted_url,
            "amqps://us%40er@rabbit.example:5671/pay%2fments%20é"
        );
        assert_eq!(
            parse("amqp://h/a%0ab").redacted_url,
            "amqp://guest@h:5672/a%0ab",
            "a line break stays encoded"
        );
        assert_eq!(
            parse("amqp://localhost").redacted_url,
            "amqp://guest@localhost:5672/%2f"
        );
    }

    #[test]
    fn an_ipv6_address_is_written_in_brackets() {
        for (url, host, port, redacted_url) in [
            (
                "amqp://u:secret@[::1]:5673/%2f",
                "::1",
                5673,
                "amqp://u@[::1]:5673/%2f",
            ),
            (
                "amqps://[2001:db8::7]/v",
                "2001:db8::7",
                5671,
                "amqps://guest@[2001:db8::7]:5671/v",
            ),
        ] {
            let node = parse(url);
            assert_eq!(
                (
                    node.uri.authority.host.as_str(),
                    node.uri.authority.port,
                    node.redacted_url.as_str()
                ),
                (host, port, redacted_url)
            );
        }
        for url in [
            "amqp://[::1",
            "amqp://[localhost]:5672",
            "amqp://[fe80::1%25eth0]/",
            "amqp://[::1]x/",
            "amqp://[::1]:port/",
        ] {
            assert!(BrokerNode::parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn an_unencoded_password_is_an_error_that_does_not_contain_it() {
        // The digits would be parsed as the port of a host with the user's name.
        for url in [
            "amqp://user:12/canary@host/v",
            "amqp://user:12#canary@host/v",
            "amqp://user:12?canary@host/v",
            "amqp://u:canary",
        ] {
            let error = BrokerNode::parse(url)
                .err()
                .unwrap_or_else(|| panic!("{url}"));
            assert!(
                !format!("{error} {error:?}").contains("canary")
                    && !error.to_string().contains("12"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_query_parameter_that_lapin_would_ignore_is_refused() {
        for query in [
            "verify=verify_none",
            "cacertfile=/ca.pem",
            "hearbeat=5",
            "heartbeat=10&x=1",
        ] {
            assert!(
                BrokerNode::parse(&format!("amqps://h/v?{query}")).is_err(),
                "{query}"
            );
        }
        assert!(BrokerNode::parse("amqps://h/v?auth_mechanism=external&heartbeat=5").is_ok());
        assert!(BrokerNode::parse("amqps://h/v?auth_mechanism=guessing").is_err());
    }

    #[test]
    fn advance_visits_every_node() {
        let urls = ["amqp://a/v", "amqp://b/v", "amqp://c/v"].map(String::from);
        let nodes = BrokerNodes::parse(&urls).expect("nodes");
        let mut visited: Vec<String> = Vec::new();
        for _ in 0..6 {
            visited.push(nodes.current().uri.authority.host.clone());
            nodes.advance();
        }
        assert_eq!(visited[..3], visited[3..]);
        visited.sort();
        assert_eq!(visited, ["a", "a", "b", "b", "c", "c"]);
        assert!(BrokerNodes::parse(&[]).is_err());
        assert!(BrokerNodes::parse(&["amqp://a/v".to_owned(), "amqp://b/w".to_owned()]).is_err());
    }
}
