//! `setup`: installs the requirements of the build and the tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Error;

/// A requirement of the build or the tests, and the Debian packages that contain it.
struct Requirement {
    /// What is required, and for what.
    what: &'static str,
    is_met: fn() -> bool,
    packages: &'static [&'static str],
}

const REQUIREMENTS: &[Requirement] = &[
    Requirement {
        what: "a C and C++ compiler and make, for librdkafka",
        is_met: || ["gcc", "g++", "make"].into_iter().all(on_path),
        packages: &["gcc", "g++", "make", "libc6-dev"],
    },
    Requirement {
        what: "pkg-config, for librdkafka",
        is_met: || on_path("pkg-config"),
        packages: &["pkg-config"],
    },
    Requirement {
        what: "the headers of zlib, for librdkafka",
        is_met: || pkg_config_knows("zlib"),
        packages: &["zlib1g-dev"],
    },
    Requirement {
        what: "the headers of OpenSSL, for librdkafka",
        is_met: || pkg_config_knows("openssl"),
        packages: &["libssl-dev"],
    },
    Requirement {
        what: "the Redis server",
        is_met: || on_path("redis-server"),
        packages: &["redis-server"],
    },
    Requirement {
        what: "redis-cli, which creates a Redis Cluster",
        is_met: || on_path("redis-cli"),
        packages: &["redis-tools"],
    },
    Requirement {
        what: "openssl, for the certificates of test servers",
        is_met: || on_path("openssl"),
        packages: &["openssl"],
    },
    Requirement {
        what: "valgrind, which counts instructions",
        is_met: || on_path("valgrind"),
        packages: &["valgrind"],
    },
    Requirement {
        what: "Prometheus and promtool, for the alert rules and the dashboard",
        is_met: || on_path("prometheus") && on_path("promtool"),
        packages: &["prometheus"],
    },
    Requirement {
        what: "the RabbitMQ server",
        is_met: || Path::new(oncegate_testkit::servers::RABBITMQ_SERVER).exists(),
        packages: &["rabbitmq-server"],
    },
    Requirement {
        what: "the PostgreSQL server",
        is_met: oncegate_testkit::servers::postgres_is_installed,
        packages: &["postgresql"],
    },
    Requirement {
        what: "a Java runtime, for the Kafka broker",
        is_met: || succeeds(Command::new("java").arg("-version")),
        packages: &["default-jre-headless"],
    },
    Requirement {
        what: "Maven, which fetches the Kafka broker",
        is_met: || oncegate_testkit::servers::kafka_is_fetched() || on_path("mvn"),
        packages: &["maven"],
    },
];

/// Installs missing requirements and prints each step.
///
/// Installed packages may start servers on their default ports; the tests do not use these servers.
pub(crate) fn run() -> Result<(), Error> {
    let missing: Vec<&Requirement> = REQUIREMENTS
        .iter()
        .filter(|requirement| !(requirement.is_met)())
        .collect();
    if missing.is_empty() {
        println!("setup: all requirements are installed");
    } else {
        install(&missing)?;
    }
    println!(
        "setup: Kafka broker in {}",
        oncegate_testkit::servers::fetch_kafka()?.display()
    );
    oncegate_testkit::servers::ServerSet::current()?.fetch()?;
    Ok(())
}

fn install(missing: &[&Requirement]) -> Result<(), Error> {
    for requirement in missing {
        println!("setup: missing: {}", requirement.what);
    }
    let packages: Vec<&str> = missing
        .iter()
        .flat_map(|requirement| requirement.packages)
        .copied()
        .collect();
    if !on_path("apt-get") {
        return Err(Error::ActionRequired(format!(
            "apt-get is not available; install the packages of your system that correspond to Debian's {}, then run this again",
            packages.join(", ")
        )));
    }
    println!("setup: apt-get update");
    run_program(as_root("apt-get").args(["update", "-q"]))?;
    println!("setup: apt-get install {}", packages.join(" "));
    run_program(
        as_root("env")
            .args([
                "DEBIAN_FRONTEND=noninteractive",
                "apt-get",
                "install",
                "-q",
                "-y",
                "--no-install-recommends",
            ])
            .args(&packages),
    )?;
    match REQUIREMENTS
        .iter()
        .find(|requirement| !(requirement.is_met)())
    {
        None => Ok(()),
        Some(requirement) => Err(Error::ActionRequired(format!(
            "apt-get installed {}, but {} is still missing; install it by hand",
            packages.join(", "),
            requirement.what
        ))),
    }
}

fn as_root(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut sudo = Command::new("sudo");
    sudo.arg(program);
    sudo
}

/// Runs a program to its end. The program inherits standard output and standard error.
pub(crate) fn run_program(command: &mut Command) -> Result<(), Error> {
    let shown = format!("{command:?}").replace('"', "");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(Error::Failed(shown)),
        Err(source) => Err(Error::CannotRun {
            program: shown,
            source,
        }),
    }
}

/// A cargo command in the workspace's directory.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

fn pkg_config_knows(library: &str) -> bool {
    succeeds(Command::new("pkg-config").args(["--exists", library]))
}

fn succeeds(command: &mut Command) -> bool {
    command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

pub(crate) fn on_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
    })
}

/// The workspace's directory.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace")
}

/// Cargo's target directory, which also holds the state of `services`.
pub(crate) fn target_directory() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}
