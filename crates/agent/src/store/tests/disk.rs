//! Disks with faults.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex};

use redb::StorageBackend;
use redb::backends::FileBackend;

use crate::store::Storage;

/// What a disk does next.
#[derive(Debug, Default)]
struct Will {
    write_error: Option<io::ErrorKind>,
    sync_error: Option<io::ErrorKind>,
    /// From which sync on they fail.
    failing_after: usize,
    holds_syncs: bool,
    syncs_waiting: usize,
    syncs: usize,
    /// By whom, by name of the thread.
    syncs_by: BTreeMap<String, usize>,
}

/// A disk that can be told to fail and to wait.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk(Arc<(Mutex<Will>, Condvar)>);

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

    fn will(&self, change: impl FnOnce(&mut Will)) {
        change(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
    }

    pub(super) fn fail_writes(&self, error: Option<io::ErrorKind>) {
        self.will(|will| will.write_error = error);
    }

    pub(super) fn fail_syncs(&self, error: Option<io::ErrorKind>) {
        self.will(|will| (will.sync_error, will.failing_after) = (error, 0));
    }

    /// This many succeed, counted from the first one of all; those after it fail.
    pub(super) fn fail_syncs_after(&self, count: usize) {
        let error = Some(io::ErrorKind::Other);
        self.will(|will| (will.sync_error, will.failing_after) = (error, count));
    }

    pub(super) fn hold_syncs(&self) {
        self.will(|will| will.holds_syncs = true);
    }

    pub(super) fn let_syncs_go(&self) {
        self.will(|will| will.holds_syncs = false);
    }

    pub(super) fn syncs(&self) -> usize {
        self.0.0.lock().unwrap().syncs
    }

    /// How many there were by threads of a name.
    pub(super) fn syncs_by(&self, thread: &str) -> usize {
        let will = self.0.0.lock().unwrap();
        will.syncs_by.get(thread).copied().unwrap_or_default()
    }

    /// Returns when a sync is being held up.
    pub(super) fn wait_for_a_sync(&self) {
        let will = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(will, |will| will.syncs_waiting == 0).unwrap());
    }

    fn sync(&self) -> io::Result<()> {
        let (lock, condition) = &*self.0;
        let mut will = lock.lock().unwrap();
        will.syncs += 1;
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        *will.syncs_by.entry(thread).or_default() += 1;
        let number = will.syncs;
        will.syncs_waiting += 1;
        condition.notify_all();
        will = condition.wait_while(will, |will| will.holds_syncs).unwrap();
        will.syncs_waiting -= 1;
        let error = will.sync_error.filter(|_| number > will.failing_after);
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
