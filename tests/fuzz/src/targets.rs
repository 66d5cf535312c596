//! The targets, a file each.

mod amqp_frames;
mod amqp_headers;
mod consumer_settings;
mod headers;
mod ids;
mod markers;
mod urls;

pub use amqp_frames::amqp_frames;
pub use amqp_headers::amqp_headers;
pub use consumer_settings::settings;
pub use headers::headers;
pub use ids::ids;
pub use markers::markers;
pub use urls::urls;
