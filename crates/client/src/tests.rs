//! Tests of the crate as a whole.

mod connect;
// Checks that the bindings match the `.proto` file, as the bindings of the kubelet's APIs.
#[path = "../../kubelet-api/tests/wire/generated.rs"]
mod generated;
