//! The rights that an operator's tool needs beyond those of a consumer, and values of other programs.

use oncegate_core::marker::Guarantee;
use oncegate_core::{Key, StoreError};
use redis::{Cmd, Value};

use crate::browse::send;
use crate::preflight::{self, PreflightRequest};
use crate::record::{self, DecodeError};
use crate::reply;
use crate::store::Redis;

/// The rights of the user for an operator's tool. Created by [`Redis::tool_rights`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ToolRights {
    /// Commands that the user may not run, of those that consumers do not need: `XADD` and `XRANGE`
    /// for the audit log, `SCAN` for lists of markers, `TYPE` and `STRLEN` to describe foreign
    /// values.
    pub missing: Vec<&'static str>,
    /// The `ACL SETUSER` command that grants all rights that consumers and the tool need.
    pub grant: String,
}

/// A value that is not a marker. Created by [`Redis::foreign_value`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForeignValue {
    /// Its Redis type, such as `string` or `hash`.
    pub kind: String,
    /// The number of bytes of a string, or of elements of another type; `None` if the server does
    /// not return it, for example without the right to `STRLEN` or `HLEN`.
    pub length: Option<u64>,
    /// The version of the record, if a newer release of oncegate wrote it.
    pub record_version: Option<u64>,
}

/// Commands that only tools run, and the right that each needs.
const TOOL_COMMANDS: [(&str, &str); 5] = [
    ("XADD", "+xadd"),
    ("XRANGE", "+xrange"),
    ("SCAN", "+scan"),
    ("TYPE", "+type"),
    ("STRLEN", "+strlen"),
];

/// The rights of [`TOOL_COMMANDS`].
pub(crate) fn rights() -> impl Iterator<Item = &'static str> {
    TOOL_COMMANDS.iter().map(|(_, right)| *right)
}

/// A call that changes nothing: `NOMKSTREAM` adds no entry to a missing stream.
fn trial(name: &str, probe: &[u8]) -> Cmd {
    let mut command = redis::cmd(name);
    match name {
        "XADD" => command.arg(probe).arg(&["NOMKSTREAM", "*", "entry", ""]),
        "XRANGE" => command.arg(probe).arg(&["-", "-", "COUNT", "1"]),
        "SCAN" => command.arg(&["0", "COUNT", "1"]),
        _ => command.arg(probe),
    };
    command
}

impl Redis {
    /// Tries the commands that only an operator's tool needs, on each primary. Changes nothing.
    ///
    /// # Errors
    /// A server could not be reached.
    pub async fn tool_rights(&self, guarantee: Guarantee) -> Result<ToolRights, StoreError> {
        let request = PreflightRequest {
            guarantee,
            durability: self.durability_setting(),
            prefix: self.prefix_bytes(),
        };
        let probe = [self.prefix_bytes(), b"!tool-probe"].concat();
        let servers = self.router().keys_on_each_primary(&probe).await?;
        let (mut missing, mut user) = (Vec::new(), None);
        for (probe, connections) in &servers {
            user = user.or(connections.general.user());
            let trials = TOOL_COMMANDS.map(|(name, _)| trial(name, probe));
            let replies = send(connections, &trials)
                .await
                .inspect_err(|_| self.router().invalidate())?;
            for ((name, _), reply) in TOOL_COMMANDS.iter().zip(replies) {
                let is_denied =
                    matches!(reply, Value::ServerError(error) if error.code() == "NOPERM");
                if is_denied && !missing.contains(name) {
                    missing.push(*name);
                }
            }
        }
        let grant = preflight::grant(user, self.router(), request, rights());
        Ok(ToolRights { missing, grant })
    }

    /// The type and length of a value under the key of a marker, and the version if it is a record of
    /// a newer release. Changes nothing.
    ///
    /// # Errors
    /// The request failed, or the user lacks the right to `TYPE`.
    pub async fn foreign_value(&self, key: &Key) -> Result<ForeignValue, StoreError> {
        let key = [self.prefix_bytes(), key.as_bytes()].concat();
        let connections = self.router().owner(&key).await?;
        let send_command = async |name: &str| {
            let command = redis::cmd(name).arg(&key).to_owned();
            send(&connections, &[command])
                .await
                .inspect_err(|_| self.router().invalidate())
        };
        let kind = match reply::success(send_command("TYPE").await?.pop())? {
            Value::SimpleString(kind) => kind,
            _ => return Err(reply::wrong_type("TYPE").into()),
        };
        let counts = [
            ("string", "STRLEN"),
            ("list", "LLEN"),
            ("hash", "HLEN"),
            ("set", "SCARD"),
            ("zset", "ZCARD"),
            ("stream", "XLEN"),
        ];
        let length = match counts.iter().find(|(counted, _)| *counted == kind) {
            Some((_, name)) => match send_command(name).await?.pop() {
                Some(Value::Int(length)) => u64::try_from(length).ok(),
                _ => None,
            },
            None => None,
        };
        let record_version = match kind.as_str() {
            "string" => match send_command("GET").await?.pop() {
                Some(Value::BulkString(raw)) => match record::decode(&raw) {
                    Err(DecodeError::UnknownVersion(version)) => Some(version),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        };
        Ok(ForeignValue {
            kind,
            length,
            record_version,
        })
    }
}
