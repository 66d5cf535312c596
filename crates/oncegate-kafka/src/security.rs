//! How a broker is spoken to: by TLS, with a certificate, with a name and a password.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use oncegate_core::SourceError;
use rdkafka::ClientConfig;

/// A name and a password, and how they are proven to the broker. `Debug` shows neither password nor
/// name.
#[derive(Clone)]
#[must_use]
pub struct KafkaLogin {
    mechanism: &'static str,
    name: String,
    password: String,
}

impl KafkaLogin {
    /// SASL PLAIN: the password itself is sent, inside TLS.
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

/// What a user said about how to speak to the brokers.
#[derive(Clone, Default)]
pub(crate) struct Security {
    transport: Transport,
    authority: Option<PathBuf>,
    own: Option<(PathBuf, PathBuf)>,
    login: Option<KafkaLogin>,
    trust: Trust,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Transport {
    /// Plain text, or what the property `security.protocol` says.
    #[default]
    Unsaid,
    Tls,
}

/// Whom to believe.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Trust {
    /// A broker whose certificate an authority signed, and which bears its host's name.
    #[default]
    Verified,
    /// Whoever answers.
    Anyone,
}

impl Security {
    pub(crate) fn tls(&mut self) {
        self.transport = Transport::Tls;
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

    /// Refuses what cannot work: files that cannot be read, and an empty name or password.
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
                    "is the variable set that it comes from?",
                ))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn set(&self, config: &mut ClientConfig) {
        match (self.transport, &self.login) {
            (Transport::Unsaid, _) => return,
            (Transport::Tls, None) => config.set("security.protocol", "ssl"),
            (Transport::Tls, Some(login)) => config
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

/// Refuses a property that turns off the verification of certificates: only a setter with `danger`
/// in its name does so.
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

/// Whether a property would switch off that the broker's certificate is looked at, or whom it was
/// issued to.
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
    fn what_is_not_said_leaves_the_properties_to_the_user() {
        assert_eq!(config(|_| ()).get("security.protocol"), None);
    }

    #[test]
    fn a_login_never_goes_without_tls() {
        let config = config(|security| security.log_in(KafkaLogin::plain("ledger", "secret")));
        assert_eq!(config.get("security.protocol"), Some("sasl_ssl"));
        assert_eq!(
            (config.get("sasl.username"), config.get("sasl.password")),
            (Some("ledger"), Some("secret"))
        );
        assert_eq!(config.get("enable.ssl.certificate.verification"), None);
    }

    #[test]
    fn a_file_that_is_not_there_and_an_empty_password_are_told() {
        let told = |set: fn(&mut Security)| {
            let mut security = Security::default();
            set(&mut security);
            security.check().expect_err("refused").to_string()
        };
        assert!(
            told(|it| it.trust_authority("/no/such.pem".into()))
                .starts_with("ca_certificate: /no/such.pem cannot be read")
        );
        assert!(
            told(|it| it.present("/dev/null".into(), "/no/such.key".into()))
                .starts_with("client_certificate: /no/such.key")
        );
        assert!(told(|it| it.log_in(KafkaLogin::plain("ledger", ""))).starts_with("login: "));
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
    fn a_property_that_trusts_anyone_is_known() {
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
