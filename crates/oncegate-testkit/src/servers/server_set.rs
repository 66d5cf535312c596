//! Which releases of the servers are started: RabbitMQ, Redis and PostgreSQL of the host or of
//! Debian sid, and the release of Kafka.
//!
//! The packages of sid are unpacked into the cache and not installed, so the host does not change.
//! Their programs run in a mount namespace in which the unpacked `/usr` is mounted over the host's
//! `/usr`; process ids, `/etc`, `/proc` and `/tmp` are those of the host.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use super::kafka_distribution::cache;
use super::server::{run_program, write};
use super::{ServerError, io_error};

/// The environment variable that names a [`ServerSet`].
pub const SERVER_SET: &str = "ONCEGATE_SERVERS";

const NAME: &str = "Debian sid";
const ADVICE: &str = "this needs root, a Debian host, and a mirror that has the suite sid";

/// The file that is written after all packages are unpacked. Its name changes when packages are
/// added, so that an older cache counts as incomplete.
const COMPLETE: &str = "complete-with-postgresql";

/// The packages to unpack: the servers, and the programs that their start scripts call. Redis
/// is taken from experimental, whose release is newer than that of sid.
const PACKAGES: [&str; 13] = [
    "rabbitmq-server",
    "valkey-server",
    "valkey-tools",
    "postgresql-18",
    "redis-server/experimental",
    "redis-tools/experimental",
    "libc-bin",
    "dash",
    "bash",
    "coreutils",
    "sed",
    "grep",
    "util-linux",
];

/// A choice of releases of RabbitMQ, Redis (or Valkey), PostgreSQL and Kafka.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerSet {
    /// The packages of the host. Debian 12: RabbitMQ 3.10, Redis 7.0 and PostgreSQL 15.
    #[default]
    Debian12,
    /// RabbitMQ 4, Valkey and PostgreSQL 18 of Debian sid.
    Today,
    /// RabbitMQ 4 and PostgreSQL 18 of Debian sid and Redis 8 of Debian experimental.
    TodayRedis,
    /// The packages of the host with Kafka 3.9, the last release before 4.0.
    Kafka39,
}

impl ServerSet {
    /// The set that the environment variable [`SERVER_SET`] names; `debian12` if it is not set.
    ///
    /// # Errors
    /// [`ServerError::UnknownServerSet`] if the variable names no set.
    pub fn current() -> Result<Self, ServerError> {
        std::env::var(SERVER_SET).map_or(Ok(Self::default()), |name| name.parse())
    }

    /// The name of the set, which is the value of [`SERVER_SET`].
    pub fn name(self) -> &'static str {
        match self {
            Self::Debian12 => "debian12",
            Self::Today => "today",
            Self::TodayRedis => "today-redis",
            Self::Kafka39 => "kafka-3.9",
        }
    }

    /// Downloads and unpacks the packages of the set (130 MB), unless they are in the cache or the
    /// set uses those of the host. Resumes an interrupted download. Needs root and a Debian host.
    ///
    /// # Errors
    /// [`ServerError`] if a program fails or the cache cannot be written.
    pub fn fetch(self) -> Result<(), ServerError> {
        let root = root();
        if !self.is_unpacked() || root.join(COMPLETE).is_file() {
            return Ok(());
        }
        eprintln!(
            "fetching RabbitMQ, Valkey, Redis and PostgreSQL of Debian sid into {}",
            root.display()
        );
        let apt = cache().join("sid-apt");
        download(&apt)?;
        unpack(&apt.join("cache/archives"), &root)?;
        remove(&apt)
    }

    /// The name of the program of a Redis server.
    pub fn redis_server(self) -> &'static str {
        match self {
            Self::Debian12 | Self::TodayRedis | Self::Kafka39 => "redis-server",
            Self::Today => "valkey-server",
        }
    }

    /// The name of the command line client of a Redis server.
    pub fn redis_cli(self) -> &'static str {
        match self {
            Self::Debian12 | Self::TodayRedis | Self::Kafka39 => "redis-cli",
            Self::Today => "valkey-cli",
        }
    }

    /// The release series of RabbitMQ.
    pub fn rabbitmq(self) -> &'static str {
        match self {
            Self::Debian12 | Self::Kafka39 => "3.10",
            Self::Today | Self::TodayRedis => "4.3",
        }
    }

    /// The release of the Kafka broker.
    pub fn kafka(self) -> &'static str {
        match self {
            Self::Debian12 | Self::Today | Self::TodayRedis => "4.3.0",
            Self::Kafka39 => "3.9.1",
        }
    }

    /// Whether RabbitMQ, Redis and PostgreSQL of this set come from the cache, not from the host.
    fn is_unpacked(self) -> bool {
        matches!(self, Self::Today | Self::TodayRedis)
    }

    /// The command with the program taken from this set. The wrapping commands replace themselves,
    /// so the program has the process id of the spawned child.
    pub fn command(self, command: &Command) -> Command {
        if !self.is_unpacked() {
            return prefixed(&[], command);
        }
        let mount_and_run = "mount --bind \"$0/usr\" /usr && exec \"$@\"";
        let prefix: Vec<OsString> = ["unshare", "--mount", "sh", "-c", mount_and_run]
            .into_iter()
            .map(OsString::from)
            .chain([root().into_os_string()])
            .collect();
        let mut command = prefixed(&prefix, command);
        // The only locale of the unpacked packages.
        command.env("LC_ALL", "C.UTF-8");
        command
    }
}

impl FromStr for ServerSet {
    type Err = ServerError;

    fn from_str(name: &str) -> Result<Self, ServerError> {
        [Self::Debian12, Self::Today, Self::TodayRedis, Self::Kafka39]
            .into_iter()
            .find(|set| set.name() == name)
            .ok_or_else(|| ServerError::UnknownServerSet {
                name: name.to_owned(),
            })
    }
}

/// The command with these words before it, and with its environment.
pub(crate) fn prefixed(prefix: &[OsString], command: &Command) -> Command {
    let mut words = prefix
        .iter()
        .map(OsString::as_os_str)
        .chain([command.get_program()])
        .chain(command.get_args());
    let mut prefixed = Command::new(words.next().unwrap_or_default());
    prefixed.args(words);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => prefixed.env(name, value),
            None => prefixed.env_remove(name),
        };
    }
    prefixed
}

fn root() -> PathBuf {
    cache().join("sid")
}

/// Downloads the packages and their dependencies into `apt/cache/archives`. The package database in
/// `apt` has no installed package, so that `apt-get` downloads every dependency.
fn download(apt: &Path) -> Result<(), ServerError> {
    for directory in ["state/lists/partial", "cache/archives/partial"] {
        std::fs::create_dir_all(apt.join(directory))
            .map_err(|source| io_error(NAME, "create the download directory", source))?;
    }
    write(NAME, &apt.join("status"), "")?;
    let (name, sources) = sources_of_host()?;
    let sources_path = apt.join(name);
    write(NAME, &sources_path, &sources)?;
    let option = |name: &str, path: &Path| format!("-o{name}={}", path.display());
    let options = [
        "-qq".to_owned(),
        option("Dir::State", &apt.join("state")),
        option("Dir::State::status", &apt.join("status")),
        option("Dir::Cache", &apt.join("cache")),
        option("Dir::Etc::SourceList", &sources_path),
        "-oDir::Etc::SourceParts=/dev/null".to_owned(),
        "-oDir::Etc::Preferences=/dev/null".to_owned(),
        "-oDir::Etc::PreferencesParts=/dev/null".to_owned(),
        "-oAPT::Sandbox::User=root".to_owned(),
        "-oAPT::Install-Recommends=false".to_owned(),
        "-oAcquire::Retries=3".to_owned(),
    ];
    let mut update = Command::new("apt-get");
    run_program(
        NAME,
        update.args(&options).arg("update"),
        "apt-get update",
        ADVICE,
    )?;
    let mut install = Command::new("apt-get");
    install
        .args(&options)
        .args(["-y", "--download-only", "install"])
        .args(PACKAGES);
    run_program(NAME, &mut install, "apt-get install", ADVICE)?;
    Ok(())
}

/// Unpacks all packages of a directory. No script of a package runs.
fn unpack(archives: &Path, root: &Path) -> Result<(), ServerError> {
    let partial = root.with_extension(format!("partial-{}", std::process::id()));
    std::fs::create_dir_all(&partial)
        .map_err(|source| io_error(NAME, format!("create {}", partial.display()), source))?;
    let entries = std::fs::read_dir(archives)
        .map_err(|source| io_error(NAME, format!("read {}", archives.display()), source))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "deb") {
            let mut unpack = Command::new("dpkg-deb");
            unpack.arg("-x").arg(&path).arg(&partial);
            run_program(NAME, &mut unpack, "dpkg-deb -x", ADVICE)?;
        }
    }
    for unused in ["doc", "man", "locale"] {
        remove(&partial.join("usr/share").join(unused))?;
    }
    write(NAME, &partial.join(COMPLETE), "")?;
    match std::fs::rename(&partial, root) {
        // Another process has unpacked the packages meanwhile.
        Err(_) if root.join(COMPLETE).is_file() => remove(&partial),
        outcome => outcome.map_err(|source| io_error(NAME, "rename the unpacked packages", source)),
    }
}

fn remove(directory: &Path) -> Result<(), ServerError> {
    match std::fs::remove_dir_all(directory) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(io_error(
            NAME,
            format!("remove {}", directory.display()),
            source,
        )),
        _ => Ok(()),
    }
}

/// The first package source of the host, changed to the suites sid and experimental, and the name
/// of the file to write it to.
fn sources_of_host() -> Result<(&'static str, String), ServerError> {
    let one_line = std::fs::read_to_string("/etc/apt/sources.list").unwrap_or_default();
    if let Some(sources) = for_sid_from_lines(&one_line) {
        return Ok(("host.list", sources));
    }
    let directory = "/etc/apt/sources.list.d";
    let entries = std::fs::read_dir(directory)
        .map_err(|source| io_error(NAME, format!("read {directory}"), source))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut texts = paths
        .into_iter()
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "sources")
        })
        .filter_map(|path| std::fs::read_to_string(path).ok());
    texts
        .find_map(|text| for_sid_from_stanzas(&text))
        .map(|sources| ("host.sources", sources))
        .ok_or_else(|| {
            io_error(
                NAME,
                "find a package source of the host",
                std::io::ErrorKind::NotFound.into(),
            )
        })
}

/// The first line of the form `deb [options] mirror suite components`, with the other suites.
fn for_sid_from_lines(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("deb "))?;
    let mirror = line
        .split_whitespace()
        .position(|word| word.contains("://"))?;
    let words: Vec<&str> = line.split_whitespace().take(mirror + 1).collect();
    let before = words.join(" ");
    Some(format!("{before} sid main\n{before} experimental main\n"))
}

/// The first stanza of the deb822 format that has `Suites:`, with the other suites.
fn for_sid_from_stanzas(text: &str) -> Option<String> {
    let stanza = text
        .split("\n\n")
        .find(|stanza| stanza.contains("Suites:"))?;
    let lines = stanza.lines().map(|line| {
        if line.starts_with("Suites:") {
            "Suites: sid experimental\n".to_owned()
        } else {
            format!("{line}\n")
        }
    });
    Some(lines.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_known_by_its_name() {
        for set in [
            ServerSet::Debian12,
            ServerSet::Today,
            ServerSet::TodayRedis,
            ServerSet::Kafka39,
        ] {
            assert_eq!(set.name().parse::<ServerSet>().expect("a set"), set);
        }
        let error = "yesterday".parse::<ServerSet>().expect_err("unknown");
        assert!(error.to_string().contains("today-redis"), "{error}");
    }

    #[test]
    fn the_sources_of_the_host_are_used_with_the_suites_of_sid() {
        let stanzas = "Types: deb\nURIs: mirror:a\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: key\n\nTypes: deb\nSuites: other\n";
        assert_eq!(
            for_sid_from_stanzas(stanzas).as_deref(),
            Some(
                "Types: deb\nURIs: mirror:a\nSuites: sid experimental\nComponents: main\nSigned-By: key\n"
            )
        );
        let line = "# comment\ndeb [signed-by=/key] file:///mirror bookworm main contrib\n";
        assert_eq!(
            for_sid_from_lines(line).as_deref(),
            Some(
                "deb [signed-by=/key] file:///mirror sid main\ndeb [signed-by=/key] file:///mirror experimental main\n"
            )
        );
        assert_eq!(for_sid_from_lines("# nothing"), None);
    }

    #[test]
    fn a_prefix_keeps_arguments_and_environment() {
        let mut command = Command::new("a");
        command.arg("b").env("C", "d");
        let prefixed = prefixed(&["setsid".into()], &command);
        assert_eq!(format!("{prefixed:?}"), r#"C="d" "setsid" "a" "b""#);
    }
}
