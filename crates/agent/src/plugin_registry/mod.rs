//! The directory in which plugins leave sockets to be found: `plugins_registry`.
//!
//! [`watcher`] says which sockets there are, [`handshake`] is the task that each of them gets. There is no list
//! of what should be and what is: the watcher always tells the whole truth, and [`run`] starts and ends tasks
//! until it holds.

pub mod handshake;
pub mod watcher;

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::limits::Limit;
use handshake::Handshake;
use watcher::{Identity, WatchError, Watcher};

/// Watches the directory until `stop`.
pub async fn run(
    mut watcher: Watcher,
    handshake: Handshake,
    stop: CancellationToken,
) -> Result<(), WatchError> {
    let tasks = TaskTracker::new();
    let mut running: BTreeMap<PathBuf, (Identity, CancellationToken)> = BTreeMap::new();
    loop {
        let sockets = tokio::select! {
            sockets = watcher.changed() => sockets?,
            () = stop.cancelled() => break,
        };
        // A socket that was made anew is another one: its predecessor's task ends, and so does its backoff.
        running.retain(|path, (identity, cancel)| {
            let stays = sockets.get(path) == Some(identity);
            if !stays {
                cancel.cancel();
                handshake.registrar.metrics.socket_left(path);
            }
            stays
        });
        let registrar = &handshake.registrar;
        let most = registrar.config.limits.plugins;
        for (path, identity) in sockets {
            if running.len() >= most && !running.contains_key(&path) {
                let what = format!("there are {most} sockets already");
                let error = Limit::PLUGINS.exceeded(what, most);
                tracing::warn!(socket = %path.display(), %error, "plugin is not looked at");
                registrar.metrics.limit_hit(error.limit.name());
                continue;
            }
            running.entry(path).or_insert_with_key(|path| {
                let cancel = stop.child_token();
                handshake.registrar.metrics.socket_found(path);
                tasks.spawn(handshake.clone().run(path.clone(), cancel.clone()));
                (identity, cancel)
            });
        }
    }
    tasks.close();
    tasks.wait().await;
    Ok(())
}
