//! Every code that a finding may have.

/// Code, and what it says.
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
        "messages are taken for new that are older than what is remembered",
    ),
    (
        "runs-outlast-the-consumer-timeout",
        "handlers may run, and leases last, for longer than RabbitMQ lets a delivery stay open",
    ),
    (
        "no-scope",
        "no scope and no prefix: another service on the same Redis would skip messages",
    ),
    (
        "audit-has-no-place",
        "the directory of the audit does not exist",
    ),
    ("store-away", "Redis does not answer"),
    (
        "store-refuses-the-login",
        "Redis refuses the user or the password",
    ),
    (
        "store-lacks-a-right",
        "the user may not run a command, or not on these keys",
    ),
    (
        "store-unusable",
        "the store cannot be used for another reason, which it says",
    ),
    (
        "store-forgets",
        "the store is the memory of a process, or an SQLite file on a file system in memory",
    ),
    ("store-too-old", "Redis is older than 7.0"),
    (
        "store-is-a-replica",
        "a replica is named instead of its primary",
    ),
    ("store-is-a-cluster-node", "one node of a Cluster is named"),
    ("store-evicts", "Redis evicts keys when its memory is full"),
    ("store-keeps-no-file", "Redis keeps no append-only file"),
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
        "fewer replicas follow than claims wait for",
    ),
    ("kafka-away", "Kafka does not answer, or refuses"),
    (
        "kafka-lacks-a-right",
        "the user may not look at a topic, not read the one that is consumed, or not use the group",
    ),
    ("topic-missing", "the topic that is consumed does not exist"),
    (
        "dead-letter-topic-missing",
        "the topic of dead letters does not exist",
    ),
    (
        "in-doubt-topic-missing",
        "the topic of messages in doubt does not exist",
    ),
    (
        "topic-not-described",
        "the broker does not tell how a topic is configured",
    ),
    (
        "window-shorter-than-retention",
        "messages may come again after their ids were forgotten",
    ),
    (
        "letters-expire",
        "a topic of letters loses them after a time, or beyond a size",
    ),
    (
        "letters-are-compacted",
        "a topic of letters keeps the last of each key alone",
    ),
    (
        "letters-are-refused",
        "a topic of letters wants more copies in sync than it has",
    ),
    (
        "letters-too-small",
        "a topic of letters takes smaller messages than the one that is consumed",
    ),
    (
        "letters-have-one-copy",
        "a topic of letters stands on one broker alone",
    ),
    ("rabbitmq-away", "RabbitMQ does not answer"),
    (
        "rabbitmq-refuses-the-login",
        "RabbitMQ refuses the user or the password",
    ),
    (
        "rabbitmq-refuses-the-virtual-host",
        "the virtual host does not exist, or is not for this user",
    ),
    ("queue-missing", "the queue that is consumed does not exist"),
    (
        "dead-letter-queue-missing",
        "the queue of dead letters does not exist",
    ),
    (
        "in-doubt-queue-missing",
        "the queue of messages in doubt does not exist",
    ),
    ("queue-cannot-be-used", "the user may not look at a queue"),
    (
        "queue-not-compared",
        "the user may not configure a queue, so that its arguments cannot be compared",
    ),
    (
        "queue-not-durable",
        "a queue goes when the broker starts again",
    ),
    (
        "queue-deletes-itself",
        "a queue goes with its last consumer or its owner",
    ),
    ("queue-expires", "what a queue holds goes after a time"),
    (
        "queue-has-a-length-limit",
        "a queue drops or refuses messages when it is full",
    ),
    (
        "letters-are-dropped-when-looked-at",
        "a quorum queue of letters counts looks towards a delivery limit",
    ),
    (
        "queue-drops-what-it-gives-up",
        "what the broker gives up on does not reach the dead letters",
    ),
    (
        "queue-has-other-arguments",
        "a queue has arguments that oncegate does not give",
    ),
];
