//! What is trusted over TLS, and what is shown of oneself.

use std::path::{Path, PathBuf};

use lapin::tcp::{RustlsConnector, RustlsConnectorConfig};
use oncegate_core::source::SourceError;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The files of an encrypted connection. They are read at each connection, so that a renewed
/// certificate is used.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tls {
    /// The certificates of authorities that are trusted beside the system's.
    pub(crate) authority: Option<PathBuf>,
    pub(crate) identity: Option<Identity>,
}

/// A client's certificate and its key.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl Tls {
    /// Whether a file is named.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.authority.is_some() || self.identity.is_some()
    }

    /// Reads the files.
    pub(crate) fn connector(&self) -> Result<RustlsConnector, SourceError> {
        let mut config = match RustlsConnectorConfig::new_with_native_certs() {
            Ok(config) => config,
            // A container may have none, and need none.
            Err(_) if self.authority.is_some() => RustlsConnectorConfig::default(),
            Err(error) => {
                let problem = format!("the system has no certificates of authorities ({error})");
                return Err(SourceError::misconfigured(
                    "url",
                    problem,
                    "install `ca-certificates`, or name a file by `.ca_certificate(path)`",
                ));
            }
        };
        if let Some(path) = &self.authority {
            config.add_parsable_certificates(certificates("ca_certificate", path)?);
        }
        let connector = match &self.identity {
            None => config.connector_with_no_client_auth(),
            Some(identity) => {
                let chain = certificates(CLIENT, &identity.certificate)?;
                config.connector_with_single_cert(chain, key(&identity.key)?)
            }
        };
        connector.map_err(|error| {
            let setting = if self.identity.is_some() {
                CLIENT
            } else {
                "ca_certificate"
            };
            SourceError::misconfigured(
                setting,
                format!("it cannot be used ({error})"),
                "name a certificate and the key that belongs to it, in PEM form",
            )
        })
    }
}

const CLIENT: &str = "client_certificate";

fn certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, SourceError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(unusable(
            setting,
            path,
            "it holds no certificate in PEM form",
        )),
        Err(error) => Err(unusable(setting, path, &error.to_string())),
    }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, SourceError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        unusable(
            CLIENT,
            path,
            &format!("{error}; a key with a passphrase cannot be read"),
        )
    })
}

fn unusable(setting: &str, path: &Path, problem: &str) -> SourceError {
    SourceError::misconfigured(
        setting,
        format!("{} cannot be used: {problem}", path.display()),
        "name a file in PEM form that this process may read",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_used_is_named_with_its_setting() {
        let missing = PathBuf::from("/nowhere/at-all.pem");
        let empty = PathBuf::from("/dev/null");
        for path in [&missing, &empty] {
            let told = Tls {
                authority: Some(path.clone()),
                identity: None,
            }
            .connector()
            .map(drop)
            .expect_err("no certificate")
            .to_string();
            assert!(
                told.starts_with("ca_certificate: ") && told.contains(path.to_str().expect("text")),
                "{told}"
            );
            let identity = Identity {
                certificate: path.clone(),
                key: path.clone(),
            };
            let told = Tls {
                authority: None,
                identity: Some(identity),
            }
            .connector()
            .map(drop)
            .expect_err("no certificate")
            .to_string();
            assert!(
                told.starts_with("client_certificate: ")
                    || told.starts_with("url: the system has no"),
                "{told}"
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
