//! The address, login and connection settings of one Redis server.

use std::time::Duration;

use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, ProtocolVersion, RedisError};

use crate::client::tcp_settings::tcp_settings;
use crate::client::tls::TlsOptions;
use crate::failure::{Problem, StoreFailure};

/// The address, login and connection settings of a server. The address contains no secret.
#[derive(Clone)]
pub(crate) struct ServerConfig {
    info: Box<ConnectionInfo>,
    address: String,
    /// The setting whose URL has the address, such as `Redis::at`, for messages.
    setting: &'static str,
}

/// `host:port`; the host may be an IPv6 address.
pub(crate) fn host_and_port(host: &str, port: u16) -> String {
    format!("{host}:{port}")
}

impl ServerConfig {
    /// Parses a URL. `setting` is the setting that contains it, for messages.
    ///
    /// # Errors
    /// The problem, without quoting the URL: it may contain a password.
    pub(crate) fn parse(url: &str, setting: &'static str) -> Result<Self, Problem> {
        // With this fragment the driver disables certificate verification.
        let insecure = || {
            Problem::new(format!(
                "{setting}: the URL ends in #insecure, which disables certificate verification; remove it, and configure the authority of \
                 the server's certificate with ca_certificate(path)"
            ))
        };
        if url.trim_end().ends_with("#insecure") {
            return Err(insecure());
        }
        // With one of these characters in a password, a part of it would be parsed as host or port,
        // and shown in messages.
        let (scheme, after_scheme) = url.split_once("://").unwrap_or_default();
        // The path of a socket contains no password.
        if !scheme.ends_with("unix")
            && after_scheme
                .find(['/', '?', '#'])
                .is_some_and(|end| after_scheme[end..].contains('@'))
        {
            return Err(Problem::new(format!(
                "{setting}: a character in the URL has to be percent-encoded: / is %2f, @ is %40, # is %23, ? is %3f"
            )));
        }
        let client = Client::open(url).map_err(|_| {
            // The error may quote the URL.
            Problem::new(format!(
                "{setting}: not a Redis URL; write redis://[user[:password]@]host[:port][/database], or rediss:// for TLS"
            ))
        })?;
        if matches!(
            client.get_connection_info().addr(),
            ConnectionAddr::TcpTls { insecure: true, .. }
        ) {
            return Err(insecure());
        }
        if let Some(parameter) = unknown_parameter(url) {
            return Err(Problem::new(format!(
                "{setting}: the URL has an unknown parameter, {parameter:?}; remove it: the database is the number after the slash, and other \
                 settings have methods of their own"
            )));
        }
        let info = Box::new(
            client
                .get_connection_info()
                .clone()
                .set_tcp_settings(tcp_settings()),
        );
        Ok(Self {
            address: info.addr().to_string(),
            info,
            setting,
        })
    }

    /// The same server with these TLS options.
    pub(crate) fn with_tls(self, tls: &TlsOptions) -> Result<Self, Problem> {
        if !matches!(self.info.addr(), ConnectionAddr::TcpTls { .. }) {
            return Err(Problem::new(format!(
                "{}: certificates need a rediss:// URL; write rediss://",
                self.setting
            )));
        }
        let parsed = Client::build_with_tls((*self.info).clone(), tls.certificates());
        let info = parsed.map_err(|error| {
            Problem::of(
                format!("ca_certificate or client_certificate: {error}; give PEM files"),
                error,
            )
        })?;
        Ok(Self {
            info: Box::new(info.get_connection_info().clone()),
            ..self
        })
    }

    /// Another server with the same login and settings.
    pub(crate) fn with_address(&self, host: &str, port: u16) -> Self {
        let address = match self.info.addr().clone() {
            ConnectionAddr::TcpTls {
                insecure,
                tls_params,
                ..
            } => ConnectionAddr::TcpTls {
                host: host.into(),
                port,
                insecure,
                tls_params,
            },
            _ => ConnectionAddr::Tcp(host.into(), port),
        };
        Self {
            info: Box::new((*self.info).clone().set_addr(address)),
            address: host_and_port(host, port),
            ..self.clone()
        }
    }

    /// The user who logs in.
    pub(crate) fn user(&self) -> &str {
        self.info.redis_settings().username().unwrap_or("default")
    }

    /// Whether the URL has a password.
    pub(crate) fn has_password(&self) -> bool {
        self.info.redis_settings().password().is_some()
    }

    /// The same server without user, password and database.
    pub(crate) fn without_login(&self) -> Self {
        Self {
            info: Box::new(
                (*self.info)
                    .clone()
                    .set_redis_settings(redis::RedisConnectionInfo::default()),
            ),
            ..self.clone()
        }
    }

    /// The same server and login without database.
    pub(crate) fn without_database(&self) -> Self {
        let redis = self.info.redis_settings().clone().set_db(0);
        Self {
            info: Box::new((*self.info).clone().set_redis_settings(redis)),
            ..self.clone()
        }
    }

    /// The host.
    pub(crate) fn host(&self) -> &str {
        match self.info.addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
            _ => &self.address,
        }
    }

    /// Host and port.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The client to connect with.
    pub(crate) fn client(&self, protocol: ProtocolVersion) -> Result<Client, RedisError> {
        if matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
            && rustls::crypto::CryptoProvider::get_default().is_none()
        {
            // Fails only if another thread has installed a provider, which is as good.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let redis = self.info.redis_settings().clone().set_protocol(protocol);
        Client::open((*self.info).clone().set_redis_settings(redis))
    }

    /// Why connecting failed. Omits the text of the server's error, which may repeat the password.
    pub(crate) fn connection_failure(&self, error: &RedisError, waited: Duration) -> StoreFailure {
        let Self {
            address, setting, ..
        } = self;
        let code = error.code().unwrap_or_default();
        let detail = error.detail().unwrap_or_default();
        if error.is_timeout() {
            return StoreFailure::not_applied(format!(
                "{setting}: no reply from Redis at {address} within {waited:?}; check that it runs and is not overloaded, and correct host \
                 and port in the URL"
            ));
        }
        match (error.kind(), code) {
            // A TLS alert that the server sent after the client certificate.
            (ErrorKind::Io, _) if is_client_certificate_alert(&error.to_string()) => {
                StoreFailure::misconfigured(format!(
                    "{setting}: {address} rejected the TLS client certificate or requires one ({error}); configure one that its authority \
                 signed with client_certificate(certificate, key)"
                ))
            }
            (ErrorKind::Io, _) if error.to_string().contains("certificate") => {
                StoreFailure::misconfigured(format!(
                    "{setting}: the certificate of {address} is not trusted ({error}); configure its authority with \
                 ca_certificate(path), and use a host that the certificate names"
                ))
            }
            (ErrorKind::Io, _) => StoreFailure::not_applied(format!(
                "{setting}: no connection to Redis at {address}: {error}; check that it runs, that host and port in the URL are right, and \
                 that the port expects {}{}",
                if matches!(self.info.addr(), ConnectionAddr::TcpTls { .. }) {
                    "TLS, as for rediss://"
                } else {
                    "no TLS, as for redis://"
                },
                // The connection may be closed before the reply that says so is read.
                if is_closed_by_server(error) {
                    "; a server in protected mode closes connections of other hosts: set a password there and in the URL"
                } else {
                    ""
                }
            )),
            (ErrorKind::Parse | ErrorKind::UnexpectedReturnType, _) => {
                StoreFailure::misconfigured(format!(
                    "{setting}: the server at {address} does not speak the Redis protocol; correct host and port in the URL"
                ))
            }
            (ErrorKind::AuthenticationFailed, _) | (_, "WRONGPASS" | "NOAUTH") => {
                StoreFailure::misconfigured(format!(
                    "{setting}: {address} rejected the user or the password, or requires them; correct them in the URL, \
                 redis://user:password@host"
                ))
            }
            // For SELECT the driver reports no code.
            _ if code == "NOPERM" || detail.contains("no permissions") => {
                StoreFailure::misconfigured(format!(
                    "{setting}: {address} does not let this user connect (NOPERM); grant it HELLO, SELECT, SET, GET, MGET, DEL, PTTL, PEXPIRE, \
                 EVAL, EVALSHA and INFO"
                ))
            }
            (_, "DENIED") => StoreFailure::misconfigured(format!(
                "{setting}: {address} runs in protected mode and rejects remote clients; set a password there and in the URL"
            )),
            _ if detail.contains("DB index") || error.to_string().contains("switch database") => {
                StoreFailure::misconfigured(format!(
                    "{setting}: {address} has no such database; correct the number at the end of the URL"
                ))
            }
            _ => StoreFailure::not_applied(format!(
                "{setting}: Redis at {address} rejected the connection ({}); check its log",
                if code.is_empty() {
                    error.category()
                } else {
                    code
                }
            )),
        }
    }
}

/// The first parameter after the `?` of a URL that the driver ignores.
fn unknown_parameter(url: &str) -> Option<&str> {
    let (before, query) = url.split_once('?')?;
    let known: &[&str] = if before.split(':').next()?.ends_with("unix") {
        &["db", "user", "pass", "protocol"]
    } else {
        &["protocol"]
    };
    let query = query.split('#').next()?;
    query
        .split('&')
        .filter_map(|parameter| parameter.split('=').next())
        .find(|name| !name.is_empty() && !known.contains(name))
}

/// Whether the error is a TLS alert about a rejected or missing client certificate.
fn is_client_certificate_alert(error: &str) -> bool {
    let alerts = [
        "Certificate",
        "UnknownCA",
        "HandshakeFailure",
        "AccessDenied",
    ];
    error.contains("fatal alert") && alerts.iter().any(|alert| error.contains(alert))
}

/// Whether the connection was accepted and then closed. [`RedisError::is_connection_dropped`] is
/// also true for a refused connection.
fn is_closed_by_server(error: &RedisError) -> bool {
    error.is_connection_dropped() && !error.is_connection_refusal()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn an_unreachable_server_is_reported_with_its_setting_and_remedy() {
        let refused = RedisError::from(io::Error::from(io::ErrorKind::ConnectionRefused));
        let line = |url: &str, setting, error: &RedisError| match ServerConfig::parse(url, setting)
            .expect("a URL")
            .connection_failure(error, Duration::from_secs(15))
        {
            StoreFailure::NotApplied(problem) => problem.to_string(),
            other => panic!("{other:?}"),
        };
        for (url, setting, expected_tls) in [
            ("redis://:s3cret@host:1", "Redis::at", "expects no TLS"),
            (
                "rediss://:s3cret@host:1",
                "Redis::cluster",
                "TLS, as for rediss://",
            ),
        ] {
            let text = line(url, setting, &refused);
            assert!(
                text.starts_with(&format!("{setting}: no connection to Redis at host:1: ")),
                "{text}"
            );
            assert!(
                text.contains("check that it runs, that host and port in the URL are right")
                    && text.contains(expected_tls),
                "{text}"
            );
            assert!(!text.contains("s3cret") && !text.contains('\n'), "{text}");
        }
        let dropped = RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        for (error, is_hinted) in [(&refused, false), (&dropped, true)] {
            let text = line("redis://host", "Redis::at", error);
            assert_eq!(text.contains("protected mode"), is_hinted, "{text}");
        }
        let text = line(
            "redis://host",
            "Redis::at",
            &RedisError::from(io::Error::from(io::ErrorKind::TimedOut)),
        );
        assert!(
            text.starts_with(
                "Redis::at: no reply from Redis at host:6379 within 15s; check that it runs"
            ),
            "{text}"
        );
    }

    /// The driver would ignore them: markers would be in another database than the user expects.
    #[test]
    fn unknown_parameters_are_refused() {
        let parse = |url| ServerConfig::parse(url, "Redis::at").map(|_| ());
        for (url, name) in [
            ("redis://host?db=3", "db"),
            ("redis://host/1?protocol=resp3&timeout=s3cret", "timeout"),
            ("redis+unix:///redis.sock?db=1&password=s3cret", "password"),
        ] {
            let problem = parse(url).expect_err(url).to_string();
            assert!(problem.contains(&format!("{name:?}")), "{problem}");
            assert!(!problem.contains("s3cret"), "{problem}");
        }
        for url in [
            "redis://host/3?protocol=resp3",
            "redis://host?",
            "redis+unix:///redis.sock?db=1&user=u&pass=p",
        ] {
            assert!(parse(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn no_part_of_a_password_is_parsed_as_host_or_port() {
        for url in [
            "redis://user:12?34@host",
            "rediss://user:12#34@host",
            "valkey://user:12?34@host",
            "redis://12?34@host",
            "redis://user:12/34@host",
        ] {
            let problem = ServerConfig::parse(url, "Redis::at")
                .err()
                .unwrap_or_else(|| panic!("{url} is read"))
                .to_string();
            assert!(
                problem.contains("percent-encoded") && !problem.contains("12"),
                "{problem}"
            );
        }
        for (url, address) in [
            ("redis://:12%3f34@host:1/2", "host:1"),
            ("redis://host/0", "host:6379"),
        ] {
            assert_eq!(
                ServerConfig::parse(url, "Redis::at")
                    .map(|server| server.address)
                    .ok()
                    .as_deref(),
                Some(address)
            );
        }
    }
}
