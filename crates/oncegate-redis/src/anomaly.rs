//! The anomalies of a running server that the loss detector reports.

use std::time::Duration;

/// Unexpected behaviour of a Redis server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Anomaly {
    /// The canary key is missing or has another generation: keys were lost, deleted or evicted, or
    /// another consumer lost its last writes.
    CanaryLost,
    /// The write count of this process decreased: its last writes were lost, as in a failover or a
    /// power cut.
    WritesLost,
    /// This many keys were evicted.
    Evicted(u64),
    /// The `run_id` changed; no write of this process is missing.
    Restarted,
    /// The server's clock advanced by this much more than the elapsed time.
    ClockForward(Duration),
    /// The server's clock advanced by this much less than the elapsed time.
    ClockBackward(Duration),
}

impl Anomaly {
    /// The value of the `anomaly` label of the counter.
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

    /// The anomaly and its remedy, in one line.
    pub(crate) fn description(&self) -> String {
        match self {
            Self::CanaryLost => "the canary key is missing or was recreated (<prefix>!canary, with which oncegate detects lost data): Redis lost \
                 its keys or another consumer's last writes, or the key was deleted"
                .into(),
            Self::WritesLost => {
                "the canary count decreased (the number of writes of this process): Redis lost its last writes, as in a failover or a power cut".into()
            }
            Self::Evicted(keys) => format!("Redis evicted {keys} keys: set maxmemory-policy noeviction and raise maxmemory"),
            Self::Restarted => "Redis restarted or failed over (another run_id); no write of this process is missing".into(),
            Self::ClockForward(by) => {
                format!("the clock of Redis jumped forward by {by:?}: leases and markers expire early; slew the clock with NTP")
            }
            Self::ClockBackward(by) => {
                format!("the clock of Redis jumped back by {by:?}: leases and markers expire late; slew the clock with NTP")
            }
        }
    }

    /// Whether markers may be lost, so that a message already handled may be granted again.
    pub(crate) fn is_data_loss(&self) -> bool {
        match self {
            Self::CanaryLost | Self::WritesLost | Self::Evicted(_) => true,
            Self::Restarted | Self::ClockForward(_) | Self::ClockBackward(_) => false,
        }
    }
}
