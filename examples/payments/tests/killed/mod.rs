//! Workers with an inbox in PostgreSQL are killed with SIGKILL, on both brokers.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::{PAYMENTS, demo, remove_queues, until, variables};

const PAYMENTS_PER_BROKER: &str = "2000";
const KILLS: usize = 12;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_workers_with_an_inbox_charge_once_and_leave_nothing_in_doubt() {
    let directory = tempfile::tempdir().expect("a directory");
    let run_dir = directory.path();
    let name = format!("killed-{}", std::process::id());
    let rabbitmq = oncegate_testkit::rabbitmq_url().expect("set");
    let kafka = oncegate_testkit::kafka_brokers().expect("set");
    let postgres = oncegate_testkit::postgres_url().expect("set");
    let postgres = format!("{postgres}?options[search_path]={name}");
    let variables = |broker: &'static str| {
        let mut variables = variables(&name, broker, [&kafka, &rabbitmq, &postgres]);
        variables.push(("ONCEGATE_ADMIN_LISTEN", "127.0.0.1:0"));
        variables.push(("ONCEGATE_STORE_VOLATILE", "accepted"));
        variables.push(("ONCEGATE_GATE_BACKOFF", "50ms"));
        let properties = "session.timeout.ms=6000,heartbeat.interval.ms=1000";
        variables.push(("ONCEGATE_KAFKA_PROPERTIES", properties));
        variables
    };
    let guarantee = ["--guarantee", "exactly-once-in-database"];
    let worker = |broker| {
        let arguments = [&["work"], &guarantee[..]].concat();
        demo(
            &arguments,
            &variables(broker),
            run_dir,
            "admin port http://",
        )
        .0
    };
    let brokers = ["kafka", "rabbitmq"];
    let mut workers = brokers.map(|broker| (broker, worker(broker)));
    let producers = brokers.map(|broker| {
        let arguments = ["produce", "--broker", broker, "--prefix", broker];
        let amount = ["--payments", PAYMENTS_PER_BROKER, "--rate", "250"];
        let arguments = [&arguments[..], &amount].concat();
        demo(&arguments, &variables(broker), run_dir, "sending ").0
    });
    for kill in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(300..1_200))).await;
        let (broker, killed) = &mut workers[kill % 2];
        *killed = worker(broker); // drops the other one, which kills it
    }
    for mut producer in producers {
        assert!(producer.0.wait().expect("it ended").success());
    }
    let report = || {
        let mut report = Command::new(PAYMENTS);
        report.args(["report", "--json", "--payments", PAYMENTS_PER_BROKER]);
        report.args(guarantee).arg("--run-dir").arg(run_dir);
        let report = report.envs(variables("kafka")).output().expect("it ran");
        serde_json::from_slice::<Value>(&report.stdout).map_err(|_| format!("{report:?}"))
    };
    until("every payment is charged", async || {
        let report = report()?;
        match report["lost"] == 0 && report["charged"] == 4_000 {
            true => Ok(()),
            false => Err(report.to_string()),
        }
    })
    .await;
    let report = report().expect("a report");
    let zero = ["charged_twice", "lost", "in_doubt"].map(|count| report[count].as_u64());
    assert_eq!(zero, [Some(0); 3], "{report}");
    drop(workers);
    remove_queues(&rabbitmq, &name).await;
}
