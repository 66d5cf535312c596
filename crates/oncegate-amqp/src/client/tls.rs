//! CA and client certificates for TLS.

use std::path::{Path, PathBuf};

use lapin::tcp::{RustlsConnector, RustlsConnectorConfig};
use oncegate_core::source::SourceError;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The certificate files. They are read at each connection, so that a renewed certificate is used.
#[derive(Clone, Debug, Default)]
pub(crate) struct TlsFiles {
    /// CA certificates that are trusted in addition to the system's.
    pub(crate) ca_certificate: Option<PathBuf>,
    /// The client certificate for mutual TLS.
    pub(crate) identity: Option<ClientIdentity>,
}

/// A client certificate and its key.
#[derive(Clone, Debug)]
pub(crate) struct ClientIdentity {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl TlsFiles {
    /// Whether a file is configured.
    pub(crate) fn is_configured(&self) -> bool {
        self.ca_certificate.is_some() || self.identity.is_some()
    }

    /// A connector with the current contents of the files.
    ///
    /// # Errors
    /// A file cannot be read or has no certificate or key; or there are neither configured CA
    /// certificates nor those of the system.
    pub(crate) fn connector(&self) -> Result<RustlsConnector, SourceError> {
        let mut config = match RustlsConnectorConfig::new_with_native_certs() {
            Ok(config) => config,
            // A container may have no system certificates; the configured ones are sufficient.
            Err(_) if self.ca_certificate.is_some() => RustlsConnectorConfig::default(),
            Err(error) => {
                let problem = format!("the system has no CA certificates ({error})");
                return Err(SourceError::misconfigured(
                    "url",
                    problem,
                    "install `ca-certificates`, or configure a file with `.ca_certificate(path)`",
                ));
            }
        };
        if let Some(path) = &self.ca_certificate {
            config.add_parsable_certificates(certificates("ca_certificate", path)?);
        }
        let connector = match &self.identity {
            None => config.connector_with_no_client_auth(),
            Some(identity) => {
                let chain = certificates(CLIENT_CERTIFICATE, &identity.certificate)?;
                config.connector_with_single_cert(chain, key(&identity.key)?)
            }
        };
        connector.map_err(|error| {
            let setting = if self.identity.is_some() {
                CLIENT_CERTIFICATE
            } else {
                "ca_certificate"
            };
            SourceError::misconfigured(
                setting,
                format!("the certificate cannot be used ({error})"),
                "configure a certificate and its key, both in PEM format",
            )
        })
    }
}

const CLIENT_CERTIFICATE: &str = "client_certificate";

fn certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, SourceError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(unusable_file(
            setting,
            path,
            "it contains no certificate in PEM format",
        )),
        Err(error) => Err(unusable_file(setting, path, &error.to_string())),
    }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, SourceError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        unusable_file(
            CLIENT_CERTIFICATE,
            path,
            &format!("{error}; a key with a passphrase is not supported"),
        )
    })
}

fn unusable_file(setting: &str, path: &Path, problem: &str) -> SourceError {
    SourceError::misconfigured(
        setting,
        format!("{} cannot be used: {problem}", path.display()),
        "configure a file in PEM format that this process can read",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unusable_file_is_named_with_its_setting() {
        let missing = PathBuf::from("/nowhere/at-all.pem");
        let empty = PathBuf::from("/dev/null");
        for path in [&missing, &empty] {
            let error = TlsFiles {
                ca_certificate: Some(path.clone()),
                identity: None,
            }
            .connector()
            .map(drop)
            .expect_err("no certificate")
            .to_string();
            assert!(
                error.starts_with("ca_certificate: ")
                    && error.contains(path.to_str().expect("text")),
                "{error}"
            );
            let identity = ClientIdentity {
                certificate: path.clone(),
                key: path.clone(),
            };
            let error = TlsFiles {
                ca_certificate: None,
                identity: Some(identity),
            }
            .connector()
            .map(drop)
            .expect_err("no certificate")
            .to_string();
            assert!(
                error.starts_with("client_certificate: ")
                    || error.starts_with("url: the system has no"),
                "{error}"
            );
        }
        assert!(
            key(&empty)
                .expect_err("no key")
                .to_string()
                .contains("passphrase")
        );
    }
}
