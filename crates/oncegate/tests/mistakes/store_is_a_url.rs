//! A URL in place of a store.
// says: `&str` is not a store
// says: pass one of `Redis::at(…)`, `Sqlite::file(…)` and `MemoryStore::new()`

use oncegate::Consumer;

fn main() {
    let _ = Consumer::builder().store("redis://localhost:6379");
}
