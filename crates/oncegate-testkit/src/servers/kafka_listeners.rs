//! The listeners of a Kafka broker: plain text, TLS, a client certificate, or a login inside TLS.

use std::path::Path;

use super::ServerError;
use super::certificates;
use super::server::write;

/// The file with the broker's key and certificate, the format of Kafka's PEM key store.
const IDENTITY: &str = "server.pem";

/// A listener of a [`KafkaServer`](super::KafkaServer).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KafkaListener {
    /// Plain text, without authentication.
    Plain,
    /// TLS.
    Tls,
    /// TLS with a client certificate of the same authority.
    MutualTls,
    /// TLS with a login by SASL PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.
    Login,
}

impl KafkaListener {
    /// The listeners of a secured broker besides the plain one.
    pub(crate) const SECURED: [Self; 3] = [Self::Tls, Self::MutualTls, Self::Login];

    /// The listener's name in the broker's properties.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAINTEXT",
            Self::Tls => "TLS",
            Self::MutualTls => "MUTUAL",
            Self::Login => "LOGIN",
        }
    }
}

/// A user of a secured broker; name and password are letters, digits and dashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KafkaUser {
    /// The name.
    pub name: String,
    /// The password.
    pub password: String,
}

impl KafkaUser {
    /// The arguments of the storage formatter that add this user.
    pub(crate) fn scram(&self) -> [String; 4] {
        let Self { name, password } = self;
        let mechanism = |hash: &str| format!("SCRAM-SHA-{hash}=[name={name},password={password}]");
        [
            "--add-scram".into(),
            mechanism("256"),
            "--add-scram".into(),
            mechanism("512"),
        ]
    }
}

/// Makes the certificates of the broker and of a client.
pub(crate) fn make_certificates(server: &'static str, directory: &Path) -> Result<(), ServerError> {
    certificates::make(server, directory)?;
    certificates::make_client(server, directory)?;
    let read = |file: &str| {
        std::fs::read_to_string(directory.join(file))
            .map_err(|source| super::io_error(server, "read a certificate that was made", source))
    };
    write(
        server,
        &directory.join(IDENTITY),
        &(read(certificates::KEY)? + &read(certificates::CERTIFICATE)?),
    )
}

/// The broker's properties for the secured listeners.
pub(crate) fn properties(user: &KafkaUser, directory: &Path) -> String {
    let KafkaUser { name, password } = user;
    let security = "org.apache.kafka.common.security";
    format!(
        "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL,MUTUAL:SSL,LOGIN:SASL_SSL
ssl.keystore.type=PEM
ssl.keystore.location={identity}
ssl.truststore.type=PEM
ssl.truststore.location={authority}
listener.name.mutual.ssl.client.auth=required
listener.name.login.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512
listener.name.login.plain.sasl.jaas.config={security}.plain.PlainLoginModule required user_{name}=\"{password}\";
listener.name.login.scram-sha-256.sasl.jaas.config={security}.scram.ScramLoginModule required;
listener.name.login.scram-sha-512.sasl.jaas.config={security}.scram.ScramLoginModule required;
",
        identity = directory.join(IDENTITY).display(),
        authority = directory.join(certificates::AUTHORITY).display(),
    )
}
