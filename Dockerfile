# The payments demo for Kafka, RabbitMQ and Redis, and the command line tool `oncegate`.

FROM rust:1-bookworm AS build
# Build dependencies of librdkafka.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc libssl-dev make pkg-config zlib1g-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p payments --features kafka,rabbitmq \
    && cargo build --release --locked -p oncegate-cli

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libssl3 zlib1g \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home payments \
    && install -d -o payments -g payments /data
COPY --from=build /src/target/release/payments /src/target/release/oncegate /usr/local/bin/
USER payments
WORKDIR /data
VOLUME /data
ENTRYPOINT ["payments"]
