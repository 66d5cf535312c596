//! What `services up` remembers for `services down`: a file of lines, one a process or a directory.

use std::path::PathBuf;

use oncegate_testkit::servers::{Detached, ProcessId};

/// The servers that run, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) services: Vec<Service>,
}

/// One server that runs on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) name: String,
    /// The variable that names it to the tests, and its value.
    pub(crate) variable: String,
    pub(crate) address: String,
    pub(crate) detached: Detached,
}

/// A state file that is not one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the state file is not `name variable=address directory number:start…`")]
pub(crate) struct Unreadable {
    line: usize,
}

impl State {
    /// One line a service: its name, its address, its processes in the order in which to stop them,
    /// its directory, which comes last because its name may hold spaces.
    pub(crate) fn to_text(&self) -> String {
        self.services
            .iter()
            .map(|service| {
                let Service {
                    name,
                    variable,
                    address,
                    detached,
                } = service;
                let processes: Vec<String> = detached
                    .processes
                    .iter()
                    .map(ProcessId::to_string)
                    .collect();
                format!(
                    "{name} {variable}={address} {} {}\n",
                    processes.join(","),
                    detached.directory.display()
                )
            })
            .collect()
    }

    /// Reads what [`State::to_text`] wrote.
    pub(crate) fn parse(text: &str) -> Result<Self, Unreadable> {
        let services = text
            .lines()
            .enumerate()
            .map(|(index, line)| parse_line(line).ok_or(Unreadable { line: index + 1 }))
            .collect::<Result<_, _>>()?;
        Ok(Self { services })
    }

    /// The lines to put into a shell's environment.
    pub(crate) fn environment(&self) -> String {
        self.services
            .iter()
            .map(|service| format!("{}={}\n", service.variable, service.address))
            .collect()
    }
}

fn parse_line(line: &str) -> Option<Service> {
    let mut parts = line.splitn(4, ' ');
    let name = parts.next()?.to_owned();
    let (variable, address) = parts.next()?.split_once('=')?;
    let processes = parts
        .next()?
        .split(',')
        .map(|process| process.parse().ok())
        .collect::<Option<Vec<ProcessId>>>()?;
    let directory = PathBuf::from(parts.next()?);
    let detached = Detached {
        processes,
        directory,
    };
    Some(Service {
        name,
        variable: variable.to_owned(),
        address: address.to_owned(),
        detached,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_reads_as_it_was_written() {
        let service = |name: &str, processes: &[&str]| Service {
            name: name.to_owned(),
            variable: format!("ONCEGATE_{name}"),
            address: "amqp://guest:guest@127.0.0.1:1/%2f?a=b".to_owned(),
            detached: Detached {
                processes: processes.iter().map(|text| text.parse().unwrap()).collect(),
                directory: "/tmp/with a space".into(),
            },
        };
        let state = State {
            services: vec![service("A", &["12:345", "1:2"]), service("B", &["7:8"])],
        };
        assert_eq!(State::parse(&state.to_text()), Ok(state));
    }

    #[test]
    fn a_broken_line_is_named() {
        assert_eq!(
            State::parse("Redis A=b 1:2 /tmp/x\nRedis A=b 1 /tmp/x\n"),
            Err(Unreadable { line: 2 })
        );
    }
}
