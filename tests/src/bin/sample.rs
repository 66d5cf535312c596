//! Runs a sample of the documentation against the servers of the tests; the argument is its name.
#![forbid(unsafe_code)]

macro_rules! samples {
    ($($name:ident),*) => {
        $(#[allow(dead_code, reason = "as in the documentation")]
        mod $name {
            include!(concat!(env!("OUT_DIR"), "/", stringify!($name), ".rs"));
        })*

        fn main() -> Result<(), Box<dyn std::error::Error>> {
            let name = std::env::args().nth(1).unwrap_or_default();
            match name.as_str() {
                $(stringify!($name) => $name::main()?,)*
                unknown => return Err(format!("no sample `{unknown}`").into()),
            }
            Ok(())
        }
    };
}

samples!(admin, coming_from, kafka, outbox, rabbitmq, replies, trial);

/// The samples expect the dead-letter and in-doubt topics to exist.
const ONE_BROKER: oncegate::TopicCreation = oncegate::TopicCreation::Create {
    partitions: 1,
    replication: 1,
};

/// Prints the id at the start of the handler and at its end.
async fn print_start_and_end(id: &str) {
    println!("start of {id}");
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    println!("{id}");
}

/// A variable that the tests set.
fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}
