//! The messages that are sent: payments, some of them twice, and malformed messages.

use serde::{Deserialize, Serialize};

/// The header with the id of a payment.
pub(crate) const ID_HEADER: &str = "payment-id";

#[derive(Serialize, Deserialize)]
pub(crate) struct Payment {
    pub(crate) id: String,
    pub(crate) card: String,
    /// In cents.
    pub(crate) amount: u32,
}

#[derive(Clone)]
pub(crate) struct Outgoing {
    /// The id header; a message without one is malformed.
    pub(crate) id: Option<String>,
    pub(crate) body: String,
    /// `false` for a malformed message, which must be dead-lettered.
    pub(crate) is_valid: bool,
}

impl Outgoing {
    pub(crate) fn name(&self) -> String {
        name(self.id.as_deref().map(str::as_bytes), self.body.as_bytes())
    }
}

/// Identifies a message: its id, or its body if it has none.
pub(crate) fn name(id: Option<&[u8]>, body: &[u8]) -> String {
    String::from_utf8_lossy(id.unwrap_or(body)).into_owned()
}

/// The messages of so many payments. About 10% are sent twice, half of these in immediate
/// succession; a malformed message is added for about 1%.
pub(crate) fn messages(payments: usize, prefix: &str, seed: u64) -> Vec<Outgoing> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut placed = Vec::new();
    for place in 0..payments {
        let (id, amount) = (format!("{prefix}-{:06}", place + 1), rng.u32(100..50_000));
        let card = format!("card-{:04}", rng.u16(0..10_000));
        let payment = Payment { id, card, amount };
        let body = serde_json::to_string(&payment).expect("text and numbers are JSON");
        let mut place_message = |place, id, body, is_valid| {
            placed.push((place, Outgoing { id, body, is_valid }));
        };
        if rng.u8(0..100) == 0 {
            let id = rng.bool().then(|| format!("broken-{}", payment.id));
            place_message(place, id, body[..body.len() / 2].to_owned(), false);
        }
        if rng.u8(0..10) == 0 {
            let distance = if rng.bool() { 0 } else { rng.usize(50..500) };
            let id = Some(payment.id.clone());
            place_message(place + distance, id, body.clone(), true);
        }
        place_message(place, Some(payment.id), body, true);
    }
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, message)| message).collect()
}
