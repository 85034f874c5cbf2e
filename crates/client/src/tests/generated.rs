//! Checks that the bindings under `src/generated` match the `.proto` file, with the test of `devlet-kubelet-api`.

#[path = "../../../kubelet-api/tests/wire/generated.rs"]
mod generated;
