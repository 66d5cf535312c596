//! What can be noticed of a server while it runs.

use std::time::Duration;

/// What was noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// The canary is gone or was born anew: the keys were lost, deleted or evicted, or another
    /// consumer lost its last writes.
    CanaryLost,
    /// The canary counts back: the last writes were lost, as in a failover or a power cut.
    WritesLost,
    /// Keys were evicted.
    Evicted(u64),
    /// Another process answers; it still has what we wrote.
    Restarted,
    /// The clock went on by this much more than time did.
    ClockForward(Duration),
    /// The clock went on by this much less.
    ClockBackward(Duration),
}

impl Finding {
    /// The label of the counter.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::CanaryLost => "canary_lost",
            Self::WritesLost => "writes_lost",
            Self::Evicted(_) => "evicted",
            Self::Restarted => "restarted",
            Self::ClockForward(_) => "clock_forward",
            Self::ClockBackward(_) => "clock_backward",
        }
    }

    pub(crate) fn told(&self) -> String {
        match self {
            Self::CanaryLost => {
                "the canary key is gone or born anew: Redis lost its keys, or another consumer's last writes, or someone deleted them"
                    .into()
            }
            Self::WritesLost => "the canary key counts back: Redis lost its last writes, as in a failover or a power cut".into(),
            Self::Evicted(keys) => format!("Redis evicted {keys} keys: set maxmemory-policy noeviction, and give it more memory"),
            Self::Restarted => "another Redis process answers; it still has what was written from here".into(),
            Self::ClockForward(by) => {
                format!("the clock of Redis jumped forward by {by:?}: leases and markers end early; slew it with NTP")
            }
            Self::ClockBackward(by) => format!("the clock of Redis jumped back by {by:?}: leases and markers end late; slew it with NTP"),
        }
    }

    /// Whether markers may be gone, so that what was handled would be taken for new.
    pub(crate) fn forgot(&self) -> bool {
        match self {
            Self::CanaryLost | Self::WritesLost | Self::Evicted(_) => true,
            Self::Restarted | Self::ClockForward(_) | Self::ClockBackward(_) => false,
        }
    }
}
