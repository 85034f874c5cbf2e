//! A disk that fails or holds up writes on request.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex};

use redb::StorageBackend;
use redb::backends::FileBackend;

use crate::store::Storage;

/// The behaviour of a disk, and counts of its syncs.
#[derive(Debug, Default)]
struct Behaviour {
    write_error: Option<io::ErrorKind>,
    sync_error: Option<io::ErrorKind>,
    /// Number of syncs that succeed before they fail.
    failing_after: usize,
    /// Number of syncs that are not held up; `None` if none is held up.
    holds_syncs_after: Option<usize>,
    syncs_waiting: usize,
    syncs: usize,
    /// By the name of the thread.
    syncs_by: BTreeMap<String, usize>,
}

/// A disk that fails or holds up writes on request.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk(Arc<(Mutex<Behaviour>, Condvar)>);

impl Disk {
    pub(super) fn storage(&self) -> Storage {
        let disk = self.clone();
        Storage::new(move |file| {
            Box::new(Faulty {
                file,
                disk: disk.clone(),
            })
        })
    }

    fn set(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
    }

    pub(super) fn fail_writes(&self, error: Option<io::ErrorKind>) {
        self.set(|behaviour| behaviour.write_error = error);
    }

    pub(super) fn fail_syncs(&self, error: Option<io::ErrorKind>) {
        self.set(|behaviour| (behaviour.sync_error, behaviour.failing_after) = (error, 0));
    }

    /// Lets syncs fail after the first `count` syncs of the disk.
    pub(super) fn fail_syncs_after(&self, count: usize) {
        let error = Some(io::ErrorKind::Other);
        self.set(|behaviour| (behaviour.sync_error, behaviour.failing_after) = (error, count));
    }

    pub(super) fn hold_syncs(&self) {
        self.hold_syncs_after(0);
    }

    /// Holds up syncs after the first `count` syncs of the disk.
    pub(super) fn hold_syncs_after(&self, count: usize) {
        self.set(|behaviour| behaviour.holds_syncs_after = Some(count));
    }

    pub(super) fn release_syncs(&self) {
        self.set(|behaviour| behaviour.holds_syncs_after = None);
    }

    pub(super) fn syncs(&self) -> usize {
        self.0.0.lock().unwrap().syncs
    }

    /// Returns the number of syncs by threads of a name.
    pub(super) fn syncs_by(&self, thread: &str) -> usize {
        let behaviour = self.0.0.lock().unwrap();
        behaviour.syncs_by.get(thread).copied().unwrap_or_default()
    }

    /// Waits until a sync is held up.
    pub(super) fn wait_for_a_sync(&self) {
        let behaviour = self.0.0.lock().unwrap();
        drop(
            self.0
                .1
                .wait_while(behaviour, |behaviour| behaviour.syncs_waiting == 0)
                .unwrap(),
        );
    }

    fn sync(&self) -> io::Result<()> {
        let (lock, condition) = &*self.0;
        let mut behaviour = lock.lock().unwrap();
        behaviour.syncs += 1;
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        *behaviour.syncs_by.entry(thread).or_default() += 1;
        let number = behaviour.syncs;
        behaviour.syncs_waiting += 1;
        condition.notify_all();
        behaviour = condition
            .wait_while(behaviour, |behaviour| {
                behaviour.holds_syncs_after.is_some_and(|count| number > count)
            })
            .unwrap();
        behaviour.syncs_waiting -= 1;
        let error = behaviour.sync_error.filter(|_| number > behaviour.failing_after);
        error.map_or(Ok(()), |kind| Err(kind.into()))
    }
}

#[derive(Debug)]
struct Faulty {
    file: FileBackend,
    disk: Disk,
}

impl StorageBackend for Faulty {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.sync()?;
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let error = self.disk.0.0.lock().unwrap().write_error;
        error.map_or(Ok(()), |kind| Err(io::Error::from(kind)))?;
        self.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }
}
