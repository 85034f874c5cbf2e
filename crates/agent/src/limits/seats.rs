//! Places for plugins: so many in all and for each user, so many names that one process may serve, and so much memory
//! for its lists.
//!
//! A list is kept when its plugin leaves, so it counts until another one takes its place or the node has forgotten it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use devlet_uds::PeerCred;

use super::{Limit, Limits, OverLimit};
use crate::access::Access;

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
    /// A place for a plugin that serves a resource or a driver, which is held until the answer is dropped. Users that
    /// are not trusted have a quarter of the places each, and three quarters together: the rest is for those that are.
    pub(crate) fn take(
        &self,
        process: Process,
        access: &Access,
        name: &str,
        socket: PathBuf,
        limits: &Limits,
    ) -> Result<Seat, OverLimit> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (name.to_owned(), socket);
        let own = all.get(&process);
        if own.is_none_or(|own| !own.served.contains_key(&key)) {
            check_places(&all, process.0, access, limits.plugins)?;
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

/// Whether there is a place for another plugin of a user.
fn check_places(all: &Taken, uid: u32, access: &Access, most: usize) -> Result<(), OverLimit> {
    let count = |counts: &dyn Fn(u32) -> bool| {
        let own = all.iter().filter(|((uid, _), _)| counts(*uid));
        own.map(|(_, own)| own.served.len()).sum::<usize>()
    };
    let taken = count(&|_| true);
    Limit::PLUGINS.check(taken + 1, most, || format!("{taken} plugins are connected"))?;
    if access.is_trusted(uid) {
        return Ok(());
    }
    let taken = count(&|other| other == uid);
    if taken >= (most / 4).max(1) {
        let what = format!(
            "{taken} plugins of user {uid} are connected, and each user but root and devlet's own has a quarter of the places"
        );
        return Err(Limit::PLUGINS.exceeded(what, most));
    }
    let taken = count(&|other| !access.is_trusted(other));
    if taken >= most - most / 4 {
        let what = format!(
            "{taken} plugins of users other than root and devlet's own are connected, and a quarter of the places is \
             reserved for these two"
        );
        return Err(Limit::PLUGINS.exceeded(what, most));
    }
    Ok(())
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
            .take(
                (0, Some(pid)),
                &Access::default(),
                name,
                socket,
                &Limits::default(),
            )
            .unwrap()
    }

    #[test]
    fn one_user_cannot_take_the_places_of_others_and_some_are_reserved_for_root() {
        let seats = Seats::default();
        let limits = Limits {
            plugins: 16,
            ..Limits::default()
        };
        let access = Access {
            own_uid: 7,
            ..Access::default()
        };
        let take = |uid: u32, number: usize| {
            // Each from a process of its own.
            let process = (uid, i32::try_from(number).ok());
            let socket = PathBuf::from(format!("/{uid}-{number}.sock"));
            seats.take(process, &access, "acme.com/gpu", socket, &limits)
        };
        let mut taken = Vec::new();
        for uid in [1000, 1001, 1002] {
            taken.extend((0..4).map(|number| take(uid, number).unwrap()));
            let refused = take(uid, 4).unwrap_err().to_string();
            let expected = format!("4 plugins of user {uid} are connected");
            assert!(
                refused.starts_with(&expected) && refused.ends_with("limits.plugins allows 16"),
                "{refused}"
            );
        }
        let refused = take(1003, 0).unwrap_err().to_string();
        assert!(
            refused.contains("a quarter of the places is reserved"),
            "{refused}"
        );
        for (uid, number) in [(0, 0), (0, 1), (7, 0), (7, 1)] {
            taken.push(take(uid, number).unwrap());
        }
        let refused = take(0, 2).unwrap_err().to_string();
        assert_eq!(refused, "16 plugins are connected, limits.plugins allows 16");
        drop(taken.remove(0));
        assert!(take(1000, 5).is_ok());
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
