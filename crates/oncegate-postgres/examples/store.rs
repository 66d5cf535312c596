//! The PostgreSQL store of a consumer, as the README of this crate has it.

use oncegate::Consumer;

fn main() {
    let store = oncegate_postgres::Postgres::url("postgres://ledger:secret@localhost/ledger")
        .create_tables();
    let _consumer = Consumer::builder().store(store);
}
