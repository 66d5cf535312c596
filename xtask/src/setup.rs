//! Brings a fresh machine to where the tests can run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Error;

/// Something the build or the tests need, and the Debian packages that bring it.
struct Need {
    what: &'static str,
    is_met: fn() -> bool,
    packages: &'static [&'static str],
}

const NEEDS: &[Need] = &[
    Need {
        what: "a C and C++ compiler and make, for librdkafka",
        is_met: || ["gcc", "g++", "make"].into_iter().all(on_path),
        packages: &["gcc", "g++", "make", "libc6-dev"],
    },
    Need {
        what: "pkg-config, for librdkafka",
        is_met: || on_path("pkg-config"),
        packages: &["pkg-config"],
    },
    Need {
        what: "the headers of zlib, for librdkafka",
        is_met: || pkg_config_knows("zlib"),
        packages: &["zlib1g-dev"],
    },
    Need {
        what: "the headers of OpenSSL, for librdkafka",
        is_met: || pkg_config_knows("openssl"),
        packages: &["libssl-dev"],
    },
    Need {
        what: "the Redis server",
        is_met: || on_path("redis-server"),
        packages: &["redis-server"],
    },
    Need {
        what: "redis-cli, which makes a Cluster",
        is_met: || on_path("redis-cli"),
        packages: &["redis-tools"],
    },
    Need {
        what: "openssl, for the certificates of a Redis with TLS",
        is_met: || on_path("openssl"),
        packages: &["openssl"],
    },
    Need {
        what: "valgrind, which counts instructions",
        is_met: || on_path("valgrind"),
        packages: &["valgrind"],
    },
    Need {
        what: "Prometheus and promtool, for the alert rules and the dashboard",
        is_met: || on_path("prometheus") && on_path("promtool"),
        packages: &["prometheus"],
    },
    Need {
        what: "the RabbitMQ server",
        is_met: || Path::new(oncegate_testkit::servers::RABBITMQ_SERVER).exists(),
        packages: &["rabbitmq-server"],
    },
    Need {
        what: "a Java runtime, for the Kafka broker",
        is_met: || succeeds(Command::new("java").arg("-version")),
        packages: &["default-jre-headless"],
    },
    Need {
        what: "Maven, which fetches the Kafka broker",
        is_met: || oncegate_testkit::servers::kafka_is_fetched() || on_path("mvn"),
        packages: &["maven"],
    },
];

/// Installs what is missing, says what it does while doing it, and does nothing at all where
/// nothing is missing.
///
/// The packages may start services of their own on their usual ports; the tests never use those.
pub(crate) fn run() -> Result<(), Error> {
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !(need.is_met)()).collect();
    if missing.is_empty() {
        println!("setup: everything is here");
    } else {
        install(&missing)?;
    }
    println!(
        "setup: Kafka broker in {}",
        oncegate_testkit::servers::fetch_kafka()?.display()
    );
    Ok(())
}

fn install(missing: &[&Need]) -> Result<(), Error> {
    for need in missing {
        println!("setup: missing: {}", need.what);
    }
    let packages: Vec<&str> = missing
        .iter()
        .flat_map(|need| need.packages)
        .copied()
        .collect();
    if !on_path("apt-get") {
        return Err(Error::ByHand(format!(
            "there is no apt-get here; install what your system calls {}, then run this again",
            packages.join(", ")
        )));
    }
    println!("setup: apt-get update");
    call(as_root("apt-get").args(["update", "-q"]))?;
    println!("setup: apt-get install {}", packages.join(" "));
    call(
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
    match NEEDS.iter().find(|need| !(need.is_met)()) {
        None => Ok(()),
        Some(need) => Err(Error::ByHand(format!(
            "apt-get installed {}, and still {} is missing",
            packages.join(", "),
            need.what
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

/// Runs a program to its end, its output going where ours goes.
pub(crate) fn call(command: &mut Command) -> Result<(), Error> {
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
        .expect("xtask lies in the workspace")
}

/// Where cargo builds, and where the files about running services lie.
pub(crate) fn target_directory() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}
