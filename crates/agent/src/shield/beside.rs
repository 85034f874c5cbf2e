//! Plugins that listen in the kubelet's directory, beside devlet. A kubelet uses the one that registered last, so that a
//! plugin that registers with both takes its resource away from devlet.

use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use tokio::net::UnixStream;

/// Prefix of devlet's own sockets.
const OWN_PREFIX: &str = "devlet-";

/// The kubelet's own socket.
const KUBELET: &str = "kubelet.sock";

/// The most sockets that are reported.
const MAX_SOCKETS: usize = 20;

/// Returns the names of the sockets of other plugins that accept connections, sorted.
pub(super) async fn list(directory: &Path) -> Vec<String> {
    let path = directory.to_owned();
    let names = tokio::task::spawn_blocking(move || sockets(&path)).await;
    let mut live = Vec::new();
    for name in names.unwrap_or_default() {
        // A plugin that was killed leaves its socket behind.
        if UnixStream::connect(directory.join(&name)).await.is_ok() {
            live.push(name);
        }
    }
    live
}

/// Returns the names of the sockets of other plugins, sorted. Some may be left over.
pub fn sockets(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
    let names = sockets.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names
        .filter(|name| name != KUBELET && !name.starts_with(OWN_PREFIX))
        .collect();
    names.sort();
    names.truncate(MAX_SOCKETS);
    names
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn sockets_that_others_listen_on_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let bind = |name: &str| UnixListener::bind(directory.path().join(name)).unwrap();
        let _live = [bind("gpu.sock"), bind("kubelet.sock"), bind("devlet-x.sock")];
        drop(bind("dead.sock"));
        std::fs::write(directory.path().join("file"), "").unwrap();

        assert_eq!(list(directory.path()).await, ["gpu.sock"]);
        assert!(list(&directory.path().join("absent")).await.is_empty());
    }
}
