//! The RabbitMQ source of oncegate.
