//! Listening sockets of a process.

use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

use crate::events::{Event, emit};

/// Sockets that are removed on exit, unless the process is killed.
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
    /// Starts to listen. The socket is created again each time, as by a real plugin.
    pub(crate) fn listen(&mut self, path: PathBuf) -> UnixListener {
        let _ = std::fs::remove_file(&path);
        let listener =
            UnixListener::bind(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        emit(&Event::Serving {
            socket: path.display().to_string(),
        });
        self.0.push(path);
        listener
    }

    pub(crate) fn has(&self, path: &Path) -> bool {
        self.0.iter().any(|each| each == path)
    }
}
