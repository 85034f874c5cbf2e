//! The kubelet's on-disk device state, every version of it.
