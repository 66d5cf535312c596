//! TLS: the trusted authority and the client certificate.

use std::path::Path;

use redis::{ClientTlsConfig, TlsCertificates};

use crate::failure::Problem;

/// The TLS options. By default the system's authorities are trusted and no client certificate is
/// sent.
#[derive(Clone, Default)]
pub(crate) struct TlsOptions {
    /// The only trusted authority (PEM).
    ca_certificate: Option<Vec<u8>>,
    /// The client certificate and its key (PEM).
    client_identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl TlsOptions {
    /// Trusts only the authority in this file.
    pub(crate) fn with_ca_certificate(self, path: &Path) -> Result<Self, Problem> {
        Ok(Self {
            ca_certificate: Some(read_pem("ca_certificate", path, "CERTIFICATE-----")?),
            ..self
        })
    }

    /// Sends this certificate to servers that request one.
    pub(crate) fn with_client_certificate(
        self,
        certificate: &Path,
        key: &Path,
    ) -> Result<Self, Problem> {
        let certificate = read_pem("client_certificate", certificate, "CERTIFICATE-----")?;
        let key = read_pem("client_certificate", key, "PRIVATE KEY-----")?;
        Ok(Self {
            client_identity: Some((certificate, key)),
            ..self
        })
    }

    pub(crate) fn certificates(&self) -> TlsCertificates {
        let identity = self.client_identity.clone();
        let client_tls = identity.map(|(client_cert, client_key)| ClientTlsConfig {
            client_cert,
            client_key,
        });
        TlsCertificates {
            client_tls,
            root_cert: self.ca_certificate.clone(),
        }
    }
}

/// Reads a PEM file that must contain this kind of block.
fn read_pem(setting: &str, path: &Path, block: &str) -> Result<Vec<u8>, Problem> {
    let read = std::fs::read(path);
    let text = read.map_err(|error| {
        Problem::new(format!(
            "{setting}: cannot read {}: {error}",
            path.display()
        ))
    })?;
    if text
        .windows(block.len())
        .any(|window| window == block.as_bytes())
    {
        return Ok(text);
    }
    let what = block.trim_end_matches('-').to_lowercase();
    Err(Problem::new(format!(
        "{setting}: {} contains no {what} in PEM format; name a file that does",
        path.display()
    )))
}
