//! One node of the broker: its URL, read, and shown without its password.

use std::net::Ipv6Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use lapin::uri::{AMQPScheme, AMQPUri};
use oncegate_core::source::SourceError;

/// Seconds between heartbeats, unless the URL says otherwise.
const HEARTBEAT: u16 = 10;
/// Milliseconds for the whole handshake, unless the URL says otherwise.
const CONNECTION_TIMEOUT: u64 = 5_000;
/// What may stand in the query. Anything else would be ignored by the client, say `verify` or
/// `cacertfile`.
const QUERY: [&str; 5] = [
    "heartbeat",
    "connection_timeout",
    "frame_max",
    "channel_max",
    "auth_mechanism",
];

/// Where one node answers.
pub(crate) struct Node {
    pub(crate) uri: AMQPUri,
    /// The URL without its password.
    pub(crate) shown: String,
}

/// The nodes of one broker, and which of them is tried next.
pub(crate) struct Nodes {
    /// Not empty.
    all: Vec<Node>,
    at: AtomicUsize,
}

impl Nodes {
    /// Reads the URLs. It begins with any of them, so that a fleet spreads over a cluster.
    pub(crate) fn read(urls: &[String]) -> Result<Self, SourceError> {
        let all = urls
            .iter()
            .map(|url| Node::read(url))
            .collect::<Result<Vec<_>, _>>()?;
        let Some(first) = all.first() else {
            return Err(refused("none is named"));
        };
        if all.iter().any(|node| node.uri.vhost != first.uri.vhost) {
            return Err(refused(
                "the nodes of one broker are named with different virtual hosts",
            ));
        }
        let at = AtomicUsize::new(fastrand::usize(..all.len()));
        Ok(Self { all, at })
    }

    /// The node whose turn it is.
    pub(crate) fn current(&self) -> &Node {
        &self.all[self.at.load(Ordering::Relaxed) % self.all.len()]
    }

    /// It is the next one's turn.
    pub(crate) fn advance(&self) {
        self.at.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether one of them would be spoken to in plain text.
    pub(crate) fn speak_plainly(&self) -> bool {
        self.all
            .iter()
            .any(|node| node.uri.scheme == AMQPScheme::AMQP)
    }
}

impl Node {
    /// Parses a URL. No error repeats it: a password may be in it.
    pub(crate) fn read(url: &str) -> Result<Self, SourceError> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(refused("it is not an AMQP URL"));
        };
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        // With one of these in a password the rest of it would be read as a host, and shown.
        if path.contains(['@', '#']) {
            return Err(refused(
                "a character in it has to be percent-encoded: / is %2f, @ is %40, # is %23, ? is %3f",
            ));
        }
        let (credentials, host) = authority
            .rsplit_once('@')
            .map_or((None, authority), |(before, host)| (Some(before), host));
        let address = literal(host)?;
        // The client's parser takes no such address, and would go to `localhost` without a word.
        let plain = match (&address, credentials) {
            (None, _) => url.to_owned(),
            (Some((_, port)), None) => format!("{scheme}://literal{port}{path}"),
            (Some((_, port)), Some(credentials)) => {
                format!("{scheme}://{credentials}@literal{port}{path}")
            }
        };
        let mut uri: AMQPUri = plain
            .parse()
            .map_err(|_| refused("it is not an AMQP URL"))?;
        if let Some((address, _)) = &address {
            uri.authority.host = address.to_string();
        }
        if uri.authority.host.is_empty() {
            return Err(refused("it names no host"));
        }
        let query = path.split_once('?').map_or("", |(_, query)| query);
        let names = query
            .split('&')
            .filter(|part| !part.is_empty())
            .map(|part| part.split('=').next().unwrap_or_default());
        if names.into_iter().any(|name| !QUERY.contains(&name)) {
            let text = "it has a query that means nothing here: heartbeat, connection_timeout, frame_max, channel_max and auth_mechanism do";
            return Err(refused(text));
        }
        uri.query.heartbeat.get_or_insert(HEARTBEAT);
        uri.query
            .connection_timeout
            .get_or_insert(CONNECTION_TIMEOUT);
        let shown = shown(&uri);
        Ok(Self { uri, shown })
    }
}

/// An IPv6 address in brackets, and the port behind it with its colon; `None` if the host is none.
fn literal(host: &str) -> Result<Option<(Ipv6Addr, &str)>, SourceError> {
    let Some(rest) = host.strip_prefix('[') else {
        return Ok(None);
    };
    let parsed = rest
        .split_once(']')
        .and_then(|(address, port): (_, &str)| Some((address.parse().ok()?, port)));
    let parsed = parsed.filter(|(_, port)| port.is_empty() || port.starts_with(':'));
    parsed
        .map(Some)
        .ok_or_else(|| refused("what stands in brackets is not an IPv6 address"))
}

fn shown(uri: &AMQPUri) -> String {
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
        encoded(&authority.userinfo.username),
        authority.port,
        encoded(&uri.vhost)
    )
}

/// Percent-encodes what has a meaning in a URL, and what would break a line of a log.
fn encoded(text: &str) -> String {
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

fn refused(problem: &str) -> SourceError {
    SourceError::misconfigured(
        "url",
        problem,
        "write amqp://user:password@host:port/vhost, with / as %2f and the password percent-encoded",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Node {
        Node::read(url).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    #[test]
    fn odd_characters_arrive_as_they_are_meant() {
        let node = read(
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
            node.shown,
            "amqps://us%40er@rabbit.example:5671/pay%2fments%20é"
        );
        assert_eq!(
            read("amqp://h/a%0ab").shown,
            "amqp://guest@h:5672/a%0ab",
            "a line stays a line"
        );
        assert_eq!(
            read("amqp://localhost").shown,
            "amqp://guest@localhost:5672/%2f"
        );
    }

    #[test]
    fn an_ipv6_address_stands_in_brackets() {
        for (url, host, port, shown) in [
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
            let node = read(url);
            assert_eq!(
                (
                    node.uri.authority.host.as_str(),
                    node.uri.authority.port,
                    node.shown.as_str()
                ),
                (host, port, shown)
            );
        }
        for url in [
            "amqp://[::1",
            "amqp://[localhost]:5672",
            "amqp://[fe80::1%25eth0]/",
            "amqp://[::1]x/",
            "amqp://[::1]:port/",
        ] {
            assert!(Node::read(url).is_err(), "{url}");
        }
    }

    #[test]
    fn a_password_that_was_not_encoded_is_refused_and_not_shown() {
        // The digits would be the port of a host with the user's name.
        for url in [
            "amqp://user:12/canary@host/v",
            "amqp://user:12#canary@host/v",
            "amqp://user:12?canary@host/v",
            "amqp://u:canary",
        ] {
            let error = Node::read(url).err().unwrap_or_else(|| panic!("{url}"));
            assert!(
                !format!("{error} {error:?}").contains("canary")
                    && !error.to_string().contains("12"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_query_that_the_client_would_ignore_is_refused() {
        for query in [
            "verify=verify_none",
            "cacertfile=/ca.pem",
            "hearbeat=5",
            "heartbeat=10&x=1",
        ] {
            assert!(
                Node::read(&format!("amqps://h/v?{query}")).is_err(),
                "{query}"
            );
        }
        assert!(Node::read("amqps://h/v?auth_mechanism=external&heartbeat=5").is_ok());
        assert!(Node::read("amqps://h/v?auth_mechanism=guessing").is_err());
    }

    #[test]
    fn the_nodes_of_one_broker_take_turns() {
        let urls = ["amqp://a/v", "amqp://b/v", "amqp://c/v"].map(String::from);
        let nodes = Nodes::read(&urls).expect("nodes");
        let mut seen: Vec<String> = Vec::new();
        for _ in 0..6 {
            seen.push(nodes.current().uri.authority.host.clone());
            nodes.advance();
        }
        assert_eq!(seen[..3], seen[3..]);
        seen.sort();
        assert_eq!(seen, ["a", "a", "b", "b", "c", "c"]);
        assert!(Nodes::read(&[]).is_err());
        assert!(Nodes::read(&["amqp://a/v".to_owned(), "amqp://b/w".to_owned()]).is_err());
    }
}
