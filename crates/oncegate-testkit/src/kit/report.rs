//! What became of everything.

use std::collections::BTreeSet;

use oncegate_core::{DeadLetter, IdSource, MemoryBroker};

/// What became of all messages of a [`Kit`](super::Kit), once each is settled.
#[derive(Debug)]
pub struct Report {
    ids: BTreeSet<String>,
    runs: Vec<Run>,
    dead_letters: Vec<DeadLetter>,
    in_doubt: Vec<DeadLetter>,
    set_aside: BTreeSet<String>,
}

/// One start of the handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The id.
    pub id: String,
    /// The attempt, as the handler was told it.
    pub attempt: u32,
    /// How it ended.
    pub ended: Ended,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With `Ok`.
    Happened,
    /// With a failure.
    Failed,
    /// Not by itself: a crash, a panic or a timeout cut it.
    Cut,
}

impl Report {
    pub(super) fn new(ids: BTreeSet<String>, runs: Vec<Run>, broker: &MemoryBroker, id: &IdSource) -> Self {
        let (dead_letters, in_doubt) = (broker.dead_letters(), broker.in_doubt());
        let aside = dead_letters.iter().chain(&in_doubt).filter_map(|letter| id.read(&letter.message));
        let set_aside = aside.map(|id| id.to_string()).collect();
        Self { ids, runs, dead_letters, in_doubt, set_aside }
    }

    /// Every start of the handler, in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// How often the handler was started for this id.
    pub fn starts(&self, id: &str) -> usize {
        self.runs.iter().filter(|run| run.id == id).count()
    }

    /// What was rejected.
    pub fn dead_letters(&self) -> &[DeadLetter] {
        &self.dead_letters
    }

    /// What nobody could find out about.
    pub fn in_doubt(&self) -> &[DeadLetter] {
        &self.in_doubt
    }

    /// Holds that no id has more than one effect, where `effects` says how many the world has under an id.
    ///
    /// # Panics
    /// If one has more: its handler does not bear the second run that this guarantee gives it.
    pub fn assert_none_twice(&self, effects: impl Fn(&str) -> usize) -> &Self {
        for id in &self.ids {
            let count = effects(id);
            assert!(count <= 1, "`{id}` happened {count} times. Its runs: {}", self.story(id));
        }
        self
    }

    /// Holds that each id has an effect, where `effects` says how many the world has under an id, or stands in the dead letters or
    /// among the messages in doubt.
    ///
    /// # Panics
    /// If one has neither: it was accepted, and nothing happened.
    pub fn assert_none_lost(&self, effects: impl Fn(&str) -> usize) -> &Self {
        for id in &self.ids {
            let known = effects(id) > 0 || self.set_aside.contains(id);
            assert!(known, "`{id}` was accepted, and its effect never happened. Its runs: {}", self.story(id));
        }
        self
    }

    /// Holds that nothing stands in the dead letters, and nothing among the messages in doubt.
    ///
    /// # Panics
    /// If something does.
    pub fn assert_none_set_aside(&self) -> &Self {
        if let Some(letter) = self.dead_letters.iter().chain(&self.in_doubt).next() {
            let story = letter.story.clone().unwrap_or_default();
            let (id, said) = (story.id.unwrap_or_default(), story.last_error.unwrap_or_default());
            panic!("`{id}` was set aside, {}: {said}", letter.reason.as_str());
        }
        self
    }

    fn story(&self, id: &str) -> String {
        let runs = self.runs.iter().filter(|run| run.id == id).map(|run| {
            let ended = match run.ended {
                Ended::Happened => "returned Ok",
                Ended::Failed => "failed",
                Ended::Cut => "was cut off",
            };
            format!("attempt {} {ended}", run.attempt)
        });
        let runs: Vec<_> = runs.collect();
        if runs.is_empty() { "none".to_owned() } else { runs.join(", then ") }
    }
}
