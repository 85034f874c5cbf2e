//! Reports that device nodes may have changed.
//!
//! Uevents of the kernel come over netlink. If the socket is refused, changes of the directories of `/dev` are watched
//! instead. udev writes its database after the event, so that directory is watched in both cases. An overflow is an
//! event.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use crate::node::Host;

/// The group of the kernel's own events; another one has those of udev.
const KERNEL: u32 = 1;

/// Minimum time between an event and the scan after it. Events of a burst cause one scan.
const COALESCE: Duration = Duration::from_millis(50);

/// Pause between scans, as a multiple of the scan time. It limits the CPU time that endless events use.
const PAUSE_FACTOR: u32 = 9;
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Watches a host.
#[derive(Debug)]
pub struct Watcher {
    host: Host,
    uevents: Result<AsyncFd<OwnedFd>, io::Error>,
    inotify: AsyncFd<OwnedFd>,
    /// When the last change was reported.
    reported: Instant,
}

impl Watcher {
    /// Watches from now on: a scan after this call and before [`Watcher::changed`] misses nothing.
    pub fn new(host: Host) -> io::Result<Self> {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let watcher = Self {
            host,
            uevents: uevents(),
            inotify: readable(inotify::init(flags)?)?,
            reported: Instant::now(),
        };
        watcher.watch_directories();
        Ok(watcher)
    }

    /// Returns why uevents cannot be received, if they cannot.
    pub fn fallback(&self) -> Option<&io::Error> {
        self.uevents.as_ref().err()
    }

    /// Returns once nodes may have changed. The caller scans, and calls again.
    pub async fn changed(&mut self) -> io::Result<()> {
        let scan = self.reported.elapsed();
        tokio::time::sleep((scan * PAUSE_FACTOR).min(MAX_PAUSE)).await;
        tokio::select! {
            event = event(self.uevents.as_ref().ok()) => event?,
            event = event(Some(&self.inotify)) => event?,
        }
        tokio::time::sleep(COALESCE).await;
        // Before the events are discarded, so that no later change of a new directory is missed.
        self.watch_directories();
        if let Ok(uevents) = &self.uevents {
            discard(|buffer| recv(uevents.get_ref(), buffer, RecvFlags::DONTWAIT).map(|(_, read)| read))?;
        }
        discard(|buffer| rustix::io::read(self.inotify.get_ref(), buffer).map(|(read, _)| read.len()))?;
        self.reported = Instant::now();
        Ok(())
    }

    /// Watches directories; one that is watched stays so.
    fn watch_directories(&self) {
        let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE | WatchFlags::ONLYDIR;
        let directories = self.host.directories();
        let count = if self.uevents.is_ok() {
            1
        } else {
            directories.len()
        };
        for directory in directories.iter().take(count) {
            // It may not exist: not every host has udev.
            let _ = inotify::add_watch(self.inotify.get_ref(), directory, flags);
        }
    }
}

fn uevents() -> io::Result<AsyncFd<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        flags,
        Some(KOBJECT_UEVENT),
    )?;
    bind(&socket, &SocketAddrNetlink::new(0, KERNEL))?;
    readable(socket)
}

fn readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // Its successor is unsafe, because the descriptor of a type may change. This descriptor does not.
    #[allow(deprecated)]
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}

/// Waits until a descriptor has events.
async fn event(descriptor: Option<&AsyncFd<OwnedFd>>) -> io::Result<()> {
    match descriptor {
        Some(descriptor) => {
            // Cleared before the events are read: one that comes later is reported again.
            descriptor.readable().await?.clear_ready();
            Ok(())
        }
        None => std::future::pending().await,
    }
}

/// Reads all queued events, without a look at them.
fn discard(mut read: impl FnMut(&mut [MaybeUninit<u8>]) -> Result<usize, Errno>) -> io::Result<()> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    loop {
        match read(&mut buffer) {
            // The queue has overflown: a scan follows anyway.
            Ok(_) | Err(Errno::INTR | Errno::NOBUFS) => {}
            Err(Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
