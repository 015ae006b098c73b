//! What the integration tests share: golden files and comparison.

pub mod world;
