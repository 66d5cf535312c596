use super::*;
use crate::sent::Sending;
use crate::traffic::Kind;

const VALID: Kind = Kind::Valid { amount: 1 };

/// Those payments, of one cent each, confirmed.
fn sent(ids: &[&str]) -> Sent {
    let mut sent = Sent::default();
    for id in ids {
        confirm(&mut sent, id, VALID);
    }
    sent
}

fn confirm(sent: &mut Sent, name: &str, kind: Kind) {
    sent.note(Sending::Attempted, name.to_owned(), kind);
    sent.note(Sending::Confirmed, name.to_owned(), kind);
}

/// A ledger with these charges, of one cent each.
fn charged(ids: &[&str]) -> Ledger {
    let mut ledger = Ledger::in_memory();
    for id in ids {
        ledger
            .charge(id, 1, 1, Repeats::ChargeAgain)
            .expect("booked");
    }
    ledger
}

fn letters(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn count(sent: &Sent, ledger: &Ledger, set_aside: &SetAside) -> Report {
    Report::count(
        sent,
        9,
        (ledger, Repeats::ChargeAgain),
        set_aside,
        &Counts::default(),
    )
}

#[test]
fn the_ledger_and_the_broker_decide_what_is_lost_and_charged_twice() {
    let set_aside = SetAside {
        in_doubt: letters(&["aside"]),
        ..SetAside::default()
    };
    let report = count(
        &sent(&["once", "twice", "aside", "gone"]),
        &charged(&["once", "twice", "twice"]),
        &set_aside,
    );
    assert_eq!(
        (
            report.sent,
            report.charged,
            report.charged_twice,
            report.lost
        ),
        (4, 2, 1, 1)
    );
    assert!(!report.is_right());
    assert!(count(&sent(&["once", "aside"]), &charged(&["once"]), &set_aside).is_right());
}

#[test]
fn what_the_provider_never_tells_of_has_to_stand_in_doubt_charged_or_not() {
    let (unsure_of, sent) = (letters(&["charged", "not"]), sent(&["charged", "not"]));
    let judged = |in_doubt: &[&str]| {
        let set_aside = SetAside {
            in_doubt: letters(in_doubt),
            ..SetAside::default()
        };
        count(&sent, &charged(&["charged"]), &set_aside).with_unsure(&unsure_of, &set_aside)
    };
    let right = judged(&["charged", "not"]);
    assert_eq!(
        (
            right.in_doubt,
            right.charged_twice,
            right.lost,
            right.is_right()
        ),
        (2, 0, 0, true)
    );
    let wrong = judged(&["not"]);
    assert_eq!(
        wrong.wrong(),
        ["1 payments that the provider never tells of, and that are not in doubt: charged"]
    );
    assert!(!wrong.is_right());
}

#[test]
fn a_payment_in_the_dead_letters_is_wrong_and_lost_unless_it_was_charged() {
    let set_aside = SetAside {
        dead_letters: letters(&["a", "b"]),
        ..SetAside::default()
    };
    let report = count(&sent(&["a", "b"]), &charged(&["a"]), &set_aside);
    assert_eq!((report.charged, report.lost), (1, 1));
    assert_eq!(
        report.wrong(),
        ["2 valid payments in the dead letters: a, b"]
    );

    let report = count(&sent(&["a", "b"]), &charged(&["a", "b"]), &set_aside);
    assert_eq!(report.lost, 0);
    assert!(!report.is_right());
}

#[test]
fn broken_messages_that_vanish_are_lost() {
    let mut sent = sent(&[]);
    for name in ["a", "b", "without an id: c"] {
        confirm(&mut sent, name, Kind::Malformed);
    }
    let aside = |dead_letters: &[&str]| SetAside {
        in_doubt: letters(&["b"]),
        dead_letters: letters(dead_letters),
    };
    assert!(count(&sent, &charged(&[]), &aside(&["a", "without an id: c"])).is_right());

    let report = count(
        &sent,
        &charged(&[]),
        &aside(&["a", "a", "without an id: d"]),
    );
    assert_eq!(
        (report.dead_letters, report.lost, report.is_right()),
        (3, 1, false)
    );
    assert_eq!(
        report.wrong(),
        ["1 broken messages that are not in the dead letters: without an id: c"]
    );
}

#[test]
fn charges_that_nobody_sent_are_wrong() {
    let report = count(
        &sent(&["a"]),
        &charged(&["a", "stranger"]),
        &SetAside::default(),
    );
    assert_eq!(
        (report.charged, report.lost, report.is_right()),
        (1, 0, false)
    );
    assert_eq!(
        report.wrong(),
        ["1 payments charged that were never sent: stranger"]
    );

    let mut ledger = charged(&[]);
    ledger
        .charge("a", 100, 1, Repeats::ChargeAgain)
        .expect("booked");
    let report = count(&sent(&["a"]), &ledger, &SetAside::default());
    assert_eq!(
        report.wrong(),
        ["1 payments charged with another amount than was sent: a"]
    );
}

#[test]
fn what_the_broker_never_confirmed_may_be_charged_and_cannot_be_lost() {
    let mut sent = sent(&["a"]);
    for id in ["b", "c"] {
        sent.note(Sending::Attempted, id.to_owned(), VALID);
    }
    let report = count(&sent, &charged(&["a", "b"]), &SetAside::default());
    assert!(report.is_right(), "{:?}", report.wrong());
    assert_eq!((report.sent, report.charged), (1, 2));
    assert!(report.to_string().contains("unconfirmed"));
}

#[test]
fn fewer_kills_than_asked_for_are_wrong() {
    let report = count(&sent(&["a"]), &charged(&["a"]), &SetAside::default());
    assert!(report.clone().with_kills(3, 3).is_right());
    let report = report.with_kills(2, 3);
    assert!(!report.is_right());
    assert!(report.wrong()[0].starts_with("only 2 of 3 workers were killed"));
    let table = report.to_string();
    assert!(
        table
            .lines()
            .any(|line| line.contains("workers killed") && line.contains(" 2 ")),
        "{table}"
    );
}

#[test]
fn where_workers_were_killed_the_table_says_which_counts_are_theirs() {
    let rows = |report: &Report| {
        let table = report.to_string();
        let named: Vec<String> = table
            .lines()
            .filter(|line| line.contains("wrote it down"))
            .map(str::to_owned)
            .collect();
        assert!(["charged ", "charged twice", "lost"].iter().all(|name| {
            table
                .lines()
                .any(|line| line.contains(name) && line.contains("ledger"))
        }));
        named
    };
    let report = count(&sent(&["a"]), &charged(&["a"]), &SetAside::default());
    assert_eq!(rows(&report.clone().with_kills(2, 2)), [""; 0]); // all in one process
    let report = report.with_counts_as_written_down();
    for killed in [report.clone(), report.clone().with_kills(2, 2)] {
        let rows = rows(&killed);
        let names = [
            "delivered",
            "duplicates stopped",
            "retried",
            "reconciled: happened",
            "reconciled: had not",
        ];
        assert!(
            rows.len() == names.len()
                && rows.iter().zip(names).all(|(row, name)| row.contains(name)),
            "{rows:?}"
        );
    }
    assert_eq!(rows(&report.with_kills(0, 0)), [""; 0]);
}

#[test]
fn where_the_provider_deduplicates_the_table_says_that_no_charge_can_be_the_second() {
    let (sent, ledger) = (sent(&["a"]), charged(&["a"]));
    let table = |repeats| {
        Report::count(
            &sent,
            1,
            (&ledger, repeats),
            &SetAside::default(),
            &Counts::default(),
        )
        .to_string()
    };
    assert!(
        table(Repeats::Deduplicated).contains("cannot be: the provider takes the id as its key")
    );
    assert!(!table(Repeats::ChargeAgain).contains("cannot be"));
}

#[test]
fn json_has_the_keys_that_scripts_read() {
    let report = Report::default().with_kills(0, 1);
    let json = serde_json::to_value(report).expect("a struct of numbers is JSON");
    let mut keys: Vec<_> = json
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    assert_eq!(
        keys,
        [
            "charged",
            "charged_twice",
            "dead_letters",
            "delivered",
            "duplicates_stopped",
            "in_doubt",
            "lost",
            "reconciled_had_not",
            "reconciled_happened",
            "retried",
            "sent"
        ]
    );
}
