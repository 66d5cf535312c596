//! Certificates for servers with TLS, which `openssl` makes in the server's directory.

use std::path::Path;
use std::process::Command;

use super::ServerError;
use super::server::{run_program, write};

/// The file with the certificate of the authority (CA).
pub(crate) const AUTHORITY: &str = "authority.crt";
/// The file with the server's certificate.
pub(crate) const CERTIFICATE: &str = "server.crt";
/// The file with the server's key.
pub(crate) const KEY: &str = "server.key";
/// The file with a client's certificate.
pub(crate) const CLIENT_CERTIFICATE: &str = "client.crt";
/// The file with that client's key.
pub(crate) const CLIENT_KEY: &str = "client.key";

const ADVICE: &str = "install openssl";
/// The arguments that make a new key without a passphrase.
const NEW_KEY: [&str; 5] = [
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
];

/// The extensions of the server's certificate. Without extensions `openssl` makes CA certificates,
/// which TLS libraries refuse for servers and clients.
const SERVER_EXTENSIONS: &str = "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\n";
/// The extensions of the client's certificate.
const CLIENT_EXTENSIONS: &str = "basicConstraints=critical,CA:FALSE\nextendedKeyUsage=clientAuth\n";

/// Makes an authority, and a certificate for `localhost` and 127.0.0.1 that the authority signs.
/// Both are valid for a day.
pub(crate) fn make(server: &'static str, directory: &Path) -> Result<(), ServerError> {
    let authority = [
        "-x509",
        "-days",
        "1",
        "-subj",
        "/CN=oncegate test authority",
        "-keyout",
        "authority.key",
        "-out",
        AUTHORITY,
    ];
    openssl(
        server,
        directory,
        "req",
        &[&NEW_KEY[..], &authority].concat(),
    )?;
    sign(
        server,
        directory,
        "/CN=localhost",
        SERVER_EXTENSIONS,
        CERTIFICATE,
        KEY,
    )
}

/// Makes a client's certificate, signed by the authority that [`make`] made.
pub(crate) fn make_client(server: &'static str, directory: &Path) -> Result<(), ServerError> {
    sign(
        server,
        directory,
        "/CN=oncegate test client",
        CLIENT_EXTENSIONS,
        CLIENT_CERTIFICATE,
        CLIENT_KEY,
    )
}

fn sign(
    server: &'static str,
    directory: &Path,
    subject: &str,
    extensions: &str,
    certificate: &str,
    key: &str,
) -> Result<(), ServerError> {
    write(server, &directory.join("extensions"), extensions)?;
    openssl(
        server,
        directory,
        "req",
        &[
            &NEW_KEY[..],
            &["-subj", subject, "-keyout", key, "-out", "request"],
        ]
        .concat(),
    )?;
    let sign = [
        "-req",
        "-in",
        "request",
        "-CA",
        AUTHORITY,
        "-CAkey",
        "authority.key",
        "-CAcreateserial",
        "-days",
        "1",
    ];
    openssl(
        server,
        directory,
        "x509",
        &[&sign[..], &["-extfile", "extensions", "-out", certificate]].concat(),
    )
}

fn openssl(
    server: &'static str,
    directory: &Path,
    command: &str,
    arguments: &[&str],
) -> Result<(), ServerError> {
    let mut openssl = Command::new("openssl");
    openssl.arg(command).args(arguments).current_dir(directory);
    run_program(server, &mut openssl, &format!("openssl {command}"), ADVICE)?;
    Ok(())
}
