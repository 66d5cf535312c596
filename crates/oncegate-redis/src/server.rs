//! One Redis server: where it is, and who we are there.

use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2};
use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, ProtocolVersion, RedisError};

use crate::failure::{Failure, Problem};
use crate::tls::Tls;

/// What was sent and is not acknowledged by the other machine for so long ends the connection: the
/// keepalive does not act meanwhile.
#[cfg(target_os = "linux")]
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// A silent peer is probed after this long.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Where a server is, and who we are there. Debug and the address hold no secret.
#[derive(Clone)]
pub(crate) struct Server {
    info: Box<ConnectionInfo>,
    address: String,
    /// The setting that named it, for messages.
    named_by: &'static str,
}

/// Host and port, with the port last: a host may be an IPv6 address.
pub(crate) fn joined(host: &str, port: u16) -> String {
    format!("{host}:{port}")
}

impl Server {
    /// Reads a URL that a user gave to `named_by`.
    ///
    /// # Errors
    /// What is wrong with it, without quoting it: it may hold a password.
    pub(crate) fn at(url: &str, named_by: &'static str) -> Result<Self, Problem> {
        // The driver's way to switch verification off, by a word that does not say how dangerous it
        // is.
        let insecure = || {
            Problem::new(format!(
                "{named_by}: the URL ends in #insecure; take that off, and name the authority that signed the server's certificate with \
                 ca_certificate(path)"
            ))
        };
        if url.trim_end().ends_with("#insecure") {
            return Err(insecure());
        }
        // With one of these in a password a part of it would be read as a host or a port, and
        // shown.
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        // Of a socket's name nothing is a password.
        if !scheme.ends_with("unix")
            && rest
                .find(['/', '?', '#'])
                .is_some_and(|end| rest[end..].contains('@'))
        {
            return Err(Problem::new(format!(
                "{named_by}: a character in the URL has to be percent-encoded: / is %2f, @ is %40, # is %23, ? is %3f"
            )));
        }
        let client = Client::open(url).map_err(|_| {
            // The error may quote the URL.
            Problem::new(format!(
                "{named_by}: it is not a Redis URL; write redis://[user[:password]@]host[:port][/database], or rediss:// for TLS"
            ))
        })?;
        if matches!(
            client.get_connection_info().addr(),
            ConnectionAddr::TcpTls { insecure: true, .. }
        ) {
            return Err(insecure());
        }
        let tcp = TcpSettings::default()
            .set_nodelay(true)
            .set_keepalive(socket2::TcpKeepalive::new().with_time(KEEPALIVE));
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(USER_TIMEOUT);
        let info = Box::new(client.get_connection_info().clone().set_tcp_settings(tcp));
        Ok(Self {
            address: info.addr().to_string(),
            info,
            named_by,
        })
    }

    /// The same server over TLS, with these settings.
    pub(crate) fn over(self, tls: &Tls) -> Result<Self, Problem> {
        if !matches!(self.info.addr(), ConnectionAddr::TcpTls { .. }) {
            return Err(Problem::new(format!(
                "{}: a certificate is of use with a rediss:// URL alone; write rediss://",
                self.named_by
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

    /// Another server that is spoken to in the same way.
    pub(crate) fn elsewhere(&self, host: &str, port: u16) -> Self {
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
            address: joined(host, port),
            ..self.clone()
        }
    }

    /// The user who logs in.
    pub(crate) fn user(&self) -> &str {
        self.info.redis_settings().username().unwrap_or("default")
    }

    /// The same server, with no user, password or database.
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

    /// The same server with the same login, and no database.
    pub(crate) fn without_database(&self) -> Self {
        let redis = self.info.redis_settings().clone().set_db(0);
        Self {
            info: Box::new((*self.info).clone().set_redis_settings(redis)),
            ..self.clone()
        }
    }

    /// The host alone.
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

    /// What to connect with.
    pub(crate) fn client(&self, protocol: ProtocolVersion) -> Result<Client, RedisError> {
        if matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
            && rustls::crypto::CryptoProvider::get_default().is_none()
        {
            // Whoever comes second finds one installed, which serves as well.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let redis = self.info.redis_settings().clone().set_protocol(protocol);
        Client::open((*self.info).clone().set_redis_settings(redis))
    }

    /// Why there is no connection. The server's own words are left out: they may repeat the
    /// password.
    pub(crate) fn refused(&self, error: &RedisError, waited: Duration) -> Failure {
        let Self {
            address, named_by, ..
        } = self;
        let code = error.code().unwrap_or_default();
        let detail = error.detail().unwrap_or_default();
        if error.is_timeout() {
            return Failure::not_applied(format!(
                "{named_by}: no answer from Redis at {address} within {waited:?}; is it running and not overloaded, and are host and port in \
                 the URL right?"
            ));
        }
        match (error.kind(), code) {
            // Its alert, after it has seen what we showed.
            (ErrorKind::Io, _) if is_about_our_certificate(&error.to_string()) => {
                Failure::misconfigured(format!(
                    "{named_by}: {address} refuses us over TLS ({error}); if it asks for a certificate, name one that its authority signed, and the \
                 key, with client_certificate(certificate, key)"
                ))
            }
            (ErrorKind::Io, _) if error.to_string().contains("certificate") => {
                Failure::misconfigured(format!(
                    "{named_by}: the certificate of {address} is not trusted ({error}); name the authority that signed it with \
                 ca_certificate(path), and the host as the certificate does"
                ))
            }
            (ErrorKind::Io, _) => Failure::not_applied(format!(
                "{named_by}: no connection to Redis at {address}: {error}; is it running, are host and port in the URL right, and does that \
                 port speak {}?",
                if matches!(self.info.addr(), ConnectionAddr::TcpTls { .. }) {
                    "TLS, as rediss:// wants"
                } else {
                    "without TLS, as redis:// wants"
                }
            )),
            (ErrorKind::Parse | ErrorKind::UnexpectedReturnType, _) => {
                Failure::misconfigured(format!(
                    "{named_by}: what answers at {address} does not speak like Redis; correct host and port in the URL"
                ))
            }
            (ErrorKind::AuthenticationFailed, _) | (_, "WRONGPASS" | "NOAUTH") => {
                Failure::misconfigured(format!(
                    "{named_by}: {address} refuses the user or the password, or wants one; put the right ones into the URL, \
                 redis://user:password@host"
                ))
            }
            // To SELECT the driver gives no code.
            _ if code == "NOPERM" || detail.contains("no permissions") => {
                Failure::misconfigured(format!(
                    "{named_by}: {address} does not let this user connect (NOPERM); let it run HELLO, SELECT, SET, GET, MGET, DEL, PTTL, PEXPIRE, \
                 EVAL, EVALSHA and INFO"
                ))
            }
            (_, "DENIED") => Failure::misconfigured(format!(
                "{named_by}: {address} runs in protected mode and refuses other machines; set a password there, and in the URL"
            )),
            _ if detail.contains("DB index") || error.to_string().contains("switch database") => {
                Failure::misconfigured(format!(
                    "{named_by}: {address} has no such database; correct the number at the end of the URL"
                ))
            }
            _ => Failure::not_applied(format!(
                "{named_by}: Redis at {address} does not take the connection ({}); look into its log",
                if code.is_empty() {
                    error.category()
                } else {
                    code
                }
            )),
        }
    }
}

/// Whether a server that spoke TLS refused what we showed, or that we showed nothing.
fn is_about_our_certificate(error: &str) -> bool {
    let alerts = [
        "Certificate",
        "UnknownCA",
        "HandshakeFailure",
        "AccessDenied",
    ];
    error.contains("fatal alert") && alerts.iter().any(|alert| error.contains(alert))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_server_that_is_not_there_is_told_with_its_setting_and_what_to_do() {
        let gone = RedisError::from(io::Error::from(io::ErrorKind::ConnectionRefused));
        let line = |url: &str, named_by, error: &RedisError| match Server::at(url, named_by)
            .expect("a URL")
            .refused(error, KEEPALIVE)
        {
            Failure::NotApplied(problem) => problem.to_string(),
            other => panic!("{other:?}"),
        };
        for (url, named_by, speaks) in [
            ("redis://:s3cret@host:1", "Redis::at", "without TLS"),
            (
                "rediss://:s3cret@host:1",
                "Redis::cluster",
                "TLS, as rediss://",
            ),
        ] {
            let said = line(url, named_by, &gone);
            assert!(
                said.starts_with(&format!("{named_by}: no connection to Redis at host:1: ")),
                "{said}"
            );
            assert!(
                said.contains("is it running, are host and port in the URL right")
                    && said.contains(speaks),
                "{said}"
            );
            assert!(!said.contains("s3cret") && !said.contains('\n'), "{said}");
        }
        let said = line(
            "redis://host",
            "Redis::at",
            &RedisError::from(io::Error::from(io::ErrorKind::TimedOut)),
        );
        assert!(
            said.starts_with(
                "Redis::at: no answer from Redis at host:6379 within 15s; is it running"
            ),
            "{said}"
        );
    }

    #[test]
    fn no_part_of_a_password_is_taken_for_a_host_or_a_port() {
        for url in [
            "redis://user:12?34@host",
            "rediss://user:12#34@host",
            "valkey://user:12?34@host",
            "redis://12?34@host",
            "redis://user:12/34@host",
        ] {
            let problem = Server::at(url, "Redis::at")
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
                Server::at(url, "Redis::at")
                    .map(|server| server.address)
                    .ok()
                    .as_deref(),
                Some(address)
            );
        }
    }
}
