//! Who writes: the writer's thread, or, if nothing else is to be written, whoever waits for it.
//!
//! ```text
//!   change ──► inbox ──┬── alone ─────► the task that waits writes: nobody is woken, neither before nor after
//!                      └── otherwise ─► the thread is woken, and takes everything that is queued
//! ```
//!
//! To wake a thread on another processor can take as long as to write. So a change that comes alone is written where it
//! was made, which keeps a thread of the runtime for the time of a sync. That must not stop others, even if the disk
//! hangs:
//! - one task at a time writes, on a runtime that has another thread, and nothing that is known to take long: a database
//!   that has to be made anew, a journal that is full, a change of many rows, a snapshot, the end;
//! - it lets its thread do everything else first that only this thread can do;
//! - the writer's thread looks on. If it takes long, it gives the runtime something to do: so another of its threads
//!   wakes, and sees to sockets and timers from then on.
//!
//! Whoever cannot write itself tells the thread, and so does one who leaves: what was handed over is carried out.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{SendError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;

use super::Shared;
use super::database::{Row, Snapshot};
use super::writer::{Change, Message, Phase, SecondPhase, Unplaced, WriteError, Writer};

/// How long a task may write before the runtime is told to do without its thread.
const LONG: Duration = Duration::from_millis(10);

/// How many rows a task writes itself.
const FEW: usize = 64;

/// A change that nobody took; dropping it cancels it.
#[must_use = "a change is cancelled where this is dropped"]
pub(crate) struct Unsent(
    #[expect(dead_code, reason = "it is there to be dropped")] Option<SendError<Message>>,
);

/// Where changes are written.
pub(crate) struct Desk {
    writer: Mutex<Writer>,
    /// Set once, before anybody can ask for anything.
    thread: OnceLock<Thread>,
    /// Whether the thread has something to do, other than to look on.
    has_work: AtomicBool,
    /// Whether the thread waits for the writer.
    is_awaited: AtomicBool,
    /// Changes that are handed over, and not carried out.
    queued: Arc<AtomicUsize>,
    here: Mutex<Here>,
}

/// What tasks write themselves.
#[derive(Default)]
struct Here {
    /// How many have begun.
    count: u64,
    began: Option<Instant>,
    /// Where.
    runtime: Option<Handle>,
    /// Whether the thread looks on.
    is_watched: bool,
}

/// Counts a change as long as it is not carried out.
pub(crate) struct Queued(Arc<AtomicUsize>);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Desk {
    pub(crate) fn new(writer: Writer) -> Arc<Self> {
        Arc::new(Self {
            writer: Mutex::new(writer),
            thread: OnceLock::new(),
            has_work: AtomicBool::new(false),
            is_awaited: AtomicBool::new(false),
            queued: Arc::default(),
            here: Mutex::default(),
        })
    }

    /// Whose thread this is; before anything is handed over.
    pub(crate) fn belongs_to(&self, thread: &Thread) {
        // It is set once.
        let _ = self.thread.set(thread.clone());
    }

    /// The thread is to see what there is to do.
    fn tell(&self) {
        self.has_work.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn here(&self) -> MutexGuard<'_, Here> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread: until stopped, or until nobody is left who could hand anything over.
    pub(crate) fn run(&self) {
        let _end = End(self);
        let mut seen = 0;
        let mut due: Option<Instant> = None;
        loop {
            let has_work = self.has_work.swap(false, Ordering::SeqCst);
            if has_work || due.is_none_or(|due| due <= Instant::now()) {
                due = match self.take_writer() {
                    Some(mut writer) => {
                        if !writer.work() {
                            return;
                        }
                        Some(writer.due())
                    }
                    // A task has it, and tells when it is done.
                    None => None,
                };
            }
            let watched = self.watch(&mut seen);
            let until = due.map(|due| due.saturating_duration_since(Instant::now()));
            match (until, watched) {
                (Some(until), true) => std::thread::park_timeout(until.min(LONG)),
                (Some(until), false) => std::thread::park_timeout(until),
                (None, _) => std::thread::park_timeout(LONG),
            }
        }
    }

    /// The writer, unless a task has it.
    fn take_writer(&self) -> Option<MutexGuard<'_, Writer>> {
        self.is_awaited.store(true, Ordering::SeqCst);
        let writer = match self.writer.try_lock() {
            Ok(writer) => writer,
            Err(TryLockError::Poisoned(poisoned)) => {
                let mut writer = poisoned.into_inner();
                writer.end_in_doubt();
                writer
            }
            Err(TryLockError::WouldBlock) => return None,
        };
        self.is_awaited.store(false, Ordering::SeqCst);
        Some(writer)
    }

    /// Sees to a task that has been writing for long. Whether there is something to look after.
    fn watch(&self, seen: &mut u64) -> bool {
        let mut here = self.here();
        if here.began.is_none() && here.count == *seen {
            here.is_watched = false;
            here.runtime = None;
            return false;
        }
        if here.began.is_some_and(|began| began.elapsed() >= LONG)
            && let Some(runtime) = here.runtime.take()
        {
            tracing::debug!("a sync takes long: the runtime goes on without the thread that waits for it");
            runtime.spawn(async {});
        }
        *seen = here.count;
        true
    }

    /// The runtime of this task, if it can do without this thread for a while.
    fn runtime() -> Option<Handle> {
        let runtime = Handle::try_current().ok()?;
        let has_more =
            runtime.runtime_flavor() == RuntimeFlavor::MultiThread && runtime.metrics().num_workers() > 1;
        has_more.then_some(runtime)
    }

    fn is_alone(&self) -> bool {
        self.queued.load(Ordering::Acquire) == 1
    }

    /// Writes what is queued, unless somebody else is at it, or it may take long. Whether it is done.
    fn write_here(&self, runtime: Handle) -> bool {
        let Ok(mut writer) = self.writer.try_lock() else {
            return false;
        };
        if !writer.is_quick() {
            return false;
        }
        let must_wake = {
            let mut here = self.here();
            here.count += 1;
            here.began = Some(Instant::now());
            here.runtime = Some(runtime);
            !std::mem::replace(&mut here.is_watched, true)
        };
        if must_wake {
            self.wake();
        }
        writer.write_queued();
        let is_well = writer.is_quick();
        drop(writer);
        self.here().began = None;
        if self.is_awaited.swap(false, Ordering::SeqCst) || !is_well {
            self.tell();
        }
        true
    }
}

/// Whatever ends the thread: nobody waits for it any longer.
struct End<'a>(&'a Desk);

impl Drop for End<'_> {
    fn drop(&mut self) {
        match self.0.writer.lock() {
            Ok(mut writer) => writer.end(),
            Err(poisoned) => poisoned.into_inner().end_in_doubt(),
        }
    }
}

/// The way to the writer.
#[derive(Clone)]
pub(crate) struct Outbox {
    sender: Sender<Message>,
    shared: Arc<Shared>,
    desk: Arc<Desk>,
    // The last: the thread sees that nobody is left.
    _leaving: Leaving,
}

/// Tells the thread when it is dropped.
#[derive(Clone)]
struct Leaving(Arc<Desk>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.tell();
    }
}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbox").finish_non_exhaustive()
    }
}

impl Outbox {
    pub(crate) fn new(sender: Sender<Message>, shared: Arc<Shared>, desk: Arc<Desk>) -> Self {
        Self {
            sender,
            shared,
            _leaving: Leaving(Arc::clone(&desk)),
            desk,
        }
    }

    /// Hands a change over. If there is nobody to take it, it is cancelled, and the answer never comes.
    pub(crate) fn write(&self, rows: Vec<Row>, phase: Phase) -> Written {
        let (written, unsent) = self.hand_over(rows, phase);
        drop(unsent);
        written
    }

    /// The same under the lock: changes are written in the order in which they were begun. One that nobody takes is
    /// to be dropped after the lock, which its end needs.
    pub(crate) fn hand_over(&self, rows: Vec<Row>, phase: Phase) -> (Written, Unsent) {
        let (done, answer) = oneshot::channel();
        let is_small = rows.len() <= FEW;
        self.desk.queued.fetch_add(1, Ordering::AcqRel);
        let change = Change {
            rows,
            second: SecondPhase::new(phase, Arc::clone(&self.shared)),
            done,
            _queued: Queued(Arc::clone(&self.desk.queued)),
        };
        let sent = self.sender.send(Message::Write(change));
        let written = Written {
            answer,
            is_small,
            untold: Some(Arc::clone(&self.desk)),
        };
        (written, Unsent(sent.err()))
    }

    fn send(&self, message: Message) {
        // Nobody at home: the store has been stopped, and an answer never comes.
        let _ = self.sender.send(message);
        self.desk.tell();
    }

    /// Says that what is known of resources has changed.
    pub(crate) fn note(&self) {
        if !self.shared.noted.swap(true, Ordering::AcqRel) {
            self.send(Message::Note);
        }
    }

    pub(crate) fn read(&self) -> oneshot::Receiver<Result<Snapshot, WriteError>> {
        let (done, answer) = oneshot::channel();
        self.send(Message::Read(done));
        answer
    }

    pub(crate) fn stop(&self) -> oneshot::Receiver<Result<(), Unplaced>> {
        let (done, answer) = oneshot::channel();
        self.send(Message::Stop(done));
        answer
    }
}

/// A change that was handed over. It is carried out, whether somebody waits for it or not.
pub(crate) struct Written {
    answer: oneshot::Receiver<Result<(), WriteError>>,
    is_small: bool,
    /// Unless the thread knows of it.
    untold: Option<Arc<Desk>>,
}

impl Written {
    /// Waits until it is on disk.
    pub(crate) async fn done(mut self) -> Result<(), WriteError> {
        if let Some(desk) = self.untold.clone()
            && self.is_small
            && desk.is_alone()
            && let Some(runtime) = Desk::runtime()
        {
            // What waits for this very thread comes first.
            tokio::task::yield_now().await;
            if desk.is_alone() && desk.write_here(runtime) {
                self.untold = None;
            }
        }
        self.tell();
        settled((&mut self.answer).await)
    }

    /// The same, for threads of their own.
    pub(crate) fn wait(mut self) -> Result<(), WriteError> {
        self.tell();
        let (_, never) = oneshot::channel();
        settled(std::mem::replace(&mut self.answer, never).blocking_recv())
    }

    fn tell(&mut self) {
        if let Some(desk) = self.untold.take() {
            desk.tell();
        }
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        self.tell();
    }
}

/// What an answer means: an answer that never comes is that of a writer that has been stopped.
pub(crate) fn settled<T>(
    answer: Result<Result<T, WriteError>, oneshot::error::RecvError>,
) -> Result<T, WriteError> {
    answer.unwrap_or(Err(WriteError::Stopped))
}
