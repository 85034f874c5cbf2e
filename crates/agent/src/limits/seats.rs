//! Places for plugins: so many in all, and so many names that one process may serve.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Limit, Limits, OverLimit};
use crate::grpc::uds::PeerCred;

/// Who sits where.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seats(Arc<Mutex<Taken>>);

/// What a process serves, and where; and how often, since one registration may replace another.
type Taken = BTreeMap<Process, BTreeMap<(String, PathBuf), usize>>;

/// A user, and the process if it is visible from here.
pub(crate) type Process = (u32, Option<i32>);

/// The process at the other end.
pub(crate) fn process(peer: &PeerCred) -> Process {
    (peer.uid, peer.pid)
}

impl Seats {
    /// A place for a plugin that serves a resource or a driver, which is held until the answer is dropped.
    pub(crate) fn take(
        &self,
        process: Process,
        name: &str,
        socket: PathBuf,
        limits: &Limits,
    ) -> Result<Seat, OverLimit> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (name.to_owned(), socket);
        let taken = all.values().map(BTreeMap::len).sum::<usize>();
        let own = all.get(&process);
        if own.is_none_or(|own| !own.contains_key(&key)) {
            Limit::PLUGINS.check(taken + 1, limits.plugins, || {
                format!("{taken} plugins are connected")
            })?;
        }
        let mut names: Vec<&str> = own
            .into_iter()
            .flat_map(BTreeMap::keys)
            .map(|key| key.0.as_str())
            .collect();
        names.dedup();
        if !names.contains(&name) {
            let served = names.len();
            Limit::RESOURCES_PER_PLUGIN.check(served + 1, limits.resources_per_plugin, || {
                format!("the process serves {served} resources or drivers already")
            })?;
        }
        *all.entry(process).or_default().entry(key.clone()).or_default() += 1;
        Ok(Seat {
            seats: self.clone(),
            process,
            key,
        })
    }
}

/// A place among the plugins.
#[derive(Debug)]
#[must_use = "dropping it gives the place to somebody else"]
pub(crate) struct Seat {
    seats: Seats,
    process: Process,
    key: (String, PathBuf),
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut all = self.seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(own) = all.get_mut(&self.process) else {
            return;
        };
        if let Some(number) = own.get_mut(&self.key) {
            *number -= 1;
            if *number == 0 {
                own.remove(&self.key);
            }
        }
        if own.is_empty() {
            all.remove(&self.process);
        }
    }
}
