//! gRPC over unix sockets, as the peers of a kubelet speak it.
