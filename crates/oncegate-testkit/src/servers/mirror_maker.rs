//! MirrorMaker 2, which copies topics, and the committed offsets of groups with their metadata,
//! from one Kafka cluster to another.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::kafka_distribution::fetch_kafka;
use super::server::{Server, ServerKind, temporary_directory, write};
use super::{KafkaServer, ServerError};

/// The file with the settings of MirrorMaker.
const PROPERTIES: &str = "mirror-maker.properties";

/// MirrorMaker 2 between two clusters. Needs the same programs as a [`KafkaServer`].
pub type MirrorMakerServer = Server<MirrorMaker>;

/// The kind of a [`MirrorMakerServer`].
#[derive(Debug)]
pub struct MirrorMaker {
    class_path: PathBuf,
}

impl MirrorMakerServer {
    /// Copies this topic from the source cluster to the target cluster, under the same name, from
    /// its first record. Copies the committed offsets of this group every second, while the group
    /// has no member on the target cluster. Returns before the first record is copied.
    ///
    /// # Errors
    /// [`ServerError`], with the end of the log, if it does not start.
    pub fn start(
        source: &KafkaServer,
        target: &KafkaServer,
        topic: &str,
        group: &str,
    ) -> Result<Self, ServerError> {
        let class_path = fetch_kafka()?.join("*");
        let directory = temporary_directory(MirrorMaker::NAME)?;
        let written = properties(&source.brokers(), &target.brokers(), topic, group);
        write(
            MirrorMaker::NAME,
            &directory.path().join(PROPERTIES),
            &written,
        )?;
        Self::launch(MirrorMaker { class_path }, directory)
    }
}

impl ServerKind for MirrorMaker {
    const NAME: &'static str = "MirrorMaker 2";
    const ADVICE: &'static str =
        "`cargo xtask setup` installs what it needs (Debian's package is default-jre-headless)";
    const START_TIMEOUT: Duration = Duration::from_secs(90);
    const IN_SERVER_SET: bool = false;

    fn commands(&self, directory: &Path) -> Vec<Command> {
        let mut command = Command::new("java");
        command
            .arg("-Xmx256m")
            .arg("-cp")
            .arg(&self.class_path)
            .arg("org.apache.kafka.connect.mirror.MirrorMaker");
        command.arg(directory.join(PROPERTIES));
        vec![command]
    }

    fn answers(&self, _: u32, log: &str) -> bool {
        log.contains("Kafka MirrorMaker started")
    }
}

/// The settings. All intervals are one second, and MirrorMaker writes an offset sync for each
/// batch, so that tests wait at most seconds.
fn properties(source: &str, target: &str, topic: &str, group: &str) -> String {
    format!(
        "clusters=source,target
source.bootstrap.servers={source}
target.bootstrap.servers={target}
source->target.enabled=true
target->source.enabled=false
target->source.emit.heartbeats.enabled=false
emit.heartbeats.enabled=false
topics={topic}
groups={group}
replication.policy.class=org.apache.kafka.connect.mirror.IdentityReplicationPolicy
replication.factor=1
offset.storage.replication.factor=1
offset.storage.partitions=1
config.storage.replication.factor=1
status.storage.replication.factor=1
status.storage.partitions=1
offset-syncs.topic.replication.factor=1
checkpoints.topic.replication.factor=1
heartbeats.topic.replication.factor=1
offset.lag.max=0
emit.checkpoints.interval.seconds=1
sync.group.offsets.enabled=true
sync.group.offsets.interval.seconds=1
refresh.groups.interval.seconds=1
refresh.topics.interval.seconds=1
sync.topic.acls.enabled=false
sync.topic.configs.enabled=false
scheduled.rebalance.max.delay.ms=0
"
    )
}
