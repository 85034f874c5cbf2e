//! Credentials of the process at the other end of a socket.

use std::fmt;
use std::io;

use tokio::net::UnixStream;

/// Credentials of the process at the other end of a socket, as the kernel reports them.
///
/// On the accepting side that is the process that connected, on the dialling side the one that listens. Handlers get
/// it with `request.extensions().get::<PeerCred>()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerCred {
    pub uid: u32,
    pub gid: u32,
    /// `None` for a process that is not visible in this PID namespace.
    pub pid: Option<i32>,
}

impl PeerCred {
    pub(crate) fn of(stream: &UnixStream) -> io::Result<Self> {
        let cred = stream.peer_cred()?;
        Ok(Self {
            uid: cred.uid(),
            gid: cred.gid(),
            pid: cred.pid().filter(|&pid| pid != 0),
        })
    }
}

impl fmt::Display for PeerCred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "pid {pid}, uid {}", self.uid),
            None => write!(f, "uid {}", self.uid),
        }
    }
}
