//! Tests of the crate as a whole.

mod connect;
mod generated;
