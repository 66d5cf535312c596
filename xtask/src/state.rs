//! The state file, in which `services down` finds the servers of `services up`.

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
    /// The environment variable in which tests find the address.
    pub(crate) variable: String,
    pub(crate) address: String,
    pub(crate) detached: Detached,
}

/// The state file has an invalid line.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {line} of the state file (services.state in the target directory) is not {}",
    expected_form(.line)
)]
pub(crate) struct InvalidStateLine {
    line: usize,
}

/// The form that a line of the state file must have.
fn expected_form(line: &usize) -> &'static str {
    if *line == 1 {
        "the name of a server set"
    } else {
        "`name variable=address number:start,… directory`"
    }
}

impl State {
    /// The text of the state file: a line with the server set, then one line for each server with
    /// its name, its variable and address, its processes in the order in which to stop them, and
    /// its directory, which is last because its name may contain spaces.
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

    /// Parses the text that [`State::to_text`] returns.
    pub(crate) fn parse(text: &str) -> Result<Self, InvalidStateLine> {
        let mut lines = text.lines();
        let set = lines
            .next()
            .and_then(|name| name.parse().ok())
            .ok_or(InvalidStateLine { line: 1 })?;
        let services = lines
            .enumerate()
            .map(|(index, line)| parse_line(line).ok_or(InvalidStateLine { line: index + 2 }))
            .collect::<Result<_, _>>()?;
        Ok(Self { set, services })
    }

    /// The environment variables for tests, one `NAME=value` per line: the server set, for servers
    /// that tests start themselves, and the addresses.
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
            Err(InvalidStateLine { line: 3 })
        );
    }
}
