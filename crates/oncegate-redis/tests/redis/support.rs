//! Helpers of the tests.

use oncegate_core::marker::{Guarantee, Operation, OperationKind, Token};
use oncegate_redis::Redis;
pub(crate) use oncegate_testkit::operations::{
    DONE, GRANTED, SECOND, apply_one, key, operation, terms, verdicts,
};
use redis::aio::MultiplexedConnection;

/// The store on the shared server, with a prefix of its own.
pub(crate) fn store() -> (Redis, String) {
    let prefix = format!("test:{:032x}:", Token::random().0);
    (
        at(&oncegate_testkit::redis_url().expect("ONCEGATE_REDIS is set")).prefix(&prefix),
        prefix,
    )
}

/// A store with a long timeout: the machine may be busy with other tests.
pub(crate) fn at(url: &str) -> Redis {
    Redis::at(url).timeout(5 * SECOND)
}

/// A plain client on the shared server.
pub(crate) async fn client() -> MultiplexedConnection {
    client_of(&oncegate_testkit::redis_url().expect("ONCEGATE_REDIS is set")).await
}

pub(crate) async fn client_of(url: &str) -> MultiplexedConnection {
    let config = redis::AsyncConnectionConfig::new()
        .set_response_timeout(Some(20 * SECOND))
        .set_connection_timeout(Some(20 * SECOND));
    let client = redis::Client::open(url).expect("a URL");
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .expect("Redis answers")
}

pub(crate) fn claim(id: &str, token: u128) -> Operation {
    operation(
        id,
        OperationKind::Claim,
        token,
        0,
        terms(Guarantee::EffectivelyOnce),
    )
}

pub(crate) fn complete(id: &str, token: u128, attempt: u32) -> Operation {
    operation(
        id,
        OperationKind::Complete,
        token,
        attempt,
        terms(Guarantee::EffectivelyOnce),
    )
}

/// The book's `ACL SETUSER` line with the rights that a store needs, and the right to add for one of
/// its forms.
pub(crate) fn rights(added: &str) -> String {
    let book = include_str!("../../../../docs/src/stores.md");
    assert!(
        book.contains(&format!("`{added}`")),
        "the book does not name {added}"
    );
    let line = book
        .lines()
        .find(|line| line.starts_with("ACL SETUSER oncegate "))
        .expect("the line of the book");
    format!("{line} {added}")
}
