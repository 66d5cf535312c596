//! What operators look at and write down: markers with their time, all of them page by page, the
//! audit, what servers say of themselves. None of it is on the way of a message.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::marker::Marker;
use oncegate_core::{Key, Listed, Standing, StoreError};
use redis::{Cmd, Pipeline, Value};

use crate::failure::Failure;
use crate::info::Info;
use crate::record;
use crate::route::Lanes;
use crate::store::Redis;

/// Goes through all markers, page by page. Made by [`Redis::browse`].
pub struct Browse {
    prefix: Arc<[u8]>,
    pattern: Vec<u8>,
    page: usize,
    servers: VecDeque<Arc<Lanes>>,
    cursor: Vec<u8>,
}

/// Where a server's keys begin and end.
const START: &[u8] = b"0";

impl Browse {
    /// The next page, which may be empty; `None` after the last. A key that stands all the while is
    /// listed at least once; one that comes or goes meanwhile may be listed or not.
    ///
    /// Each page is one `SCAN` of about as many keys as were asked for, and one read of what it
    /// found. The library's own keys, `!…`, are left out.
    ///
    /// # Errors
    /// The server could not be asked, or does not let this user.
    pub async fn next(&mut self) -> Result<Option<Vec<Listed>>, StoreError> {
        let Some(lanes) = self.servers.front().cloned() else {
            return Ok(None);
        };
        let mut scan = redis::cmd("SCAN");
        scan.arg(&self.cursor)
            .arg("MATCH")
            .arg(&self.pattern)
            .arg("COUNT")
            .arg(self.page);
        let (cursor, keys) = read_scan(ask(&lanes, &[scan]).await?.pop())?;
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
            .flat_map(|name| reads(&[&self.prefix, name.as_bytes()].concat()))
            .collect();
        let mut replies = if commands.is_empty() {
            Vec::new()
        } else {
            ask(&lanes, &commands).await?
        }
        .into_iter();
        let listed = names.into_iter().map(|name| {
            let standing = standing(replies.next(), replies.next()).map_err(StoreError::from);
            Listed { name, standing }
        });
        // What expired since it was found is gone.
        let gone = |listed: &Listed| {
            matches!(
                listed.standing,
                Ok(Standing {
                    marker: Marker::Absent,
                    ..
                })
            )
        };
        Ok(Some(listed.filter(|listed| !gone(listed)).collect()))
    }
}

/// What one server says of itself. Made by [`Redis::servers`].
#[derive(Debug)]
pub struct ServerInfo {
    /// Where it is, for people.
    pub address: String,
    info: Info,
}

impl ServerInfo {
    /// A line of its `INFO`.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.info.field(name)
    }

    /// A line that is a whole number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.info.number(name)
    }
}

impl Redis {
    /// The marker under a key as it is now, and how long it stands. Changes nothing.
    ///
    /// # Errors
    /// As for [`Redis::look`].
    pub async fn look_closely(&self, key: &Key) -> Result<Standing, StoreError> {
        let key = [self.prefix_bytes(), key.as_bytes()].concat();
        let lanes = self.route().owner(&key).await?;
        let mut replies = ask(&lanes, &reads(&key))
            .await
            .inspect_err(|_| self.route().distrust())?
            .into_iter();
        Ok(standing(replies.next(), replies.next())?)
    }

    /// Goes through all markers, about so many keys a page.
    ///
    /// # Errors
    /// No server could be asked for its nodes.
    pub async fn browse(&self, page: usize) -> Result<Browse, StoreError> {
        let servers = self.route().primaries().await?.into();
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

    /// What each primary says of itself.
    ///
    /// # Errors
    /// One could not be asked, or does not let this user run `INFO`.
    pub async fn servers(&self) -> Result<Vec<ServerInfo>, StoreError> {
        let mut servers = Vec::new();
        for lanes in self.route().primaries().await? {
            servers.push(ServerInfo {
                address: lanes.general.described(),
                info: Info::of(&lanes).await?,
            });
        }
        Ok(servers)
    }

    /// Adds a line to the audit, the stream `<prefix>!audit`, which nothing ever cuts.
    ///
    /// # Errors
    /// It may not stand there: the server could not be asked, or does not let this user run `XADD`.
    pub async fn write_audit(&self, line: &str) -> Result<(), StoreError> {
        let mut add = redis::cmd("XADD");
        add.arg(self.audit_key()).arg("*").arg("entry").arg(line);
        match self.ask_audit(add).await? {
            Value::BulkString(_) => Ok(()),
            _ => Err(wrong_kind("XADD").into()),
        }
    }

    /// All lines of the audit, the oldest first.
    ///
    /// # Errors
    /// The server could not be asked, or does not let this user run `XRANGE`.
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
            let Value::Array(page) = self.ask_audit(range).await? else {
                return Err(wrong_kind("XRANGE").into());
            };
            let count = page.len();
            for entry in page {
                let (id, line) = read_entry(entry).ok_or_else(|| wrong_kind("XRANGE"))?;
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

    async fn ask_audit(&self, command: Cmd) -> Result<Value, StoreError> {
        let lanes = self.route().owner(&self.audit_key()).await?;
        let reply = ask(&lanes, &[command])
            .await
            .inspect_err(|_| self.route().distrust())?
            .pop();
        Ok(unless_refused(reply)?)
    }
}

/// The two commands by which a marker is looked at.
fn reads(key: &[u8]) -> [Cmd; 2] {
    ["GET", "PTTL"].map(|name| redis::cmd(name).arg(key).to_owned())
}

async fn ask(lanes: &Lanes, commands: &[Cmd]) -> Result<Vec<Value>, Failure> {
    let mut pipeline = Pipeline::with_capacity(commands.len());
    for command in commands {
        pipeline.add_command(command.clone());
    }
    lanes.general.ask(&pipeline).await
}

fn unless_refused(reply: Option<Value>) -> Result<Value, Failure> {
    match reply {
        Some(Value::ServerError(error)) => Err(Failure::said_by_server(
            error.code(),
            error.details().unwrap_or_default(),
        )),
        Some(reply) => Ok(reply),
        None => Err(Failure::unknown("Redis gave no answer")),
    }
}

fn wrong_kind(command: &str) -> Failure {
    Failure::unknown(format!(
        "Redis gave an answer of the wrong kind to {command}"
    ))
}

fn standing(got: Option<Value>, left: Option<Value>) -> Result<Standing, Failure> {
    let marker = match unless_refused(got)? {
        Value::Nil => Marker::Absent,
        Value::BulkString(raw) => record::decode(&raw).map_err(Failure::unreadable)?,
        _ => return Err(wrong_kind("GET")),
    };
    let expires_in = match unless_refused(left)? {
        // -1 without an expiry, -2 without a key.
        Value::Int(left) => u64::try_from(left).ok().map(Duration::from_millis),
        _ => return Err(wrong_kind("PTTL")),
    };
    Ok(Standing { marker, expires_in })
}

/// The next cursor, and the keys.
fn read_scan(reply: Option<Value>) -> Result<(Vec<u8>, Vec<Vec<u8>>), Failure> {
    let bytes = |value| match value {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    };
    let Value::Array(parts) = unless_refused(reply)? else {
        return Err(wrong_kind("SCAN"));
    };
    let mut parts = parts.into_iter();
    match (parts.next().and_then(bytes), parts.next()) {
        (Some(cursor), Some(Value::Array(keys))) => {
            Ok((cursor, keys.into_iter().filter_map(bytes).collect()))
        }
        _ => Err(wrong_kind("SCAN")),
    }
}

/// The id of an entry of a stream, and the value of its one field.
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
