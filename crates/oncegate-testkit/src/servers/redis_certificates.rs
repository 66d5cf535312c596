//! Certificates for a Redis with TLS, made by `openssl` in the server's directory.

use std::path::Path;
use std::process::Command;

use super::ServerError;
use super::server::write;

/// The certificate of the authority.
pub(crate) const AUTHORITY: &str = "authority.crt";
/// The server's certificate.
pub(crate) const CERTIFICATE: &str = "server.crt";
/// The server's key.
pub(crate) const KEY: &str = "server.key";

const SERVER: &str = "Redis";
const ADVICE: &str = "install openssl";

/// An authority that is no server, and a server's certificate that is no authority: clients refuse anything else.
const EXTENSIONS: &str = "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\n";

/// Makes an authority, and a certificate for `localhost` and 127.0.0.1 signed by it, valid for a day.
pub(crate) fn make(directory: &Path) -> Result<(), ServerError> {
    write(SERVER, &directory.join("extensions"), EXTENSIONS)?;
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let authority = ["-x509", "-days", "1", "-subj", "/CN=oncegate test authority", "-keyout", "authority.key", "-out", AUTHORITY];
    openssl(directory, "req", &[&curve[..], &authority].concat())?;
    openssl(directory, "req", &[&curve[..], &["-subj", "/CN=localhost", "-keyout", KEY, "-out", "server.csr"]].concat())?;
    let sign = ["-req", "-in", "server.csr", "-CA", AUTHORITY, "-CAkey", "authority.key", "-CAcreateserial", "-days", "1"];
    openssl(directory, "x509", &[&sign[..], &["-extfile", "extensions", "-out", CERTIFICATE]].concat())
}

fn openssl(directory: &Path, command: &str, arguments: &[&str]) -> Result<(), ServerError> {
    let run = Command::new("openssl").arg(command).args(arguments).current_dir(directory).output();
    let output = run.map_err(|source| ServerError::Io { server: SERVER, action: "run openssl".into(), source })?;
    if output.status.success() {
        return Ok(());
    }
    Err(ServerError::ProgramFailed {
        server: SERVER,
        program: format!("openssl {command}"),
        output: String::from_utf8_lossy(&output.stderr).into_owned(),
        advice: ADVICE,
    })
}
