//! The codes of findings.

/// Code and meaning.
pub(crate) const CODES: &[(&str, &str)] = &[
    (
        "lease-not-shorter-than-window",
        "the lease is not shorter than the window",
    ),
    (
        "lease-too-short",
        "the lease is too short to be renewed in time",
    ),
    (
        "max-age-exceeds-window",
        "messages older than the dedup window count as new",
    ),
    (
        "consumer-timeout-too-short",
        "a delivery may stay unacknowledged for longer than the consumer timeout of RabbitMQ",
    ),
    (
        "scope-not-configured",
        "no scope and no prefix: two services on the same store would skip each other's messages",
    ),
    (
        "audit-directory-missing",
        "the directory of the audit file does not exist",
    ),
    (
        "broker-not-configured",
        "no broker is configured, so only the store is checked",
    ),
    ("store-not-configured", "no store is configured"),
    ("store-unreachable", "Redis or PostgreSQL is unreachable"),
    (
        "store-login-rejected",
        "Redis rejects the user or the password",
    ),
    (
        "store-permission-missing",
        "the user lacks permission for a command or for its keys",
    ),
    (
        "tool-permission-missing",
        "the user lacks permission for a command that only `oncegate` runs",
    ),
    (
        "store-unusable",
        "the store cannot be used; the finding has the reason",
    ),
    (
        "store-volatile",
        "a crash may lose markers: they are in the memory of a process, in an SQLite file on a file system in memory, or in PostgreSQL \
         with fsync or full_page_writes off or an unlogged table",
    ),
    (
        "store-file-missing",
        "there is no SQLite file yet: store.url may name a wrong path, or a volume is not mounted",
    ),
    (
        "store-disk-full",
        "the disk of the SQLite file is full, or soon will be",
    ),
    ("store-too-old", "Redis is older than 7.0"),
    ("store-is-replica", "the configured server is a replica"),
    (
        "store-is-cluster-node",
        "the configured server is one node of a Cluster",
    ),
    (
        "store-evicts-keys",
        "Redis evicts keys when its memory is full",
    ),
    (
        "store-without-append-only-file",
        "Redis has no append-only file",
    ),
    (
        "store-append-only-file-error",
        "Redis cannot write its append-only file",
    ),
    (
        "store-nearly-full",
        "Redis uses more than 80 % of its memory",
    ),
    (
        "store-memory-too-small",
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
    (
        "kafka-unreachable",
        "Kafka is unreachable or refuses the request",
    ),
    (
        "kafka-permission-missing",
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
        "topic-config-not-readable",
        "the user may not read the configuration of a topic",
    ),
    (
        "window-shorter-than-retention",
        "the topic keeps messages for longer than the window",
    ),
    (
        "dead-letter-topic-limited-retention",
        "a dead-letter or in-doubt topic deletes messages by time or size",
    ),
    (
        "dead-letter-topic-compacted",
        "a dead-letter or in-doubt topic is compacted",
    ),
    (
        "dead-letter-topic-min-insync-replicas",
        "a dead-letter or in-doubt topic needs more in-sync replicas than it has",
    ),
    (
        "dead-letter-topic-max-message-bytes",
        "a dead-letter or in-doubt topic has a smaller message limit than the consumed topic",
    ),
    (
        "dead-letter-topic-one-replica",
        "a dead-letter or in-doubt topic has one replica",
    ),
    ("rabbitmq-unreachable", "RabbitMQ is unreachable"),
    (
        "rabbitmq-login-rejected",
        "RabbitMQ rejects the user or the password",
    ),
    (
        "rabbitmq-virtual-host-rejected",
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
        "queue-permission-missing",
        "the user has no permission for a queue",
    ),
    (
        "queue-arguments-not-checked",
        "the user may not configure a queue, so its arguments cannot be compared",
    ),
    (
        "queue-not-durable",
        "a queue is deleted when the broker restarts",
    ),
    (
        "queue-auto-deleted",
        "a queue is deleted with its last consumer or connection",
    ),
    ("queue-expires", "a queue has a message TTL or expires"),
    (
        "queue-length-limit",
        "a queue drops or refuses messages when it is full",
    ),
    (
        "dead-letter-queue-delivery-limit",
        "a dead-letter or in-doubt quorum queue counts reads towards a delivery limit",
    ),
    (
        "queue-without-dead-letter-exchange",
        "messages over the delivery limit are not dead-lettered",
    ),
    (
        "single-active-consumer-delivery-limit",
        "advice: stops of a consumer that keeps an order count towards the delivery limit of the queue",
    ),
    (
        "queue-arguments-differ",
        "a queue has arguments that oncegate does not declare",
    ),
    (
        "settings-refused",
        "the consumer refuses a setting in [kafka] or [rabbitmq]",
    ),
    (
        "queue-refused",
        "the consumer refuses the consumed queue: it has another type or other arguments",
    ),
];
