//! Connections to the broker, and the classification of its errors.

use std::time::Duration;

use lapin::uri::AMQPScheme;
use lapin::{Connection, ConnectionProperties, ErrorKind};
use oncegate_core::source::SourceError;
use oncegate_core::store::BoxError;

use crate::client::context::SourceContext;
use crate::client::handshake;
use crate::client::node::{BrokerNode, BrokerNodes, CONNECTION_TIMEOUT};
use crate::client::tls::TlsFiles;
use crate::protocol::broker_version::BrokerVersion;

/// Reply codes of the broker for errors that an operator has to correct.
pub(crate) mod code {
    pub(crate) const ACCESS_REFUSED: u16 = 403;
    pub(crate) const NOT_FOUND: u16 = 404;
    pub(crate) const PRECONDITION_FAILED: u16 = 406;
    pub(crate) const NOT_ALLOWED: u16 = 530;
}

/// Why a connection or a consuming channel could not be opened.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// An operator has to correct the settings or the broker.
    Misconfigured(SourceError),
    /// The queue has other arguments or another type than the settings require. An operator has to
    /// correct one of them. The broker logs an error at each attempt, so attempts are rare.
    QueueMismatch(SourceError),
    /// A later attempt may succeed.
    Transient(BoxError),
}

impl From<lapin::Error> for ConnectError {
    fn from(error: lapin::Error) -> Self {
        Self::Transient(error.into())
    }
}

impl From<ConnectError> for BoxError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Misconfigured(error) | ConnectError::QueueMismatch(error) => error.into(),
            ConnectError::Transient(cause) => cause,
        }
    }
}

impl std::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Misconfigured(error) | Self::QueueMismatch(error) => error.fmt(f),
            Self::Transient(cause) => cause.fmt(f),
        }
    }
}

/// The reply code, if the error came from the broker.
pub(crate) fn reply_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// Whether the broker refuses for a transient reason: the node of a queue or a virtual host is down,
/// or a connection limit is reached. Only the text shows this, not the reply code.
pub(crate) fn is_transient_refusal(error: &lapin::Error) -> bool {
    let ErrorKind::ProtocolError(error) = error.kind() else {
        return false;
    };
    ["' is down", "limit ("]
        .iter()
        .any(|text| error.get_message().as_str().contains(text))
}

/// Connects with the source's settings. The purpose becomes part of the connection's name, which the
/// management interface shows. Returns the version of the broker, too, if that is RabbitMQ.
pub(crate) async fn connect(
    context: &SourceContext,
    purpose: &str,
) -> Result<(Connection, Option<BrokerVersion>), ConnectError> {
    context
        .connector
        .connect(&format!("oncegate {} ({purpose})", context.name))
        .await
}

/// Connects to the nodes of a broker, with their URLs and TLS files.
pub(crate) struct BrokerConnector {
    pub(crate) nodes: BrokerNodes,
    tls: TlsFiles,
}

impl BrokerConnector {
    /// Parses the URLs, and reads the TLS files, so that an invalid one is an error at start.
    ///
    /// # Errors
    /// An invalid URL or TLS file, or TLS files with an `amqp://` URL.
    pub(crate) fn new(urls: &[String], tls: TlsFiles) -> Result<Self, SourceError> {
        let nodes = BrokerNodes::parse(urls)?;
        if tls.is_configured() {
            if nodes.any_plain_text() {
                let problem = "a certificate is configured, but amqp:// is not encrypted";
                return Err(SourceError::misconfigured(
                    "url",
                    problem,
                    "use amqps://, or configure no certificate",
                ));
            }
            tls.connector()?;
        }
        Ok(Self { nodes, tls })
    }

    /// Connects to the current node; if it cannot be reached, tries each of the others once. Returns
    /// the version of the broker, too, if that is RabbitMQ.
    pub(crate) async fn connect(
        &self,
        name: &str,
    ) -> Result<(Connection, Option<BrokerVersion>), ConnectError> {
        let mut tried = 1;
        loop {
            let error = match self.connect_to(self.nodes.current(), name).await {
                Ok(connected) => return Ok(connected),
                Err(error) => error,
            };
            self.nodes.advance();
            match error {
                ConnectError::Transient(problem) if tried < self.nodes.len() => {
                    tracing::debug!(connection = name, error = %problem, "cannot connect to this node; trying the next one");
                    tried += 1;
                }
                ConnectError::Transient(problem) if tried > 1 => {
                    return Err(ConnectError::Transient(
                        format!("none of {tried} nodes can be reached; the last error: {problem}")
                            .into(),
                    ));
                }
                error => return Err(error),
            }
        }
    }

    /// Connects within the URL's `connection_timeout`, which covers the whole handshake.
    async fn connect_to(
        &self,
        node: &BrokerNode,
        name: &str,
    ) -> Result<(Connection, Option<BrokerVersion>), ConnectError> {
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let timeout = node.uri.query.connection_timeout;
        let timeout = Duration::from_millis(timeout.unwrap_or(CONNECTION_TIMEOUT));
        let tls = match node.uri.scheme {
            AMQPScheme::AMQP => None,
            AMQPScheme::AMQPS => Some(self.tls.connector().map_err(ConnectError::Misconfigured)?),
        };
        match handshake::connect(node.uri.clone(), tls, properties, timeout).await {
            Some(Ok((connection, Some(version)))) if version < BrokerVersion::OLDEST => {
                close(&connection, timeout).await;
                Err(too_old(version, node))
            }
            Some(connected) => connected.map_err(|error| classify(error, node)),
            None => Err(unreachable_error(
                &format!("no connection within {timeout:?}"),
                node,
            )),
        }
    }
}

fn classify(error: lapin::Error, node: &BrokerNode) -> ConnectError {
    let misconfigured = |problem: String, remedy| {
        ConnectError::Misconfigured(SourceError::misconfigured(
            "url",
            format!("{} ({problem})", node.redacted_url),
            remedy,
        ))
    };
    match reply_code(&error) {
        Some(code::ACCESS_REFUSED) => misconfigured(
            error.to_string(),
            "check the user and the password; by default `guest` may connect from localhost only",
        ),
        Some(code::NOT_ALLOWED) if !is_transient_refusal(&error) => misconfigured(
            error.to_string(),
            "check that the virtual host exists and that the user has access to it; the default virtual host is /%2f at the end of the URL",
        ),
        Some(_) => error.into(),
        None => unreachable_error(&error.to_string(), node),
    }
}

/// The error of a node with an unsupported release.
fn too_old(version: BrokerVersion, node: &BrokerNode) -> ConnectError {
    ConnectError::Misconfigured(SourceError::misconfigured(
        "url",
        format!(
            "{} is RabbitMQ {version}, which is not supported",
            node.redacted_url
        ),
        "upgrade RabbitMQ to a supported release (3.10 or newer)",
    ))
}

/// The error of a node that cannot be reached. It names the setting that is the likely cause.
fn unreachable_error(problem: &str, node: &BrokerNode) -> ConnectError {
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
            "the broker requires a client certificate that it trusts: configure one, with its key",
        )
    } else if problem.contains("certificate") && !problem.contains("InvalidContentType") {
        (
            "ca_certificate",
            "configure the CA that signed the broker's certificate, and check that the certificate names the host of the URL",
        )
    } else if node.uri.scheme == AMQPScheme::AMQPS {
        (
            "url",
            "check that RabbitMQ is running, that host and port are correct, and that the port accepts TLS (usually 5671; amqp:// is for a port without TLS); a broker that requires a client certificate may close the connection without one",
        )
    } else {
        (
            "url",
            "check that RabbitMQ is running, that host and port are correct, and that the port accepts AMQP without TLS (usually 5672; amqps:// is for a port with TLS)",
        )
    };
    ConnectError::Transient(
        SourceError::misconfigured(
            setting,
            format!("{} cannot be reached ({problem})", node.redacted_url),
            remedy,
        )
        .into(),
    )
}

/// Closes a connection; returns after the timeout at the latest.
pub(crate) async fn close(connection: &Connection, timeout: Duration) {
    let _ = tokio::time::timeout(timeout, connection.close(200, "OK".into())).await;
}

#[cfg(test)]
mod tests {
    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};

    use super::*;
    use crate::RabbitMq;

    #[test]
    fn a_node_that_is_down_is_transient_and_a_missing_vhost_is_not() {
        let node = BrokerNode::parse("amqp://localhost").expect("a URL");
        let classified = |kind: AMQPErrorKind, text: &str| {
            let error =
                lapin::Error::from(ErrorKind::ProtocolError(AMQPError::new(kind, text.into())));
            (is_transient_refusal(&error), classify(error, &node))
        };
        let not_allowed = || AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED);
        let down = classified(
            not_allowed(),
            "NOT_ALLOWED - access to vhost '/' refused for user 'guest': vhost '/' is down",
        );
        assert!(
            matches!(down, (true, ConnectError::Transient(_))),
            "{down:?}"
        );
        let full = classified(
            not_allowed(),
            "NOT_ALLOWED - access to vhost '/' refused for user 'guest': connection limit (9) is reached",
        );
        assert!(
            matches!(full, (true, ConnectError::Transient(_))),
            "{full:?}"
        );
        let missing = classified(not_allowed(), "NOT_ALLOWED - vhost elsewhere not found");
        assert!(
            matches!(missing, (false, ConnectError::Misconfigured(_))),
            "{missing:?}"
        );
        let soft = AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND);
        let down = "NOT_FOUND - home node 'rabbit@a' of durable queue 'orders' in vhost '/' is down or inaccessible";
        assert!(classified(soft, down).0);
    }

    #[tokio::test]
    async fn an_unreachable_broker_is_an_error_with_the_setting_and_the_remedy() {
        let plain = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let port = plain.local_addr().expect("an address").port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = plain.accept().await {
                // RabbitMQ's answer to a TLS handshake on a port without TLS.
                let _ =
                    tokio::io::AsyncWriteExt::write_all(&mut stream, b"AMQP\x00\x00\x09\x01").await;
            }
        });
        for (scheme, port, remedy) in [
            (
                "amqp",
                1,
                "check that RabbitMQ is running, that host and port are correct, and that the port accepts AMQP without TLS",
            ),
            (
                "amqps",
                1,
                "check that RabbitMQ is running, that host and port are correct, and that the port accepts TLS",
            ),
            (
                "amqps",
                port,
                "the port accepts TLS (usually 5671; amqp:// is for a port without TLS)",
            ),
        ] {
            let url = format!("{scheme}://someone:canary@127.0.0.1:{port}/%2f");
            let settings = RabbitMq::queue("orders")
                .url(url)
                .check()
                .expect("settings");
            let error = match connect(&settings, "consumes").await {
                Err(ConnectError::Transient(error)) => error.to_string(),
                Err(other) => panic!("{other}"),
                Ok(_) => panic!("connected"),
            };
            assert!(
                error.starts_with(&format!(
                    "url: {scheme}://someone@127.0.0.1:{port}/%2f cannot be reached ("
                )),
                "{error}"
            );
            assert!(
                error.contains(remedy) && !error.contains("canary") && !error.contains('\n'),
                "{error}"
            );
        }
    }
}
