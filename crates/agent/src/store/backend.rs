//! What lies under the database: a file, counted, with a place for tests to lose writes.

use std::fmt;
use std::io;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

use crate::metrics::statistics::Counters;

/// What to put between the database and its file.
///
/// The default is nothing. Tests put something there that fails, waits, or forgets what was not synced.
#[derive(Clone)]
pub struct Storage(Arc<dyn Fn(FileBackend) -> Box<dyn StorageBackend> + Send + Sync>);

impl Storage {
    /// Every file that is opened goes through `wrap`.
    pub fn new(wrap: impl Fn(FileBackend) -> Box<dyn StorageBackend> + Send + Sync + 'static) -> Self {
        Self(Arc::new(wrap))
    }

    pub(crate) fn over(&self, file: FileBackend, counters: &Arc<Counters>) -> Arc<Counted> {
        Arc::new(Counted {
            inner: (self.0)(file),
            counters: Arc::clone(counters),
        })
    }
}

impl Default for Storage {
    fn default() -> Self {
        Self::new(|file| Box::new(file))
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Storage")
    }
}

/// A file whose syncs are counted.
#[derive(Debug)]
pub(crate) struct Counted {
    inner: Box<dyn StorageBackend>,
    counters: Arc<Counters>,
}

impl Counted {
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }

    pub(crate) fn length(&self) -> io::Result<u64> {
        self.inner.len()
    }

    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }

    pub(crate) fn sync_data(&self) -> io::Result<()> {
        let started = Instant::now();
        let result = self.inner.sync_data();
        self.counters.syncs.fetch_add(1, Ordering::Relaxed);
        self.counters.sync_durations.add_duration(started.elapsed());
        result
    }

    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.inner.write(offset, data)
    }
}

/// What is behind the first bytes of a file, as a file of its own.
#[derive(Debug)]
pub(crate) struct Behind {
    pub(crate) file: Arc<Counted>,
    pub(crate) first: u64,
}

impl Behind {
    fn inner(&self) -> &dyn StorageBackend {
        &*self.file.inner
    }
}

impl StorageBackend for Behind {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.length()?.saturating_sub(self.first))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(self.first + offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(self.first + len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write(self.first + offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.inner().close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner().try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner().try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner().lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner().lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner().unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner().query_lock_range(start, end)
    }
}
