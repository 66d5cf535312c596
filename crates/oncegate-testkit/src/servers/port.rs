//! Free ports.

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};

use super::{ServerError, io_error};

/// The range to search: below the ephemeral ports of outgoing connections (32,768 and up), so that
/// no outgoing connection takes the port of a stopped server before it is started again.
const LOWEST: u16 = 10_000;
const HIGHEST: u16 = 32_000;

/// `N` different ports of 127.0.0.1 on which no process listens. The error names `server`.
///
/// # Errors
/// [`ServerError::Io`] if nearly every port is taken.
pub(crate) fn free_ports<const N: usize>(server: &'static str) -> Result<[u16; N], ServerError> {
    let range = u64::from(HIGHEST - LOWEST);
    let mut held: Vec<TcpListener> = Vec::with_capacity(N);
    let mut ports = [0; N];
    let mut refused = 0;
    while held.len() < N {
        let offset = RandomState::new().hash_one(refused) % range;
        let port =
            LOWEST + u16::try_from(offset).expect("less than HIGHEST - LOWEST, which is a u16");
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(listener) => {
                ports[held.len()] = port;
                held.push(listener);
            }
            Err(_) if refused < 1_000 => refused += 1,
            Err(source) => return Err(io_error(server, "find free ports", source)),
        }
    }
    Ok(ports)
}
