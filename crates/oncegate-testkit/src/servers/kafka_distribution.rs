//! Downloads the Kafka broker from Maven Central, once, into a cache outside the repository.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::server::{ServerKind, run_program, temporary_directory, write};
use super::{Kafka, ServerError, ServerSet, io_error};

/// Kafka's release in the current [`ServerSet`]. If the set is unknown, this returns the default
/// release: the start of a server reports the error.
fn version() -> &'static str {
    ServerSet::current().unwrap_or_default().kafka()
}

/// Whether the broker's jars are in the cache.
pub fn kafka_is_fetched() -> bool {
    is_complete(&libraries())
}

/// The directory with the broker's jars: `$ONCEGATE_CACHE/kafka-VERSION/libs`, by default in
/// `~/.cache/oncegate`.
///
/// It also contains the jars of MirrorMaker 2. If jars are missing, this function downloads all of
/// them (54 MB), for which it needs `mvn`. Several processes may call it at once.
///
/// # Errors
/// [`ServerError`] if Maven fails or the cache cannot be written.
pub fn fetch_kafka() -> Result<PathBuf, ServerError> {
    let libraries = libraries();
    if is_complete(&libraries) {
        return Ok(libraries);
    }
    println!(
        "fetching the Kafka broker {} into {}",
        version(),
        libraries.display()
    );
    let project = temporary_directory(Kafka::NAME)?;
    write(Kafka::NAME, &project.path().join("pom.xml"), &pom())?;
    let mut maven = Command::new("mvn");
    maven
        .args([
            "-B",
            "-q",
            "dependency:copy-dependencies",
            "-DincludeScope=runtime",
            "-DoutputDirectory=libs",
        ])
        .current_dir(project.path());
    run_program(
        Kafka::NAME,
        &mut maven,
        "mvn dependency:copy-dependencies",
        "check the network and the certificates that Java trusts; ~/.m2/settings.xml sets a mirror or proxy for Maven",
    )?;
    install(&project.path().join("libs"), &libraries)?;
    if is_complete(&libraries) {
        Ok(libraries)
    } else {
        Err(ServerError::IncompleteDownload {
            directory: libraries,
        })
    }
}

/// Installs each jar by renaming a copy. The jar that [`is_complete`] checks is the last, so if it
/// exists, all exist. Keeps existing jars, because a broker may be using them.
fn install(fetched: &Path, libraries: &Path) -> Result<(), ServerError> {
    let install_jar = |name: &OsStr| -> std::io::Result<()> {
        if libraries.join(name).is_file() {
            return Ok(());
        }
        let temporary = libraries.join(format!("{}.{}", name.display(), std::process::id()));
        std::fs::copy(fetched.join(name), &temporary)?;
        std::fs::rename(&temporary, libraries.join(name))
    };
    let copy = || -> std::io::Result<()> {
        std::fs::create_dir_all(libraries)?;
        let mut names = std::fs::read_dir(fetched)?
            .map(|it| Ok(it?.file_name()))
            .collect::<std::io::Result<Vec<_>>>()?;
        names.sort_by_key(|name| *name == *last_jar());
        names.iter().try_for_each(|name| install_jar(name))
    };
    copy().map_err(|source| io_error(Kafka::NAME, "fill the cache", source))
}

fn libraries() -> PathBuf {
    cache().join(format!("kafka-{}", version())).join("libs")
}

/// The directory for downloads: `$ONCEGATE_CACHE`, by default `~/.cache/oncegate`.
pub fn cache() -> PathBuf {
    match (std::env::var_os("ONCEGATE_CACHE"), std::env::var_os("HOME")) {
        (Some(cache), _) => PathBuf::from(cache),
        (None, Some(home)) => Path::new(&home).join(".cache/oncegate"),
        (None, None) => std::env::temp_dir().join("oncegate-cache"),
    }
}

fn is_complete(libraries: &Path) -> bool {
    libraries.join(last_jar()).is_file()
}

/// The jar that is installed last.
fn last_jar() -> String {
    format!("connect-mirror-{}.jar", version())
}

/// Excludes the binding of SLF4J to log4j, with which Kafka 3 would not log through `slf4j-simple`.
const WITHOUT_LOG4J: &str = "<exclusions><exclusion><groupId>org.slf4j</groupId><artifactId>slf4j-reload4j</artifactId></exclusion></exclusions>";

fn pom() -> String {
    let dependencies: String = [
        ("org.apache.kafka", "kafka_2.13", version()),
        ("org.apache.kafka", "kafka-tools", version()),
        ("org.apache.kafka", "connect-mirror", version()),
        ("org.slf4j", "slf4j-simple", "1.7.36"),
    ]
    .into_iter()
    .map(|(group, artifact, version)| {
        format!("<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>{WITHOUT_LOG4J}</dependency>\n")
    })
    .collect();
    format!(
        "<project xmlns=\"http://maven.apache.org/POM/4.0.0\">
<modelVersion>4.0.0</modelVersion>
<groupId>oncegate</groupId><artifactId>kafka-broker</artifactId><version>1</version>
<dependencies>
{dependencies}</dependencies>
</project>
"
    )
}
