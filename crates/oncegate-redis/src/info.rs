//! `INFO`: the properties of a server, for a user without the right to `CONFIG`.

use redis::{Pipeline, Value};

use crate::failure::StoreFailure;
use crate::reply;
use crate::router::ConnectionPair;

/// The reply to `INFO`.
#[derive(Debug)]
pub(crate) struct InfoReply(String);

impl InfoReply {
    /// Sends `INFO` to the server.
    ///
    /// # Errors
    /// The request failed, or the user has no right to `INFO`.
    pub(crate) async fn of(connections: &ConnectionPair) -> Result<Self, StoreFailure> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.cmd("INFO");
        Self::read(
            connections
                .general
                .send(&pipeline)
                .await?
                .pop()
                .unwrap_or(Value::Nil),
        )
    }

    /// Reads the reply to `INFO`.
    pub(crate) fn read(reply: Value) -> Result<Self, StoreFailure> {
        match reply {
            Value::BulkString(info) => Ok(Self(String::from_utf8_lossy(&info).into_owned())),
            Value::VerbatimString { text, .. } => Ok(Self(text)),
            Value::ServerError(error) => Err(crate::failure::of_reply(&error)),
            _ => Err(reply::wrong_type("INFO")),
        }
    }

    /// The value of a field.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.0
            .lines()
            .find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
    }

    /// The value of a field that is a whole number.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.field(name)?.parse().ok()
    }
}

#[cfg(test)]
impl From<&str> for InfoReply {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}
