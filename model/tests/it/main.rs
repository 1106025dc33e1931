//! Tests of the crate through its public interface.

#![allow(clippy::unwrap_used)]

mod bad_input;
mod chat;
mod exactness;
mod fixture;
mod form;
mod formats;
mod forward;
mod header;
mod not_finite;
mod open;
mod rope_settings;
mod sampling;
mod source;
mod tokenizer;
