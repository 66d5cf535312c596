//! A URL in place of a store.
// error: `&str` is not a store
// error: pass one of `Redis::at(…)`, `Sqlite::file(…)` and `MemoryStore::new()`

use oncegate::Consumer;

fn main() {
    let _ = Consumer::builder().store("redis://localhost:6379");
}
