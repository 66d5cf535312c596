//! A connection to the broker, and what its refusals mean.

use std::time::Duration;

use lapin::uri::AMQPScheme;
use lapin::{Connection, ConnectionProperties, ErrorKind};
use oncegate_core::source::SourceError;
use oncegate_core::store::BoxError;

use crate::handshake;
use crate::node::{Node, Nodes};
use crate::settings::Settings;
use crate::tls::Tls;

/// AMQP's reply codes that a person has to act on.
pub(crate) mod code {
    pub(crate) const ACCESS_REFUSED: u16 = 403;
    pub(crate) const NOT_FOUND: u16 = 404;
    pub(crate) const PRECONDITION_FAILED: u16 = 406;
    pub(crate) const NOT_ALLOWED: u16 = 530;
}

/// Why something did not work.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// A person has to change it.
    Wrong(SourceError),
    /// A person has to change it, and each time the broker is asked it writes an error into its
    /// log: the queue is another than the source was told.
    Mismatch(SourceError),
    /// It may work later.
    Passing(BoxError),
}

impl From<lapin::Error> for Trouble {
    fn from(error: lapin::Error) -> Self {
        Self::Passing(error.into())
    }
}

impl From<Trouble> for BoxError {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Wrong(error) | Trouble::Mismatch(error) => error.into(),
            Trouble::Passing(cause) => cause,
        }
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Wrong(error) | Self::Mismatch(error) => error.fmt(f),
            Self::Passing(cause) => cause.fmt(f),
        }
    }
}

/// The broker's reply code, if it was the broker that said no.
pub(crate) fn reply_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// Whether it is the broker's own trouble: the home node of a queue or a virtual host is down, or a
/// limit of connections is reached.
pub(crate) fn passes(error: &lapin::Error) -> bool {
    let ErrorKind::ProtocolError(error) = error.kind() else {
        return false;
    };
    ["' is down", "limit ("]
        .iter()
        .any(|text| error.get_message().as_str().contains(text))
}

/// Connects for the source.
pub(crate) async fn connect(settings: &Settings, purpose: &str) -> Result<Connection, Trouble> {
    settings
        .access
        .connect(&format!("oncegate {} ({purpose})", settings.name))
        .await
}

/// The nodes of the broker, and the files for TLS.
pub(crate) struct Access {
    pub(crate) nodes: Nodes,
    tls: Tls,
}

impl Access {
    /// Parses the URLs, and reads the files once, so that a wrong one is refused early.
    pub(crate) fn read(urls: &[String], tls: Tls) -> Result<Self, SourceError> {
        let nodes = Nodes::read(urls)?;
        if tls.is_asked_for() {
            if nodes.speak_plainly() {
                let problem = "amqp:// is plain text, and a certificate is named";
                return Err(SourceError::misconfigured(
                    "url",
                    problem,
                    "write amqps://, or name no certificate",
                ));
            }
            tls.connector()?;
        }
        Ok(Self { nodes, tls })
    }

    /// Connects to a node: the one whose turn it is, and while that cannot be reached, each of the
    /// others in turn.
    pub(crate) async fn connect(&self, name: &str) -> Result<Connection, Trouble> {
        let mut tried = 1;
        loop {
            let trouble = match self.connect_to(self.nodes.current(), name).await {
                Ok(connection) => return Ok(connection),
                Err(trouble) => trouble,
            };
            self.nodes.advance();
            match trouble {
                Trouble::Passing(problem) if tried < self.nodes.len() => {
                    tracing::debug!(connection = name, %problem, "the next node is tried");
                    tried += 1;
                }
                Trouble::Passing(problem) if tried > 1 => {
                    return Err(Trouble::Passing(
                        format!("none of {tried} nodes: {problem}").into(),
                    ));
                }
                trouble => return Err(trouble),
            }
        }
    }

    /// Connects, within the URL's `connection_timeout` for all of the handshake.
    async fn connect_to(&self, node: &Node, name: &str) -> Result<Connection, Trouble> {
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let patience = Duration::from_millis(node.uri.query.connection_timeout.unwrap_or(5_000));
        let tls = match node.uri.scheme {
            AMQPScheme::AMQP => None,
            AMQPScheme::AMQPS => Some(self.tls.connector().map_err(Trouble::Wrong)?),
        };
        match handshake::connect(node.uri.clone(), tls, properties, patience).await {
            Some(connected) => connected.map_err(|error| refusal(error, node)),
            None => Err(unreachable(
                &format!("no connection within {patience:?}"),
                node,
            )),
        }
    }
}

fn refusal(error: lapin::Error, node: &Node) -> Trouble {
    let wrong = |problem: String, remedy| {
        Trouble::Wrong(SourceError::misconfigured(
            "url",
            format!("{} ({problem})", node.shown),
            remedy,
        ))
    };
    match reply_code(&error) {
        Some(code::ACCESS_REFUSED) => wrong(
            error.to_string(),
            "check the user and the password; `guest` may only connect from the broker's own host",
        ),
        Some(code::NOT_ALLOWED) if !passes(&error) => wrong(
            error.to_string(),
            "check that the virtual host exists and that the user may use it; the default one is written /%2f at the end of the URL",
        ),
        Some(_) => error.into(),
        None => unreachable(&error.to_string(), node),
    }
}

/// No broker answers there yet. The error names the setting that may be wrong.
fn unreachable(problem: &str, node: &Node) -> Trouble {
    let (setting, remedy) = if [
        "CertificateRequired",
        "CertificateUnknown",
        "BadCertificate",
        "UnknownCA",
        "HandshakeFailure",
    ]
    .iter()
    .any(|alert| problem.contains(&format!("received fatal alert: {alert}")))
    {
        (
            "client_certificate",
            "the broker wants a client's certificate that it trusts: name one, and its key",
        )
    } else if problem.contains("certificate") && !problem.contains("InvalidContentType") {
        (
            "ca_certificate",
            "name the authority that signed the broker's certificate; the host in the URL has to be the one that the certificate names",
        )
    } else if node.uri.scheme == AMQPScheme::AMQPS {
        (
            "url",
            "is RabbitMQ running, are host and port right, and does that port speak TLS (usually 5671)? amqp:// is for one that does not. One that wants a client's certificate may hang up without it",
        )
    } else {
        (
            "url",
            "is RabbitMQ running, are host and port right, and does that port speak plain AMQP (usually 5672)? amqps:// is for one with TLS",
        )
    };
    Trouble::Passing(
        SourceError::misconfigured(
            setting,
            format!("{} cannot be reached ({problem})", node.shown),
            remedy,
        )
        .into(),
    )
}

/// Closes a connection, and lets go of it if the broker does not answer in time.
pub(crate) async fn close(connection: &Connection, patience: Duration) {
    let _ = tokio::time::timeout(patience, connection.close(200, "OK".into())).await;
}

#[cfg(test)]
mod tests {
    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};

    use super::*;
    use crate::RabbitMq;

    #[test]
    fn what_passes_is_waited_for_and_what_is_missing_is_not() {
        let node = Node::read("amqp://localhost").expect("a URL");
        let trouble = |kind: AMQPErrorKind, text: &str| {
            let error =
                lapin::Error::from(ErrorKind::ProtocolError(AMQPError::new(kind, text.into())));
            (passes(&error), refusal(error, &node))
        };
        let not_allowed = || AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED);
        let down = trouble(
            not_allowed(),
            "NOT_ALLOWED - access to vhost '/' refused for user 'guest': vhost '/' is down",
        );
        assert!(matches!(down, (true, Trouble::Passing(_))), "{down:?}");
        let full = trouble(
            not_allowed(),
            "NOT_ALLOWED - access to vhost '/' refused for user 'guest': connection limit (9) is reached",
        );
        assert!(matches!(full, (true, Trouble::Passing(_))), "{full:?}");
        let missing = trouble(not_allowed(), "NOT_ALLOWED - vhost elsewhere not found");
        assert!(matches!(missing, (false, Trouble::Wrong(_))), "{missing:?}");
        let soft = AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND);
        let down = "NOT_FOUND - home node 'rabbit@a' of durable queue 'orders' in vhost '/' is down or inaccessible";
        assert!(trouble(soft, down).0);
    }

    #[tokio::test]
    async fn a_broker_that_is_not_there_is_told_with_the_setting_and_what_to_do() {
        let plain = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let port = plain.local_addr().expect("an address").port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = plain.accept().await {
                // What RabbitMQ answers on its plain port to what is no AMQP.
                let _ =
                    tokio::io::AsyncWriteExt::write_all(&mut stream, b"AMQP\x00\x00\x09\x01").await;
            }
        });
        for (scheme, port, remedy) in [
            (
                "amqp",
                1,
                "is RabbitMQ running, are host and port right, and does that port speak plain AMQP",
            ),
            (
                "amqps",
                1,
                "is RabbitMQ running, are host and port right, and does that port speak TLS",
            ),
            (
                "amqps",
                port,
                "does that port speak TLS (usually 5671)? amqp:// is for one that does not",
            ),
        ] {
            let url = format!("{scheme}://someone:canary@127.0.0.1:{port}/%2f");
            let settings = RabbitMq::queue("orders")
                .url(url)
                .check()
                .expect("settings");
            let told = match connect(&settings, "consumes").await {
                Err(Trouble::Passing(told)) => told.to_string(),
                Err(other) => panic!("{other}"),
                Ok(_) => panic!("connected"),
            };
            assert!(
                told.starts_with(&format!(
                    "url: {scheme}://someone@127.0.0.1:{port}/%2f cannot be reached ("
                )),
                "{told}"
            );
            assert!(
                told.contains(remedy) && !told.contains("canary") && !told.contains('\n'),
                "{told}"
            );
        }
    }
}
