//! TLS and authentication.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use oncegate_core::SourceError;
use rdkafka::ClientConfig;

/// SASL credentials and their mechanism. `Debug` shows neither password nor name.
#[derive(Clone)]
#[must_use]
pub struct KafkaLogin {
    mechanism: &'static str,
    name: String,
    password: String,
}

impl KafkaLogin {
    /// SASL PLAIN: the password itself is sent, over TLS.
    pub fn plain(name: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            mechanism: "PLAIN",
            name: name.into(),
            password: password.into(),
        }
    }

    /// SCRAM-SHA-256: the password is proven and never sent.
    pub fn scram_sha_256(name: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            mechanism: "SCRAM-SHA-256",
            name: name.into(),
            password: password.into(),
        }
    }

    /// SCRAM-SHA-512: the password is proven and never sent.
    pub fn scram_sha_512(name: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            mechanism: "SCRAM-SHA-512",
            name: name.into(),
            password: password.into(),
        }
    }
}

impl fmt::Debug for KafkaLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaLogin")
            .field("mechanism", &self.mechanism)
            .finish_non_exhaustive()
    }
}

/// The security settings of the source.
#[derive(Clone, Default)]
pub(crate) struct Security {
    transport: TransportSecurity,
    authority: Option<PathBuf>,
    own: Option<(PathBuf, PathBuf)>,
    login: Option<KafkaLogin>,
    trust: Trust,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum TransportSecurity {
    /// Plain text, or the property `security.protocol`.
    #[default]
    Unsaid,
    Tls,
}

/// Which brokers are trusted.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Trust {
    /// Brokers whose certificate is signed by a trusted authority for their host name.
    #[default]
    Verified,
    /// Any broker.
    Anyone,
}

impl Security {
    pub(crate) fn tls(&mut self) {
        self.transport = TransportSecurity::Tls;
    }

    pub(crate) fn trust_authority(&mut self, certificate: PathBuf) {
        self.tls();
        self.authority = Some(certificate);
    }

    pub(crate) fn present(&mut self, certificate: PathBuf, key: PathBuf) {
        self.tls();
        self.own = Some((certificate, key));
    }

    pub(crate) fn log_in(&mut self, login: KafkaLogin) {
        self.tls();
        self.login = Some(login);
    }

    pub(crate) fn trust_anyone(&mut self) {
        self.tls();
        self.trust = Trust::Anyone;
    }

    /// Rejects files that cannot be read, and an empty name or password.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        let own = self.own.iter().flat_map(|(certificate, key)| {
            [
                ("client_certificate", certificate),
                ("client_certificate", key),
            ]
        });
        for (setting, file) in self
            .authority
            .iter()
            .map(|file| ("ca_certificate", file))
            .chain(own)
        {
            readable(setting, file)?;
        }
        match &self.login {
            Some(login) if login.name.is_empty() || login.password.is_empty() => {
                Err(SourceError::misconfigured(
                    "login",
                    "the name or the password is empty",
                    "check that the variable it comes from is set",
                ))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn set(&self, config: &mut ClientConfig) {
        match (self.transport, &self.login) {
            (TransportSecurity::Unsaid, _) => return,
            (TransportSecurity::Tls, None) => config.set("security.protocol", "ssl"),
            (TransportSecurity::Tls, Some(login)) => config
                .set("security.protocol", "sasl_ssl")
                .set("sasl.mechanism", login.mechanism)
                .set("sasl.username", &login.name)
                .set("sasl.password", &login.password),
        };
        if let Some(certificate) = &self.authority {
            config.set("ssl.ca.location", certificate.to_string_lossy());
        }
        if let Some((certificate, key)) = &self.own {
            config
                .set("ssl.certificate.location", certificate.to_string_lossy())
                .set("ssl.key.location", key.to_string_lossy());
        }
        if self.trust == Trust::Anyone {
            config
                .set("enable.ssl.certificate.verification", "false")
                .set("ssl.endpoint.identification.algorithm", "none");
        }
    }
}

fn readable(setting: &str, file: &Path) -> Result<(), SourceError> {
    let refused = |error| {
        SourceError::misconfigured(
            setting,
            format!("{} cannot be read: {error}", file.display()),
            "name a PEM file",
        )
    };
    File::open(file).map(drop).map_err(refused)
}

/// Rejects a property that disables certificate verification: only a setter with `danger` in its
/// name does that.
pub(crate) fn check_property(key: &str, value: &str) -> Result<(), SourceError> {
    match trusts_anyone(key, value) {
        true => Err(SourceError::misconfigured(
            key,
            "disables the verification of certificates",
            "use .danger_accept_any_certificate(), if you must",
        )),
        false => Ok(()),
    }
}

/// Whether a property disables the verification of the broker's certificate or host name.
fn trusts_anyone(key: &str, value: &str) -> bool {
    match key.trim() {
        "enable.ssl.certificate.verification" => !matches!(value.trim(), "true" | "t" | "1"),
        "ssl.endpoint.identification.algorithm" => !value.trim().eq_ignore_ascii_case("https"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(set: impl FnOnce(&mut Security)) -> ClientConfig {
        let (mut security, mut config) = (Security::default(), ClientConfig::new());
        set(&mut security);
        security.set(&mut config);
        config
    }

    #[test]
    fn without_security_settings_the_properties_apply() {
        assert_eq!(config(|_| ()).get("security.protocol"), None);
    }

    #[test]
    fn a_login_always_uses_tls() {
        let config = config(|security| security.log_in(KafkaLogin::plain("ledger", "secret")));
        assert_eq!(config.get("security.protocol"), Some("sasl_ssl"));
        assert_eq!(
            (config.get("sasl.username"), config.get("sasl.password")),
            (Some("ledger"), Some("secret"))
        );
        assert_eq!(config.get("enable.ssl.certificate.verification"), None);
    }

    #[test]
    fn a_missing_file_and_an_empty_password_are_errors() {
        let error = |set: fn(&mut Security)| {
            let mut security = Security::default();
            set(&mut security);
            security.check().expect_err("refused").to_string()
        };
        assert!(
            error(|it| it.trust_authority("/no/such.pem".into()))
                .starts_with("ca_certificate: /no/such.pem cannot be read")
        );
        assert!(
            error(|it| it.present("/dev/null".into(), "/no/such.key".into()))
                .starts_with("client_certificate: /no/such.key")
        );
        assert!(error(|it| it.log_in(KafkaLogin::plain("ledger", ""))).starts_with("login: "));
    }

    #[test]
    fn debug_shows_neither_password_nor_name() {
        let shown = format!(
            "{:?}",
            KafkaLogin::scram_sha_512("canary-name", "canary-password")
        );
        assert!(
            shown.contains("SCRAM-SHA-512") && !shown.contains("canary"),
            "{shown}"
        );
    }

    #[test]
    fn properties_that_disable_verification_are_detected() {
        for (key, value) in [
            ("enable.ssl.certificate.verification", "false"),
            (" enable.ssl.certificate.verification", "0"),
            ("ssl.endpoint.identification.algorithm", "none"),
        ] {
            assert!(trusts_anyone(key, value), "{key}={value}");
        }
        assert!(!trusts_anyone(
            "enable.ssl.certificate.verification",
            "true"
        ));
        assert!(!trusts_anyone(
            "ssl.endpoint.identification.algorithm",
            "https"
        ));
        assert!(!trusts_anyone("ssl.ca.location", "none"));
    }
}
