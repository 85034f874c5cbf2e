//! Where a process listens.

use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

use crate::events::{Event, tell};

/// Sockets that are removed at the end, unless the process is killed.
#[derive(Debug, Default)]
pub(crate) struct Sockets(Vec<PathBuf>);

impl Drop for Sockets {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Sockets {
    /// Listens from now on. The socket is a new one each time, as a real plugin's.
    pub(crate) fn listen(&mut self, path: PathBuf) -> UnixListener {
        let _ = std::fs::remove_file(&path);
        let listener =
            UnixListener::bind(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        tell(&Event::Serving {
            socket: path.display().to_string(),
        });
        self.0.push(path);
        listener
    }

    pub(crate) fn has(&self, path: &Path) -> bool {
        self.0.iter().any(|each| each == path)
    }
}
