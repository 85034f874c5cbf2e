//! Device nodes of this host.

use std::io;
use std::path::Path;

use rustix::fs::FileType;

/// Type, numbers and mode of a device node on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostNode {
    /// Block, character or fifo.
    pub node_type: NodeType,
    /// The major number; 0 for a fifo.
    pub major: u32,
    /// The minor number; 0 for a fifo.
    pub minor: u32,
    /// The permission bits.
    pub mode: u32,
}

/// The types of device nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeType {
    /// `b`
    Block,
    /// `c`
    Character,
    /// `p`
    Fifo,
}

impl NodeType {
    /// Returns the letter used in a spec.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Block => "b",
            Self::Character => "c",
            Self::Fifo => "p",
        }
    }
}

/// Why a device node on the host could not be looked up.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    /// The path is not a device node. It may be a link to one: links are not followed.
    #[error("it is not a device node")]
    NotADevice,
    /// The path does not exist or is not accessible.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl HostNode {
    /// Looks up a device node on this host. Like the reference implementation, it does not follow links.
    pub fn lookup(path: &Path) -> Result<Self, LookupError> {
        let stat = rustix::fs::lstat(path).map_err(io::Error::from)?;
        let node_type = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => NodeType::Block,
            FileType::CharacterDevice => NodeType::Character,
            FileType::Fifo => NodeType::Fifo,
            _ => return Err(LookupError::NotADevice),
        };
        let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        Ok(Self {
            node_type,
            major,
            minor,
            mode: stat.st_mode & 0o7777,
        })
    }
}
