//! For operators: markers with their expiry, a scan of all markers, the audit log, `INFO`. Not used
//! while messages are processed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::marker::Marker;
use oncegate_core::{Key, ListedKey, MarkerWithExpiry, StoreError};
use redis::{Cmd, Pipeline, Value};

use crate::failure::StoreFailure;
use crate::info::InfoReply;
use crate::record;
use crate::reply;
use crate::router::ConnectionPair;
use crate::store::Redis;

/// A scan of all markers, page by page. Created by [`Redis::browse`].
pub struct Browse {
    prefix: Arc<[u8]>,
    pattern: Vec<u8>,
    /// The `COUNT` of each `SCAN`.
    page: usize,
    /// The primaries that are not scanned completely; `cursor` is that of the first.
    servers: VecDeque<Arc<ConnectionPair>>,
    cursor: Vec<u8>,
}

/// The cursor with which a `SCAN` starts, and that its last reply returns.
const START: &[u8] = b"0";

impl Browse {
    /// The next page, which may be empty; `None` after the last. A key that exists during the whole
    /// scan is listed at least once, unless its slot moves to another primary meanwhile; one that is
    /// added or removed during the scan may be missing.
    ///
    /// Each page is one `SCAN` with the page size as `COUNT`, and one read of the keys found. The
    /// library's own keys, `!…`, are skipped.
    ///
    /// # Errors
    /// The request failed, or the user lacks the right to it.
    pub async fn next(&mut self) -> Result<Option<Vec<ListedKey>>, StoreError> {
        let Some(connections) = self.servers.front().cloned() else {
            return Ok(None);
        };
        let mut scan = redis::cmd("SCAN");
        scan.arg(&self.cursor)
            .arg("MATCH")
            .arg(&self.pattern)
            .arg("COUNT")
            .arg(self.page);
        let (cursor, keys) = read_scan(send(&connections, &[scan]).await?.pop())?;
        self.cursor = cursor;
        if self.cursor == START {
            self.servers.pop_front();
        }
        let names: Vec<String> = keys
            .iter()
            .filter_map(|key| key.strip_prefix(&*self.prefix))
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .filter(|name| !name.starts_with('!'))
            .collect();
        let commands: Vec<Cmd> = names
            .iter()
            .flat_map(|name| read_commands(&[&self.prefix, name.as_bytes()].concat()))
            .collect();
        let mut replies = if commands.is_empty() {
            Vec::new()
        } else {
            send(&connections, &commands).await?
        }
        .into_iter();
        let listed = names.into_iter().map(|name| {
            let marker =
                marker_with_expiry(replies.next(), replies.next()).map_err(StoreError::from);
            ListedKey::new(name, marker)
        });
        // A key may expire between `SCAN` and its read.
        let is_absent = |listed: &ListedKey| {
            matches!(
                listed.marker,
                Ok(MarkerWithExpiry {
                    marker: Marker::Absent,
                    ..
                })
            )
        };
        Ok(Some(listed.filter(|listed| !is_absent(listed)).collect()))
    }
}

/// `INFO` of one server. Created by [`Redis::servers`].
#[derive(Debug)]
#[non_exhaustive]
pub struct ServerInfo {
    /// Its address, for messages.
    pub address: String,
    info: InfoReply,
}

impl ServerInfo {
    /// The value of a field.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.info.field(name)
    }

    /// The value of a field that is a whole number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.info.number(name)
    }
}

impl Redis {
    /// The marker of a key and the time until it expires. Changes nothing.
    ///
    /// # Errors
    /// As for [`Redis::read_marker`].
    pub async fn read_marker_with_expiry(&self, key: &Key) -> Result<MarkerWithExpiry, StoreError> {
        let key = [self.prefix_bytes(), key.as_bytes()].concat();
        let connections = self.router().owner(&key).await?;
        let mut replies = send(&connections, &read_commands(&key))
            .await
            .inspect_err(|_| self.router().invalidate())?
            .into_iter();
        Ok(marker_with_expiry(replies.next(), replies.next())?)
    }

    /// Scans all markers, with about `page` keys a page.
    ///
    /// # Errors
    /// The nodes of a Cluster could not be queried.
    pub async fn browse(&self, page: usize) -> Result<Browse, StoreError> {
        let servers = self.router().primaries().await?.into();
        let pattern = self.prefix_bytes().iter().flat_map(|byte| match byte {
            b'*' | b'?' | b'[' | b']' | b'\\' | b'^' => vec![b'\\', *byte],
            plain => vec![*plain],
        });
        let pattern = pattern.chain(*b"*").collect();
        Ok(Browse {
            prefix: self.prefix_bytes().into(),
            pattern,
            page: page.max(1),
            servers,
            cursor: START.to_vec(),
        })
    }

    /// `INFO` of each primary.
    ///
    /// # Errors
    /// A request failed, or the user lacks the right to `INFO`.
    pub async fn servers(&self) -> Result<Vec<ServerInfo>, StoreError> {
        let mut servers = Vec::new();
        for connections in self.router().primaries().await? {
            servers.push(ServerInfo {
                address: connections.general.described(),
                info: InfoReply::of(&connections).await?,
            });
        }
        Ok(servers)
    }

    /// Appends a line to the audit log, the stream `<prefix>!audit`, which is never trimmed.
    ///
    /// # Errors
    /// The line may be missing: the request failed, or the user lacks the right to `XADD`.
    pub async fn write_audit(&self, line: &str) -> Result<(), StoreError> {
        let mut add = redis::cmd("XADD");
        add.arg(self.audit_key()).arg("*").arg("entry").arg(line);
        match self.send_audit(add).await? {
            Value::BulkString(_) => Ok(()),
            _ => Err(reply::wrong_type("XADD").into()),
        }
    }

    /// All lines of the audit log, oldest first.
    ///
    /// # Errors
    /// A request failed, or the user lacks the right to `XRANGE`.
    pub async fn read_audit(&self) -> Result<Vec<String>, StoreError> {
        const PAGE: usize = 1_000;
        let (mut lines, mut from) = (Vec::new(), "-".to_owned());
        loop {
            let mut range = redis::cmd("XRANGE");
            range
                .arg(self.audit_key())
                .arg(&from)
                .arg("+")
                .arg("COUNT")
                .arg(PAGE);
            let Value::Array(page) = self.send_audit(range).await? else {
                return Err(reply::wrong_type("XRANGE").into());
            };
            let count = page.len();
            for entry in page {
                let (id, line) = read_entry(entry).ok_or_else(|| reply::wrong_type("XRANGE"))?;
                from = format!("({id}");
                lines.push(line);
            }
            if count < PAGE {
                return Ok(lines);
            }
        }
    }

    fn audit_key(&self) -> Vec<u8> {
        [self.prefix_bytes(), b"!audit"].concat()
    }

    async fn send_audit(&self, command: Cmd) -> Result<Value, StoreError> {
        let connections = self.router().owner(&self.audit_key()).await?;
        let reply = send(&connections, &[command])
            .await
            .inspect_err(|_| self.router().invalidate())?
            .pop();
        Ok(reply::success(reply)?)
    }
}

/// The two commands that read a marker and its expiry.
fn read_commands(key: &[u8]) -> [Cmd; 2] {
    ["GET", "PTTL"].map(|name| redis::cmd(name).arg(key).to_owned())
}

/// Sends the commands in one pipeline; a reply may be [`Value::ServerError`].
pub(crate) async fn send(
    connections: &ConnectionPair,
    commands: &[Cmd],
) -> Result<Vec<Value>, StoreFailure> {
    let mut pipeline = Pipeline::with_capacity(commands.len());
    for command in commands {
        pipeline.add_command(command.clone());
    }
    connections.general.send(&pipeline).await
}

fn marker_with_expiry(
    value: Option<Value>,
    time_left: Option<Value>,
) -> Result<MarkerWithExpiry, StoreFailure> {
    let marker = match reply::success(value)? {
        Value::Nil => Marker::Absent,
        Value::BulkString(raw) => record::decode(&raw).map_err(crate::failure::unreadable)?,
        _ => return Err(reply::wrong_type("GET")),
    };
    let expires_in = match reply::success(time_left)? {
        // -1 if the key has no expiry, -2 if it does not exist.
        Value::Int(milliseconds) => u64::try_from(milliseconds).ok().map(Duration::from_millis),
        _ => return Err(reply::wrong_type("PTTL")),
    };
    Ok(MarkerWithExpiry::new(marker, expires_in))
}

/// The next cursor and the keys of a `SCAN`.
fn read_scan(reply: Option<Value>) -> Result<(Vec<u8>, Vec<Vec<u8>>), StoreFailure> {
    let bytes = |value| match value {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    };
    let Value::Array(parts) = reply::success(reply)? else {
        return Err(reply::wrong_type("SCAN"));
    };
    let mut parts = parts.into_iter();
    match (parts.next().and_then(bytes), parts.next()) {
        (Some(cursor), Some(Value::Array(keys))) => {
            Ok((cursor, keys.into_iter().filter_map(bytes).collect()))
        }
        _ => Err(reply::wrong_type("SCAN")),
    }
}

/// The id of a stream entry and the value of its only field.
fn read_entry(entry: Value) -> Option<(String, String)> {
    let text = |value| match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
        _ => None,
    };
    let Value::Array(parts) = entry else {
        return None;
    };
    let mut parts = parts.into_iter();
    let id = text(parts.next()?)?;
    let Value::Array(fields) = parts.next()? else {
        return None;
    };
    Some((id, text(fields.into_iter().nth(1)?)?))
}
