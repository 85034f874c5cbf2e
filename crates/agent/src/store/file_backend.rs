//! The file below redb: syncs are counted, and tests can wrap it in one that fails, waits or loses writes.

use std::fmt;
use std::io;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

use crate::metrics::statistics::Counters;

/// Wraps the file of the database.
///
/// The default does not wrap it. Tests use a wrapper that fails, waits, or drops unsynced writes.
#[derive(Clone)]
pub struct Storage(Arc<dyn Fn(FileBackend) -> Box<dyn StorageBackend> + Send + Sync>);

impl Storage {
    /// Applies `wrap` to each file that is opened.
    pub fn new(wrap: impl Fn(FileBackend) -> Box<dyn StorageBackend> + Send + Sync + 'static) -> Self {
        Self(Arc::new(wrap))
    }

    pub(crate) fn wrap(&self, file: FileBackend, counters: &Arc<Counters>) -> Arc<MeteredFile> {
        Arc::new(MeteredFile {
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

/// A file that counts and times its syncs.
#[derive(Debug)]
pub(crate) struct MeteredFile {
    inner: Box<dyn StorageBackend>,
    counters: Arc<Counters>,
}

impl MeteredFile {
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

/// Presents the part of a file behind `offset` as a file of its own.
#[derive(Debug)]
pub(crate) struct OffsetBackend {
    pub(crate) file: Arc<MeteredFile>,
    pub(crate) offset: u64,
}

impl OffsetBackend {
    fn inner(&self) -> &dyn StorageBackend {
        &*self.file.inner
    }
}

impl StorageBackend for OffsetBackend {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.length()?.saturating_sub(self.offset))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(self.offset + offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(self.offset + len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write(self.offset + offset, data)
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
