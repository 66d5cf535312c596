//! The codes of findings.

/// Code and meaning.
pub(crate) const CODES: &[(&str, &str)] = &[
    (
        "lease-against-window",
        "the lease is not shorter than the window",
    ),
    (
        "lease-too-short",
        "the lease is too short to be renewed in time",
    ),
    (
        "max-age-against-window",
        "messages older than the window are taken as new",
    ),
    (
        "runs-outlast-the-consumer-timeout",
        "a delivery may stay unacknowledged for longer than the consumer timeout of RabbitMQ",
    ),
    (
        "no-scope",
        "no scope and no prefix: another service on the same Redis would skip messages",
    ),
    (
        "audit-has-no-place",
        "the directory of the audit file does not exist",
    ),
    (
        "broker-not-configured",
        "no broker is configured, so only the store is checked",
    ),
    ("store-not-configured", "no store is configured"),
    ("store-away", "Redis is unreachable"),
    (
        "store-refuses-the-login",
        "Redis rejects the user or the password",
    ),
    (
        "store-lacks-a-right",
        "the user lacks permission for a command or for its keys",
    ),
    (
        "tool-lacks-a-right",
        "the user lacks permission for a command that only `oncegate` runs",
    ),
    (
        "store-unusable",
        "the store cannot be used for the reason that it reports",
    ),
    (
        "store-forgets",
        "the store is volatile: the memory of a process, or an SQLite file on a file system in memory",
    ),
    (
        "store-file-missing",
        "there is no SQLite file yet: store.url may name a wrong path, or a volume is not mounted",
    ),
    ("store-too-old", "Redis is older than 7.0"),
    ("store-is-a-replica", "the configured server is a replica"),
    (
        "store-is-a-cluster-node",
        "the configured server is one node of a Cluster",
    ),
    ("store-evicts", "Redis evicts keys when its memory is full"),
    ("store-keeps-no-file", "Redis has no append-only file"),
    (
        "store-cannot-write-its-file",
        "Redis cannot write its append-only file",
    ),
    (
        "store-nearly-full",
        "Redis uses more than 80 % of its memory",
    ),
    (
        "store-too-small",
        "Redis has less memory than `gate.rate` needs",
    ),
    (
        "clocks-differ",
        "the clocks of Redis and of this machine are more than 5 s apart",
    ),
    (
        "too-few-replicas",
        "fewer replicas are connected than claims wait for",
    ),
    ("kafka-away", "Kafka is unreachable or refuses the request"),
    (
        "kafka-lacks-a-right",
        "the user lacks permission to describe a topic, read the consumed one, or use the group",
    ),
    ("topic-missing", "the consumed topic does not exist"),
    (
        "dead-letter-topic-missing",
        "the dead-letter topic does not exist; advice if the consumer creates it",
    ),
    (
        "in-doubt-topic-missing",
        "the in-doubt topic does not exist; advice if the consumer creates it",
    ),
    (
        "topic-not-described",
        "the user may not read the configuration of a topic",
    ),
    (
        "window-shorter-than-retention",
        "the topic keeps messages for longer than the window",
    ),
    (
        "dead-letters-expire",
        "a dead-letter or in-doubt topic deletes messages by time or size",
    ),
    (
        "dead-letters-compacted",
        "a dead-letter or in-doubt topic is compacted",
    ),
    (
        "dead-letters-refused",
        "a dead-letter or in-doubt topic needs more in-sync replicas than it has",
    ),
    (
        "dead-letters-too-small",
        "a dead-letter or in-doubt topic has a smaller message limit than the consumed topic",
    ),
    (
        "dead-letters-have-one-copy",
        "a dead-letter or in-doubt topic has one replica",
    ),
    ("rabbitmq-away", "RabbitMQ is unreachable"),
    (
        "rabbitmq-refuses-the-login",
        "RabbitMQ rejects the user or the password",
    ),
    (
        "rabbitmq-refuses-the-virtual-host",
        "the virtual host does not exist, or the user has no permission for it",
    ),
    (
        "queue-missing",
        "the consumed queue does not exist; advice if the consumer declares it",
    ),
    (
        "dead-letter-queue-missing",
        "the dead-letter queue does not exist; advice if the consumer declares it",
    ),
    (
        "in-doubt-queue-missing",
        "the in-doubt queue does not exist; advice if the consumer declares it",
    ),
    (
        "queue-cannot-be-used",
        "the user has no permission for a queue",
    ),
    (
        "queue-not-compared",
        "the user may not configure a queue, so its arguments cannot be compared",
    ),
    (
        "queue-not-durable",
        "a queue is deleted when the broker restarts",
    ),
    (
        "queue-deletes-itself",
        "a queue is deleted with its last consumer or connection",
    ),
    ("queue-expires", "a queue has a message TTL or expires"),
    (
        "queue-has-a-length-limit",
        "a queue drops or refuses messages when it is full",
    ),
    (
        "dead-letters-dropped-when-read",
        "a dead-letter or in-doubt quorum queue counts reads towards a delivery limit",
    ),
    (
        "queue-drops-what-it-gives-up",
        "messages over the delivery limit are not dead-lettered",
    ),
    (
        "queue-has-other-arguments",
        "a queue has arguments that oncegate does not declare",
    ),
];
