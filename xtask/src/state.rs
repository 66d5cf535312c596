//! The state file, by which `services down` finds the servers of `services up`: one line per
//! server.

use std::path::PathBuf;

use oncegate_testkit::servers::{Detached, ProcessId, SERVER_SET, ServerSet};

/// The servers that `services up` started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) set: ServerSet,
    pub(crate) services: Vec<Service>,
}

/// One server in the background.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) name: String,
    /// The environment variable by which the tests find the server, and its value.
    pub(crate) variable: String,
    pub(crate) address: String,
    pub(crate) detached: Detached,
}

/// The state file has an invalid line.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {line} of the state file is not `name variable=address number:start,… directory`, or the first not a set of servers"
)]
pub(crate) struct Unreadable {
    line: usize,
}

impl State {
    /// The set of servers, then one line per service: name, address, processes in the order in which
    /// to stop them, and last the directory, because its name may contain spaces.
    pub(crate) fn to_text(&self) -> String {
        let services: String = self
            .services
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
            .collect();
        format!("{}\n{services}", self.set.name())
    }

    /// Reads what [`State::to_text`] wrote.
    pub(crate) fn parse(text: &str) -> Result<Self, Unreadable> {
        let mut lines = text.lines();
        let set = lines
            .next()
            .and_then(|name| name.parse().ok())
            .ok_or(Unreadable { line: 1 })?;
        let services = lines
            .enumerate()
            .map(|(index, line)| parse_line(line).ok_or(Unreadable { line: index + 2 }))
            .collect::<Result<_, _>>()?;
        Ok(Self { set, services })
    }

    /// The variables, one `NAME=value` per line: the set, for the servers that tests start, and the
    /// addresses.
    pub(crate) fn environment(&self) -> String {
        let addresses: String = self
            .services
            .iter()
            .map(|service| format!("{}={}\n", service.variable, service.address))
            .collect();
        format!("{SERVER_SET}={}\n{addresses}", self.set.name())
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
    fn a_written_state_parses_to_the_same_state() {
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
            set: ServerSet::Today,
            services: vec![service("A", &["12:345", "1:2"]), service("B", &["7:8"])],
        };
        assert_eq!(State::parse(&state.to_text()), Ok(state));
    }

    #[test]
    fn the_error_has_the_number_of_the_invalid_line() {
        assert_eq!(
            State::parse("today\nRedis A=b 1:2 /tmp/x\nRedis A=b 1 /tmp/x\n"),
            Err(Unreadable { line: 3 })
        );
    }
}
