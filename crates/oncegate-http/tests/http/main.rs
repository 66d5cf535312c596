//! The layer around services: each row of the table in the book, and a server with clients.

mod bodies;
mod keys;
mod outcomes;
mod replays;
mod server;
mod support;
