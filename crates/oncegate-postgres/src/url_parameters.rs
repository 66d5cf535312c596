//! The parameters of a URL.
//!
//! # Workaround
//! - *Symptom:* a misspelled parameter is ignored, so `ssl_mode=verify-full` connects without
//!   verification. *Version:* sqlx 0.9.0.
//! - *Upstream:* nothing: intended, sqlx logs a warning.
//! - *Test:* `wrong_settings_are_named` in `tests/postgres`.
//! - *May be removed* when sqlx returns an error.

/// The first parameter of a URL that sqlx ignores.
pub(crate) fn first_unknown(url: &str) -> Option<&str> {
    const KNOWN: [&str; 18] = [
        "sslmode",
        "ssl-mode",
        "sslrootcert",
        "ssl-root-cert",
        "ssl-ca",
        "sslcert",
        "ssl-cert",
        "sslkey",
        "ssl-key",
        "statement-cache-capacity",
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "password",
        "application_name",
        "options",
    ];
    let (_, query) = url.split_once('?')?;
    let mut names = query
        .split('#')
        .next()?
        .split('&')
        .filter_map(|it| it.split('=').next());
    names.find(|name| {
        let is_option = name.starts_with("options[") || name.starts_with("options%5B");
        !name.is_empty() && !is_option && !KNOWN.contains(name)
    })
}
