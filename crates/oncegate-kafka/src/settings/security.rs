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
        Self::new("PLAIN", name.into(), password.into())
    }

    /// SCRAM-SHA-256: the password is proven and never sent.
    pub fn scram_sha_256(name: impl Into<String>, password: impl Into<String>) -> Self {
        Self::new("SCRAM-SHA-256", name.into(), password.into())
    }

    /// SCRAM-SHA-512: the password is proven and never sent.
    pub fn scram_sha_512(name: impl Into<String>, password: impl Into<String>) -> Self {
        Self::new("SCRAM-SHA-512", name.into(), password.into())
    }

    fn new(mechanism: &'static str, name: String, password: String) -> Self {
        Self {
            mechanism,
            name,
            password,
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

/// TLS and login of a source.
#[derive(Clone, Default)]
pub(crate) struct Security {
    /// Whether to use TLS. If false, the property `security.protocol` decides.
    uses_tls: bool,
    ca_certificate: Option<PathBuf>,
    /// The files of the client certificate and its key.
    client_certificate: Option<(PathBuf, PathBuf)>,
    login: Option<KafkaLogin>,
    /// Whether any certificate of a broker is accepted. If false, a trusted authority must have
    /// signed the certificate for the broker's host name.
    accepts_any_certificate: bool,
}

impl Security {
    pub(crate) fn tls(&mut self) {
        self.uses_tls = true;
    }

    pub(crate) fn ca_certificate(&mut self, certificate: PathBuf) {
        self.tls();
        self.ca_certificate = Some(certificate);
    }

    pub(crate) fn client_certificate(&mut self, certificate: PathBuf, key: PathBuf) {
        self.tls();
        self.client_certificate = Some((certificate, key));
    }

    pub(crate) fn log_in(&mut self, login: KafkaLogin) {
        self.tls();
        self.login = Some(login);
    }

    pub(crate) fn has_login(&self) -> bool {
        self.login.is_some()
    }

    pub(crate) fn disable_verification(&mut self) {
        self.tls();
        self.accepts_any_certificate = true;
    }

    /// Rejects files that cannot be read, and an empty name or password.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        if let Some(file) = &self.ca_certificate {
            check_readable("ca_certificate", file)?;
        }
        if let Some((certificate, key)) = &self.client_certificate {
            check_readable("client_certificate", certificate)?;
            check_readable("client_certificate", key)?;
        }
        match &self.login {
            Some(login) if login.name.is_empty() || login.password.is_empty() => {
                Err(SourceError::misconfigured(
                    "login",
                    "the name or the password is empty",
                    "set both; if they come from environment variables, check that these are set",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Sets the librdkafka properties of TLS and login.
    pub(crate) fn set(&self, config: &mut ClientConfig) {
        match &self.login {
            _ if !self.uses_tls => return,
            None => config.set("security.protocol", "ssl"),
            Some(login) => config
                .set("security.protocol", "sasl_ssl")
                .set("sasl.mechanism", login.mechanism)
                .set("sasl.username", &login.name)
                .set("sasl.password", &login.password),
        };
        if let Some(certificate) = &self.ca_certificate {
            config.set("ssl.ca.location", certificate.to_string_lossy());
        }
        if let Some((certificate, key)) = &self.client_certificate {
            config
                .set("ssl.certificate.location", certificate.to_string_lossy())
                .set("ssl.key.location", key.to_string_lossy());
        }
        if self.accepts_any_certificate {
            config
                .set("enable.ssl.certificate.verification", "false")
                .set("ssl.endpoint.identification.algorithm", "none");
        }
    }
}

fn check_readable(setting: &str, file: &Path) -> Result<(), SourceError> {
    let unreadable = |error| {
        SourceError::misconfigured(
            setting,
            format!("{} cannot be read: {error}", file.display()),
            "name a PEM file that this process can read",
        )
    };
    File::open(file).map(drop).map_err(unreadable)
}

/// Rejects a property that disables certificate verification: only
/// [`danger_accept_any_certificate`](super::Kafka::danger_accept_any_certificate) may do so.
pub(crate) fn check_property(key: &str, value: &str) -> Result<(), SourceError> {
    match disables_verification(key, value) {
        true => Err(SourceError::misconfigured(
            key,
            "disables the verification of certificates",
            "remove it; to accept any certificate, use .danger_accept_any_certificate()",
        )),
        false => Ok(()),
    }
}

/// Whether a property disables the verification of the broker's certificate or host name.
fn disables_verification(key: &str, value: &str) -> bool {
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
            security
                .check()
                .expect_err("an invalid setting")
                .to_string()
        };
        assert!(
            error(|it| it.ca_certificate("/no/such.pem".into()))
                .starts_with("ca_certificate: /no/such.pem cannot be read")
        );
        assert!(
            error(|it| it.client_certificate("/dev/null".into(), "/no/such.key".into()))
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
            assert!(disables_verification(key, value), "{key}={value}");
        }
        assert!(!disables_verification(
            "enable.ssl.certificate.verification",
            "true"
        ));
        assert!(!disables_verification(
            "ssl.endpoint.identification.algorithm",
            "https"
        ));
        assert!(!disables_verification("ssl.ca.location", "none"));
    }
}
