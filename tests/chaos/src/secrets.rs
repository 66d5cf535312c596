//! I13: searches all files of a run for its passwords.

use std::io::{self, BufRead, BufReader};
use std::path::Path;

use crate::counters::SCRAPE;
use crate::ledger::What;

/// A password and its server.
#[derive(Clone)]
pub struct Secret {
    /// The name of the server in the report.
    pub of: &'static str,
    /// The password.
    pub text: String,
}

/// A random password of letters and digits.
pub fn random_password() -> String {
    let mut random = fastrand::Rng::new();
    format!("Canary{:016x}", random.u64(..))
}

/// Searches every file of a folder for secrets. They are letters and digits, so no format escapes
/// them.
///
/// # Errors
/// A file cannot be read, or no consumer has written its Prometheus text.
pub fn find(folder: &Path, secrets: &[Secret]) -> io::Result<Vec<What>> {
    let (mut found, mut scrapes) = (Vec::new(), 0);
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if !path.is_file() {
            continue;
        }
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        scrapes += u32::from(
            path.extension()
                .is_some_and(|extension| extension == SCRAPE),
        );
        let mut reader = BufReader::new(std::fs::File::open(&path)?);
        let (mut line, mut number) = (Vec::new(), 0_u64);
        while reader.read_until(b'\n', &mut line)? > 0 {
            number += 1;
            // A cheap test first: few of millions of lines match.
            if holds(&line, b"Canary") {
                let text = secrets
                    .iter()
                    .filter(|secret| holds(&line, secret.text.as_bytes()));
                found.extend(text.map(|secret| What::Leaked {
                    secret: secret.of.to_owned(),
                    place: format!("{name}, line {number}"),
                }));
            }
            line.clear();
        }
    }
    if scrapes == 0 {
        return Err(io::Error::other(format!(
            "{} has no file with the Prometheus text",
            folder.display()
        )));
    }
    Ok(found)
}

fn holds(line: &[u8], text: &[u8]) -> bool {
    line.windows(text.len()).any(|part| part == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_found_in_any_file() {
        let folder = tempfile::tempdir().unwrap();
        let secret = |of| Secret {
            of,
            text: random_password(),
        };
        let secrets = [secret("Redis"), secret("RabbitMQ")];
        std::fs::write(
            folder.path().join("c0.1.log"),
            format!(
                "INFO well\nWARN redis://:{}@127.0.0.1:1 is unavailable\n",
                secrets[0].text
            ),
        )
        .unwrap();
        std::fs::write(
            folder.path().join("plan.json"),
            format!("{{\"url\":\"amqp://guest:{}@h\"", secrets[1].text),
        )
        .unwrap();
        std::fs::write(folder.path().join("sink.jsonl"), b"\xffCanary of another\n").unwrap();
        std::fs::write(folder.path().join("c0.1.metrics"), "oncegate_in_flight 3\n").unwrap();

        let mut places: Vec<String> = find(folder.path(), &secrets)
            .unwrap()
            .iter()
            .map(|found| format!("{found:?}"))
            .collect();

        places.sort();
        assert_eq!(places.len(), 2, "{places:?}");
        assert!(
            places[0].contains("RabbitMQ") && places[0].contains("plan.json, line 1"),
            "{places:?}"
        );
        assert!(
            places[1].contains("Redis") && places[1].contains("c0.1.log, line 2"),
            "{places:?}"
        );
        assert!(
            !places.iter().any(|place| place.contains("Canary")),
            "the finding contains the password: {places:?}"
        );
    }

    #[test]
    fn a_folder_without_metrics_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("c0.1.log"), "INFO well\n").unwrap();
        assert!(
            find(folder.path(), &[])
                .unwrap_err()
                .to_string()
                .contains("Prometheus")
        );
    }
}
