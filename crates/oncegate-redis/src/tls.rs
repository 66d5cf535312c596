//! Whom a connection over TLS trusts, and who we say we are.

use std::path::Path;

use redis::{ClientTlsConfig, TlsCertificates};

use crate::failure::Problem;

/// What was set for TLS. Nothing: what the system's authorities signed, and no certificate of ours.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    /// The only authority to trust (PEM).
    authority: Option<Vec<u8>>,
    /// Our certificate and its key (PEM).
    ours: Option<(Vec<u8>, Vec<u8>)>,
}

impl Tls {
    /// Trusts this authority alone.
    pub(crate) fn trusting(self, authority: &Path) -> Result<Self, Problem> {
        Ok(Self {
            authority: Some(pem("ca_certificate", authority, "CERTIFICATE-----")?),
            ..self
        })
    }

    /// Shows this certificate to servers that ask for one.
    pub(crate) fn showing(self, certificate: &Path, key: &Path) -> Result<Self, Problem> {
        let certificate = pem("client_certificate", certificate, "CERTIFICATE-----")?;
        let key = pem("client_certificate", key, "PRIVATE KEY-----")?;
        Ok(Self {
            ours: Some((certificate, key)),
            ..self
        })
    }

    pub(crate) fn certificates(&self) -> TlsCertificates {
        let ours = self.ours.clone();
        let client_tls = ours.map(|(client_cert, client_key)| ClientTlsConfig {
            client_cert,
            client_key,
        });
        TlsCertificates {
            client_tls,
            root_cert: self.authority.clone(),
        }
    }
}

/// Reads a file that should hold this.
fn pem(setting: &str, path: &Path, holds: &str) -> Result<Vec<u8>, Problem> {
    let read = std::fs::read(path);
    let text = read.map_err(|error| {
        Problem::new(format!(
            "{setting}: cannot read {}: {error}",
            path.display()
        ))
    })?;
    if text
        .windows(holds.len())
        .any(|window| window == holds.as_bytes())
    {
        return Ok(text);
    }
    let what = holds.trim_end_matches('-').to_lowercase();
    Err(Problem::new(format!(
        "{setting}: {} holds no {what} in PEM form; name the file that does",
        path.display()
    )))
}
