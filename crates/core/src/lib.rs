//! The rules of the node: who holds which device.
