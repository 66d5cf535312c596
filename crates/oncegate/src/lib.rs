//! Idempotent message consumers for Kafka and RabbitMQ.
