//! A server of a model over HTTP, with OpenAI's API: the [`engine`] computes the sequences of all clients together,
//! [`api`] translates between it and the clients, and [`server`] and [`guard`] stand between both and the network.

pub mod api;
pub mod engine;
pub mod guard;
pub mod metrics;
pub mod page;
pub mod server;
