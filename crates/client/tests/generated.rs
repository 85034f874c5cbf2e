//! Checks that the bindings under `src/generated` match the `.proto` file, with the test of `devlet-kubelet-api`.

#[path = "../../kubelet-api/tests/generated.rs"]
mod generated;
