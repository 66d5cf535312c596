//! Describes the machine of a run.

use std::process::Command;

use oncegate_testkit::servers::ServerSet;
use serde::{Deserialize, Serialize};

/// The machine of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// The number of processors and their name.
    pub processor: String,
    /// Memory, in MiB.
    pub memory_mib: u64,
    /// The kernel.
    pub kernel: String,
    /// The load average at the start: near 0 on an idle machine.
    pub load: String,
    /// The commit, with `+` if there are uncommitted changes.
    pub commit: String,
    /// The versions of servers, clients and the compiler.
    pub versions: Vec<String>,
}

impl Machine {
    /// This machine now; unknown values are empty.
    pub fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let value = |text: &str, name: &str| {
            let line = text
                .lines()
                .find(|line| line.starts_with(name))
                .unwrap_or_default();
            line.split_once(':')
                .map(|(_, value)| value.trim().to_owned())
                .unwrap_or_default()
        };
        let processors = std::thread::available_parallelism().map_or(0, usize::from);
        let memory = value(&read("/proc/meminfo"), "MemTotal");
        let changed = if first_line_of("git", &["status", "--porcelain"]).is_empty() {
            ""
        } else {
            "+"
        };
        let set = ServerSet::current().unwrap_or_default();
        let first_line_of_set = |words: &[&str]| {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            first_line(&mut set.command(&command))
        };
        Self {
            processor: format!(
                "{processors} × {}",
                value(&read("/proc/cpuinfo"), "model name")
            ),
            memory_mib: memory.trim_end_matches(" kB").parse::<u64>().unwrap_or(0) / 1024,
            kernel: first_line_of("uname", &["-sr"]),
            load: read("/proc/loadavg").trim().to_owned(),
            commit: first_line_of("git", &["rev-parse", "--short", "HEAD"]) + changed,
            versions: vec![
                first_line_of("rustc", &["--version"]),
                first_line_of_set(&[set.redis_server(), "--version"]),
                // `rabbitmq_server-<version>`
                first_line_of_set(&["sh", "-c", "ls /usr/lib/rabbitmq/lib"]),
                first_line_of("java", &["--version"]),
                format!("librdkafka {}", rdkafka::util::get_rdkafka_version().1),
                format!("kafka {}", kafka()),
            ],
        }
    }
}

fn kafka() -> String {
    let libraries = oncegate_testkit::servers::fetch_kafka().unwrap_or_default();
    let directory = libraries
        .parent()
        .and_then(|parent| parent.file_name())
        .unwrap_or_default();
    directory
        .to_string_lossy()
        .trim_start_matches("kafka-")
        .to_owned()
}

/// The first line that a program prints.
fn first_line_of(program: &str, arguments: &[&str]) -> String {
    first_line(Command::new(program).args(arguments))
}

fn first_line(command: &mut Command) -> String {
    let printed = command
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    printed.lines().next().unwrap_or_default().to_owned()
}
