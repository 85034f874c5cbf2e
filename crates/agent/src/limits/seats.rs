//! Places for plugins: so many in all, so many names that one process may serve, and so much memory for its lists.
//!
//! A list is kept when its plugin leaves, so it counts until another one takes its place or the node has forgotten it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Limit, Limits, OverLimit};
use crate::grpc::uds::PeerCred;

/// Who sits where.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seats(Arc<Mutex<Taken>>);

type Taken = BTreeMap<Process, Own>;

/// What a process serves, and where.
type Key = (String, PathBuf);

/// What a process has.
#[derive(Debug, Default)]
struct Own {
    /// How often, since one registration may replace another.
    served: BTreeMap<Key, usize>,
    /// How much memory the lists take.
    lists: BTreeMap<Key, usize>,
}

impl Own {
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.served.keys().map(|key| key.0.as_str()).collect();
        names.dedup();
        names
    }
}

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
        let taken = all.values().map(|own| own.served.len()).sum::<usize>();
        let own = all.get(&process);
        if own.is_none_or(|own| !own.served.contains_key(&key)) {
            Limit::PLUGINS.check(taken + 1, limits.plugins, || {
                format!("{taken} plugins are connected")
            })?;
        }
        let names = own.map(Own::names).unwrap_or_default();
        if !names.contains(&name) {
            let served = names.len();
            Limit::RESOURCES_PER_PLUGIN.check(served + 1, limits.resources_per_plugin, || {
                format!("the process serves {served} resources or drivers already")
            })?;
        }
        let own = all.entry(process).or_default();
        *own.served.entry(key.clone()).or_default() += 1;
        Ok(Seat(Account {
            seats: self.clone(),
            process,
            key,
        }))
    }

    /// For each process that has a list: its memory.
    #[cfg(test)]
    fn charged(&self) -> Vec<usize> {
        let all = self.0.lock().unwrap();
        all.values().map(|own| own.lists.values().sum()).collect()
    }
}

/// Whose it is what a plugin makes us hold.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    seats: Seats,
    process: Process,
    key: Key,
}

impl Account {
    /// A list takes the place of the plugin's last one, unless those of its process take too much memory then.
    /// `is_kept` says whether the node has a list of that name.
    pub(crate) fn list(
        &self,
        memory: usize,
        most: usize,
        is_kept: impl Fn(&str) -> bool,
    ) -> Result<(), OverLimit> {
        let mut all = self.seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        for own in all.values_mut() {
            let Own { served, lists } = own;
            lists.retain(|key, _| served.contains_key(key) || (key.0 != self.key.0 && is_kept(&key.0)));
        }
        all.retain(|_, own| !own.served.is_empty() || !own.lists.is_empty());
        let own = all.entry(self.process).or_default();
        let others = own.lists.iter().filter(|(key, _)| **key != self.key);
        let sum = others.map(|(_, memory)| memory).sum::<usize>() + memory;
        Limit::BYTES_PER_PLUGIN.check(sum, most, || {
            format!("the lists of the plugin's process, with this one, take {sum} bytes of memory")
        })?;
        own.lists.insert(self.key.clone(), memory);
        Ok(())
    }

    /// Whose it is.
    pub(crate) fn process(&self) -> Process {
        self.process
    }

    /// The resources and drivers that its process serves.
    pub(crate) fn served(&self) -> Vec<String> {
        let all = self.seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        let names = all.get(&self.process).map(Own::names).unwrap_or_default();
        names.into_iter().map(str::to_owned).collect()
    }
}

/// A place among the plugins.
#[derive(Debug)]
#[must_use = "dropping it gives the place to somebody else"]
pub(crate) struct Seat(Account);

impl Seat {
    /// On whose account it is.
    pub(crate) fn account(&self) -> &Account {
        &self.0
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Account { seats, process, key } = &self.0;
        let mut all = seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(own) = all.get_mut(process) else {
            return;
        };
        if let Some(number) = own.served.get_mut(key) {
            *number -= 1;
            if *number == 0 {
                own.served.remove(key);
            }
        }
        if own.served.is_empty() && own.lists.is_empty() {
            all.remove(process);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(seats: &Seats, pid: i32, name: &str) -> Seat {
        let socket = PathBuf::from(format!("/{pid}.sock"));
        seats
            .take((0, Some(pid)), name, socket, &Limits::default())
            .unwrap()
    }

    #[test]
    fn lists_of_one_process_count_together_and_those_of_another_apart() {
        let seats = Seats::default();
        let [one, two] = ["a", "b"].map(|name| seat(&seats, 1, name));
        let other = seat(&seats, 2, "c");
        let is_kept = |_: &str| true;
        assert_eq!(one.account().list(60, 100, is_kept), Ok(()));
        let over = two.account().list(50, 100, is_kept).unwrap_err();
        assert_eq!(
            over.to_string(),
            "the lists of the plugin's process, with this one, take 110 bytes of memory, limits.bytesPerPlugin \
             allows 100"
        );
        assert_eq!(other.account().list(100, 100, is_kept), Ok(()));
        assert_eq!(
            one.account().list(50, 100, is_kept),
            Ok(()),
            "in place of the last one"
        );
        assert_eq!(two.account().list(50, 100, is_kept), Ok(()));
        assert_eq!(two.account().served(), ["a", "b"]);
    }

    #[test]
    fn a_list_counts_as_long_as_it_is_kept() {
        let seats = Seats::default();
        let [left, stays] = ["a", "b"].map(|name| seat(&seats, 1, name));
        left.account().list(60, 100, |_| true).unwrap();
        drop(left);
        assert!(stays.account().list(50, 100, |_| true).is_err());
        // Another process took the place of the one that left.
        let heir = seat(&seats, 2, "a");
        heir.account().list(10, 100, |_| true).unwrap();
        assert_eq!(stays.account().list(50, 100, |_| true), Ok(()));
        drop(heir);
        assert_eq!(stays.account().list(50, 100, |name| name != "a"), Ok(()));
        assert_eq!(seats.charged(), [50], "a process without anything is forgotten");
        drop(stays);
        seat(&seats, 3, "c").account().list(1, 100, |_| false).unwrap();
        assert_eq!(seats.charged(), [1]);
    }
}
