//! gRPC bindings of the kubelet's device APIs, one module per API version.
