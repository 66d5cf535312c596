use std::collections::BTreeSet;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn row(number: i64, destination: &str, key: Option<&'static str>) -> OutboxRow {
    let mut message = OutboxMessage::new(format!("t/{number}"), destination, "");
    message.key = key.map(|key| Bytes::from_static(key.as_bytes()));
    OutboxRow { number, message }
}

fn queue(rows: Vec<OutboxRow>, now: Instant) -> RelayQueue {
    let mut queue = RelayQueue::new(8, now);
    queue.add(rows, now);
    queue
}

fn begun(queue: &mut RelayQueue) -> Vec<i64> {
    std::iter::from_fn(|| queue.begin().map(|(number, _)| number)).collect()
}

fn refused() -> Result<(), NotPublished> {
    Err(NotPublished::Refused("too large".into()))
}

fn not_confirmed() -> Result<(), NotPublished> {
    Err(NotPublished::NotConfirmed("no route".into()))
}

/// Executes the reading of probes that is due, with this answer; returns their numbers.
fn read_again(queue: &mut RelayQueue, rows: Vec<OutboxRow>, now: Instant) -> Vec<i64> {
    queue.schedule.level_at = now + SECOND;
    queue.schedule.answered_at = now;
    let request = queue.next_request(now).expect("a request");
    queue.answered(&request, now);
    let OutboxRequest::ReadAgain(probes) = request else {
        panic!("{request:?}")
    };
    queue.add_probes(&probes, rows, now);
    probes
}

/// Executes the requests that are due, except reads; returns them.
fn requests(queue: &mut RelayQueue, now: Instant) -> Vec<OutboxRequest> {
    let mut requests = Vec::new();
    while let Some(request) = queue.next_request(now) {
        queue.answered(&request, now);
        match request {
            OutboxRequest::Read(_) => queue.add(Vec::new(), now),
            OutboxRequest::ReadAgain(_) | OutboxRequest::Level => {}
            request => requests.push(request),
        }
    }
    requests
}

#[tokio::test]
async fn messages_of_one_key_are_published_one_after_the_other() {
    let now = Instant::now();
    let rows = vec![
        row(1, "a", Some("k")),
        row(2, "a", Some("k")),
        row(3, "b", Some("k")),
        row(4, "a", Some("l")),
        row(5, "a", None),
        row(6, "a", None),
    ];
    let mut queue = queue(rows, now);
    assert_eq!(begun(&mut queue), [1, 3, 4, 5, 6]);
    queue.published(1, &Ok(()), now);
    assert_eq!(begun(&mut queue), [2]);
}

#[tokio::test]
async fn a_refused_message_is_parked_and_only_its_key_waits() {
    let now = Instant::now();
    let rows = vec![
        row(1, "a", Some("k")),
        row(2, "a", Some("k")),
        row(3, "a", Some("l")),
        row(4, "a", Some("l")),
    ];
    let mut queue = queue(rows, now);
    assert_eq!(begun(&mut queue), [1, 3]);
    queue.published(1, &refused(), now);
    queue.published(3, &Ok(()), now);
    assert_eq!(begun(&mut queue), [4]);
    let (number, error) = (1, "too large".into());
    let expected = [
        OutboxRequest::Park { number, error },
        OutboxRequest::Remove(vec![3]),
    ];
    assert_eq!(requests(&mut queue, now), expected);
    assert_eq!(queue.rows.all.keys().copied().collect::<Vec<_>>(), [4]);
}

#[tokio::test]
async fn a_failing_destination_is_probed_with_one_message_and_others_continue() {
    let now = Instant::now();
    let rows = vec![
        row(1, "a", Some("k")),
        row(2, "a", Some("k")),
        row(3, "a", None),
        row(4, "b", None),
    ];
    let mut queue = queue(rows, now);
    assert_eq!(begun(&mut queue), [1, 3, 4]);
    let pause = queue.published(1, &not_confirmed(), now);
    assert!(pause.is_some_and(|pause| pause <= SECOND / 10));
    queue.published(3, &not_confirmed(), now);
    queue.published(4, &Ok(()), now);
    assert_eq!(begun(&mut queue), [] as [i64; 0]);
    assert_eq!(queue.rows.all.keys().copied().collect::<Vec<_>>(), [4]);
    requests(&mut queue, now);
    let later = now + SECOND;
    let probe = row(1, "a", Some("k"));
    assert_eq!(read_again(&mut queue, vec![probe], later), [1]);
    assert_eq!(begun(&mut queue), [1]);
    let read = queue.next_request(later);
    let Some(OutboxRequest::Read(query)) = &read else {
        panic!("{read:?}")
    };
    assert_eq!(query.except_destinations, [("".into(), "a".into())]);
    queue.answered(&read.expect("a read"), later);
    queue.add(vec![row(5, "b", None)], later);
    assert_eq!(begun(&mut queue), [5]);
    queue.published(1, &Ok(()), later);
    requests(&mut queue, later);
    queue.add(vec![row(2, "a", Some("k")), row(3, "a", None)], later);
    assert_eq!(begun(&mut queue), [2, 3]);
}

#[tokio::test]
async fn rows_of_a_read_from_before_a_failure_are_read_again() {
    let now = Instant::now();
    let mut queue = queue(vec![row(1, "a", Some("k")), row(2, "a", Some("k"))], now);
    requests(&mut queue, now);
    assert_eq!(begun(&mut queue), [1]);
    let later = now + SECOND / 2;
    let read = queue.next_request(later).expect("a read");
    queue.published(1, &not_confirmed(), later);
    queue.answered(&read, later);
    queue.add(vec![row(3, "a", Some("k"))], later);
    assert!(queue.rows.all.is_empty(), "row 3 would overtake row 2");
}

#[tokio::test]
async fn a_probe_that_an_operator_has_dropped_is_forgotten() {
    let now = Instant::now();
    let mut queue = queue(vec![row(1, "a", None)], now);
    assert_eq!(begun(&mut queue), [1]);
    queue.published(1, &not_confirmed(), now);
    assert!(queue.rows.all.is_empty());
    let later = now + SECOND;
    assert_eq!(read_again(&mut queue, Vec::new(), later), [1]);
    let read = queue.next_request(later);
    let Some(OutboxRequest::Read(query)) = &read else {
        panic!("{read:?}")
    };
    assert_eq!(query.except_destinations, []);
}

/// Two missing destinations with the largest bodies: neither fills the memory.
#[tokio::test]
async fn probes_leave_memory_and_slots_to_other_destinations() {
    let now = Instant::now();
    let large = |number, destination| {
        let mut row = row(number, destination, None);
        row.message.body = vec![0; 16 * 1024 * 1024].into();
        row
    };
    let names = ["a", "b", "c", "d"];
    let rows = || (1..).zip(names).map(|(number, name)| large(number, name));
    let mut queue = queue(rows().take(2).collect(), now);
    assert_eq!(begun(&mut queue), [1, 2]);
    queue.published(1, &not_confirmed(), now);
    queue.published(2, &not_confirmed(), now + SECOND / 10);
    assert_eq!(queue.rows.bytes, 0);
    let later = now + SECOND;
    let first = rows().take(1).collect();
    assert_eq!(read_again(&mut queue, first, later), [1]);
    assert_eq!(begun(&mut queue), [1]);
    let read = queue.next_request(later);
    assert!(matches!(read, Some(OutboxRequest::Read(_))), "{read:?}");
}

#[tokio::test]
async fn one_destination_leaves_slots_to_others() {
    let now = Instant::now();
    let of = |numbers: std::ops::RangeInclusive<i64>, destination| {
        numbers.map(move |number| row(number, destination, None))
    };
    let mut queue = queue(of(1..=20, "a").chain(of(21..=40, "b")).collect(), now);
    assert_eq!(begun(&mut queue), [1, 2, 3, 4, 21, 22, 23, 24]);
    let mut alone = self::queue(of(1..=20, "a").collect(), now);
    assert_eq!(begun(&mut alone).len(), 7);
    alone.add(of(21..=21, "b").collect(), now);
    assert_eq!(begun(&mut alone), [21]);
}

#[tokio::test]
async fn probes_use_a_quarter_of_the_slots() {
    let now = Instant::now();
    let names = ["a", "b", "c", "d"];
    let rows = || {
        (1..)
            .zip(names)
            .map(|(number, name)| row(number, name, None))
    };
    let mut queue = queue(rows().collect(), now);
    for number in begun(&mut queue) {
        queue.published(number, &not_confirmed(), now);
    }
    let later = now + SECOND;
    let probes = read_again(&mut queue, Vec::new(), later);
    assert_eq!(probes.len(), 2, "of 8 slots");
}

/// A storage in which transactions commit in any order.
#[derive(Default)]
struct ModelStorage {
    rows: BTreeMap<i64, OutboxRow>,
    parked: BTreeSet<i64>,
}

impl ModelStorage {
    fn read(&self, query: &UnsentQuery) -> Vec<OutboxRow> {
        let is_behind_parked = |row: &OutboxRow| {
            self.parked.range(..row.number).any(|number| {
                let parked = ordered_key(&self.rows[number].message);
                parked.is_some() && parked == ordered_key(&row.message)
            })
        };
        let selected = self.rows.values().filter(|row| {
            !self.parked.contains(&row.number)
                && !query.except.contains(&row.number)
                && !query.except_destinations.contains(&address(&row.message))
                && !is_behind_parked(row)
        });
        selected.take(query.max_rows.min(5)).cloned().collect()
    }
}

/// Random storages, results and orders of events: no message overtakes another one of its key,
/// and every message is published or waits behind a parked one.
#[tokio::test]
async fn in_any_history_the_order_of_each_key_holds_and_no_message_is_lost() {
    const KEYS: [Option<&str>; 4] = [None, Some("k"), Some("l"), Some("m")];
    let (mut parked, mut failures) = (0, 0);
    for seed in 0..2_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut now = Instant::now();
        let mut queue = RelayQueue::new(random.usize(1..6), now);
        let mut storage = ModelStorage::default();
        let mut uncommitted: Vec<OutboxRow> = (1..=40)
            .map(|number| {
                let destination = ["a", "b"][random.usize(..2)];
                row(number, destination, KEYS[random.usize(..4)])
            })
            .collect();
        let (mut publishing, mut request) = (Vec::new(), None);
        let mut published: HashMap<OrderedKey, i64> = HashMap::new();
        let mut has_failures = true;
        for step in 0.. {
            has_failures &= step < 400;
            // Rows of one key are committed in order, as transactions that lock a row are.
            if !uncommitted.is_empty() && random.u8(..3) == 0 {
                let any = random.usize(..uncommitted.len());
                let key = ordered_key(&uncommitted[any].message);
                let first = uncommitted
                    .iter()
                    .position(|row| key.is_some() && ordered_key(&row.message) == key);
                let row = uncommitted.remove(first.unwrap_or(any));
                storage.rows.insert(row.number, row);
            }
            if random.bool()
                && let Some((number, message)) = queue.begin()
            {
                if let Some(key) = ordered_key(&message) {
                    let last = published.get(&key).copied().unwrap_or(0);
                    assert!(last <= number, "seed {seed}: {number} after {last}");
                }
                publishing.push((number, message));
            }
            if request.is_none() && random.bool() {
                request = queue.next_request(now).map(|request| {
                    let rows = match &request {
                        OutboxRequest::Read(query) => storage.read(query),
                        OutboxRequest::ReadAgain(probes) => {
                            let present = probes.iter().filter_map(|it| storage.rows.get(it));
                            present.cloned().collect()
                        }
                        _ => Vec::new(),
                    };
                    (request, rows)
                });
            }
            if random.bool()
                && let Some((executed, rows)) = request.take()
            {
                queue.answered(&executed, now);
                match executed {
                    OutboxRequest::Read(_) => queue.add(rows, now),
                    OutboxRequest::ReadAgain(probes) => queue.add_probes(&probes, rows, now),
                    OutboxRequest::Remove(numbers) => numbers.iter().for_each(|number| {
                        storage.rows.remove(number);
                    }),
                    OutboxRequest::Park { number, .. } => drop(storage.parked.insert(number)),
                    OutboxRequest::Level => {}
                }
            }
            if !publishing.is_empty() && random.bool() {
                let (number, message) = publishing.swap_remove(random.usize(..publishing.len()));
                let result = match random.u8(..8) {
                    0 if has_failures => refused(),
                    1 | 2 if has_failures => not_confirmed(),
                    _ => Ok(()),
                };
                failures += u32::from(matches!(result, Err(NotPublished::NotConfirmed(_))));
                if let (Ok(()), Some(key)) = (&result, ordered_key(&message)) {
                    published.insert(key, number);
                }
                queue.published(number, &result, now);
            }
            now += Duration::from_millis(random.u64(..100));
            let waits = |row: &OutboxRow| {
                let key = ordered_key(&row.message);
                let is_parked = storage.parked.contains(&row.number);
                is_parked
                    || key.is_some()
                        && storage
                            .parked
                            .range(..row.number)
                            .any(|parked| ordered_key(&storage.rows[parked].message) == key)
            };
            let has_ended = uncommitted.is_empty() && publishing.is_empty();
            if has_ended && storage.rows.values().all(waits) {
                break;
            }
            assert!(step < 4_000, "seed {seed}: {:?}", storage.rows.keys());
        }
        parked += storage.parked.len();
    }
    assert!(parked > 500 && failures > 2_000, "{parked}, {failures}");
}
