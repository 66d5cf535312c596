//! What a server says of itself: `INFO`, which needs no right to `CONFIG`.

use redis::{Pipeline, Value};

use crate::failure::Failure;
use crate::route::Lanes;

/// The answer to `INFO`.
#[derive(Debug)]
pub(crate) struct Info(String);

impl Info {
    /// Asks the server.
    ///
    /// # Errors
    /// It could not be asked, or does not let this user.
    pub(crate) async fn of(lanes: &Lanes) -> Result<Self, Failure> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.cmd("INFO");
        Self::read(
            lanes
                .general
                .ask(&pipeline)
                .await?
                .pop()
                .unwrap_or(Value::Nil),
        )
    }

    pub(crate) fn read(reply: Value) -> Result<Self, Failure> {
        match reply {
            Value::BulkString(info) => Ok(Self(String::from_utf8_lossy(&info).into_owned())),
            Value::VerbatimString { text, .. } => Ok(Self(text)),
            Value::ServerError(error) => Err(Failure::said_by_server(
                error.code(),
                error.details().unwrap_or_default(),
            )),
            _ => Err(Failure::unknown(
                "Redis gave an answer of the wrong kind to INFO",
            )),
        }
    }

    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.0
            .lines()
            .find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
    }

    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.field(name)?.parse().ok()
    }
}

#[cfg(test)]
impl From<&str> for Info {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}
