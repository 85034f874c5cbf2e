//! Opens of the files of static pods: the kernel asks, and an answer lets an open go on.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyEvent, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use rustix::fs::CWD;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

use super::super::kubelet::CHECK_PAUSE;

/// The name of processes whose opens wait.
const DELAYED: &str = "kubelet";

/// Pause after a failed read of events: descriptors may be free again.
const FAILURE_PAUSE: Duration = Duration::from_millis(50);

/// Opens in a directory, which are asked for only while it is watched.
pub(super) struct Opens {
    group: AsyncFd<Fanotify>,
    directory: PathBuf,
    is_watched: bool,
    /// Why the directory is not watched, as the kernel said last.
    problem: Option<Errno>,
    /// The opens of kubelets, which wait.
    waiting: Vec<FanotifyEvent>,
}

impl Opens {
    #[expect(
        deprecated,
        reason = "the successor of `with_interest` is unsafe; the descriptor is owned and never replaced"
    )]
    pub(super) fn new(directory: PathBuf) -> io::Result<Self> {
        let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
        let group = Fanotify::init(flags, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)?;
        Ok(Self {
            group: AsyncFd::with_interest(group, Interest::READABLE)?,
            directory,
            is_watched: false,
            problem: None,
            waiting: Vec::new(),
        })
    }

    /// Watches the directory, which may be another one by now. There may be none.
    pub(super) fn watch(&mut self) {
        self.is_watched = true;
        let flags = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_ONLYDIR;
        let opens = MaskFlags::FAN_OPEN_PERM | MaskFlags::FAN_EVENT_ON_CHILD;
        let directory = &self.directory;
        let marked = self.group.get_ref().mark(flags, opens, CWD, Some(directory));
        let problem = marked.err();
        if let Some(error) = problem.filter(|_| problem != self.problem) {
            let directory = directory.display();
            if error == Errno::ENOENT {
                tracing::debug!(%directory, "no directory of static pods to watch");
            } else {
                tracing::warn!(
                    %directory, %error,
                    "static pods not watched: a kubelet may reject them at its start; shield.staticPodDir must be a directory, \
                     and the kernel needs permission events of fanotify"
                );
            }
        }
        self.problem = problem;
    }

    /// Watches nothing: opens do not depend on devlet any more. Those that wait succeed.
    pub(super) fn ignore(&mut self) {
        self.is_watched = false;
        let flushed =
            self.group
                .get_ref()
                .mark(MarkFlags::FAN_MARK_FLUSH, MaskFlags::empty(), CWD, None::<&Path>);
        if let Err(error) = flushed {
            tracing::warn!(%error, "static pods still watched");
        }
        self.release();
    }

    /// Lets the opens succeed that wait.
    pub(super) fn release(&mut self) {
        for open in std::mem::take(&mut self.waiting) {
            self.allow(&open);
        }
    }

    /// Returns the process that waits first.
    pub(super) fn first(&self) -> Option<i32> {
        self.waiting.first().map(FanotifyEvent::pid)
    }

    /// Answers opens until the future ends. Those of kubelets wait.
    pub(super) async fn answer<T>(&mut self, until: impl Future<Output = T>) -> T {
        let mut until = pin!(until);
        loop {
            tokio::select! {
                ended = &mut until => return ended,
                () = self.next() => {}
            }
        }
    }

    /// Answers the next opens. Returns without one after [`CHECK_PAUSE`].
    pub(super) async fn next(&mut self) {
        let read = |group: &Fanotify| group.read_events().map_err(io::Error::from);
        match timeout(CHECK_PAUSE, self.group.async_io(Interest::READABLE, read)).await {
            Ok(Ok(opens)) => {
                for open in opens {
                    if self.is_watched && is_kubelet(open.pid()) {
                        self.waiting.push(open);
                    } else {
                        self.allow(&open);
                    }
                }
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "open of a static pod not read: without a free descriptor, the kernel denies it");
                sleep(FAILURE_PAUSE).await;
            }
            Err(_) => {}
        }
        if self.is_watched {
            self.watch();
        }
    }

    fn allow(&self, open: &FanotifyEvent) {
        let allow = |file| FanotifyResponse::new(file, Response::FAN_ALLOW);
        let answer = open
            .fd()
            .map(|file| self.group.get_ref().write_response(allow(file)));
        match answer {
            // The process has been killed meanwhile.
            None | Some(Ok(()) | Err(Errno::ENOENT)) => {}
            Some(Err(error)) => tracing::warn!(pid = open.pid(), %error, "open of a static pod not answered"),
        }
    }
}

fn is_kubelet(pid: impl Display) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    name.is_ok_and(|name| name.trim_end() == DELAYED)
}
