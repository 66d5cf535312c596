//! A handler whose behavior each message selects.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use oncegate::internal::Lock;
use oncegate::{Context, Failure, FailureExt, Handler};
use serde::Deserialize;

use crate::diary::{Diary, DiaryRun, Entry};

/// The body of a message, such as `{"do":"slow","ms":50}`.
#[derive(Clone, Debug, Deserialize)]
pub struct Script {
    /// What to do.
    #[serde(rename = "do")]
    pub action: ScriptedAction,
    /// The duration of a slow action, in milliseconds.
    #[serde(default)]
    pub ms: u64,
}

/// What to do before the effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScriptedAction {
    /// Nothing: the effect happens at once.
    Work,
    /// Wait.
    Slow,
    /// Fail without an effect the first time in this process.
    RetryOnce,
    /// Panic the first time in this process.
    PanicOnce,
    /// Never return in the first attempt.
    Hang,
}

/// The handler. Records starts and effects in the diary.
#[derive(Debug)]
pub struct Scripted {
    diary: Arc<Diary>,
    seen: Lock<HashSet<String>>,
}

impl Scripted {
    /// A handler that writes into this diary.
    pub fn new(diary: Arc<Diary>) -> Self {
        Self {
            diary,
            seen: Lock::default(),
        }
    }
}

impl Handler for Scripted {
    type Payload = Script;

    async fn handle(&self, script: Script, cx: &Context) -> Result<(), Failure> {
        let run = DiaryRun {
            id: cx.id().to_owned(),
            attempt: cx.attempt(),
        };
        self.diary.write(&Entry::Start(run.clone()));
        let first = self.seen.lock().insert(run.id.clone());
        match script.action {
            ScriptedAction::RetryOnce if first => Err("not yet").retry()?,
            ScriptedAction::PanicOnce if first => panic!("as the message says"),
            ScriptedAction::Hang if run.attempt == 1 => std::future::pending().await,
            ScriptedAction::Slow => tokio::time::sleep(Duration::from_millis(script.ms)).await,
            _ => {}
        }
        self.diary.write(&Entry::Effect(run));
        Ok(())
    }
}
