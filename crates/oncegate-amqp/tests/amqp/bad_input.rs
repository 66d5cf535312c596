//! Messages that nobody should send.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::QueueKind;
use oncegate_core::road::{Reason, Settlement};

use crate::rig::*;
use crate::trouble::spoiling_proxy;

/// A table in a table in a table, as it travels: a name of one letter, `F`, a length, and what is inside.
fn nested(depth: usize) -> Vec<u8> {
    let mut bytes = vec![0; depth * 7];
    for (level, part) in bytes.chunks_exact_mut(7).enumerate() {
        let inside = u32::try_from((depth - level - 1) * 7).expect("a frame holds it");
        part[..3].copy_from_slice(b"\x01aF");
        part[3..].copy_from_slice(&inside.to_be_bytes());
    }
    bytes
}

/// Makes the text under `nested` a table: both have a length and so many bytes.
fn as_table(passed: &mut [u8]) {
    if let Some(found) = passed.windows(7).position(|seven| seven == b"nestedS") {
        passed[found + 6] = b'F';
    }
}

#[tokio::test]
async fn headers_nested_deeply_are_carried_as_they_are() {
    for depth in [2, 50] {
        let rig = Rig::new().await;
        let mut source = open(rig.source(QueueKind::Quorum)).await;
        let spoiler = rig.again_at(&spoiling_proxy(as_table).await).await;
        let mut table = FieldTable::default();
        table.insert("nested".into(), AMQPValue::LongString(nested(depth).into()));
        spoiler.publish_with("a", BasicProperties::default().with_headers(table)).await;
        let delivery = delivery(&mut source).await;
        settle(&mut source, delivery, Settlement::Reject(Reason::Refused)).await;
        close(source).await;
        rig.take(&rig.dead_letters()).await;
        rig.done().await;
    }
}
