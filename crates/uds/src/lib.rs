//! gRPC over unix sockets, for peers that may be old, slow or hostile.
//!
//! | module | purpose |
//! | --- | --- |
//! | [`listen()`], [`Listener`] | a socket that appears at its path already listening, and is made again if it disappears |
//! | [`connect`], [`PeerConnection`] | one connection to the process that listens on a path |
//! | [`PeerCred`] | the process at the other end |
//! | [`channel`] | calls on a connection, for generated clients |
//! | [`server`] | serves generated services, with limits on connections and their bytes |
//! | [`authority`] | lets `h2` accept the `:authority` of Go clients |
//! | [`rate_limit`] | rate limiters |
//!
//! The crate contains transport only. Its users decide which peers are admitted, and count refusals.

mod abortable;
pub mod authority;
mod call_tracking;
pub mod channel;
mod connection;
mod dial;
mod huffman;
mod listen;
mod peer;
mod publish;
pub mod rate_limit;
mod read_limit;
pub mod server;

pub use dial::{ClosedSignal, DialError, PeerConnection, connect, connect_limited, connect_once_limited};
pub use listen::{DEFAULT_MODE, DIRECTORY_MODE, Listener, SocketHandle, SocketMissing, listen};
pub use peer::PeerCred;
pub use publish::{ListenError, PATH_LIMIT};
pub use read_limit::ReadLimits;
