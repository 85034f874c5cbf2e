//! Processes of containers, told apart by their start time.
//!
//! A process counts as gone only if the system says so: an error of another kind proves nothing, and neither does a process ID
//! in another PID namespace than the one in which the process was seen.

use std::fs::DirEntry;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use devlet_core::shield::ContainerProcess;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::cgroup;

/// The field of `/proc/PID/stat` after the name of the program that has the start time.
const START_TIME: usize = 19;

/// Returns the process with this ID, and the control group that it has alone; `None` if it does not run.
pub fn find(pid: u32) -> Option<ContainerProcess> {
    let (started, _) = stat(format!("/proc/{pid}")).ok()??;
    let process = ContainerProcess {
        pid,
        started,
        pid_namespace: own_namespace()?,
        cgroup: cgroup::of(pid).map(|directory| directory.display().to_string()),
    };
    runs(&process).then_some(process)
}

/// Returns `true` if certainly no process has this ID.
pub(super) fn is_absent(pid: u32) -> bool {
    stat(format!("/proc/{pid}")).is_err_and(|error| is_gone(&error)) && !exists(pid)
}

/// Returns `true` if the process and all others in its control group have certainly ended.
pub fn has_ended(process: &ContainerProcess) -> bool {
    own_namespace() == Some(process.pid_namespace) && !runs(process) && !has_others(process)
}

/// Returns `true` if a process may be in the control group.
pub fn has_others(process: &ContainerProcess) -> bool {
    let directory = process.cgroup.as_ref();
    directory.is_some_and(|directory| cgroup::is_populated(Path::new(directory)))
}

/// Returns `true` if the error says that a process or a control group is gone. Any other error says nothing.
pub(super) fn is_gone(error: &io::Error) -> bool {
    let gone = [Errno::NOENT, Errno::SRCH, Errno::NODEV];
    Errno::from_io_error(error).is_some_and(|errno| gone.contains(&errno))
}

/// Returns the number of the PID namespace of devlet.
fn own_namespace() -> Option<u64> {
    Some(std::fs::metadata("/proc/self/ns/pid").ok()?.ino())
}

fn runs(process: &ContainerProcess) -> bool {
    let pid = process.pid;
    match stat(format!("/proc/{pid}")) {
        Ok(Some((started, _))) if started != process.started => false,
        // The first thread may end before the others.
        Ok(Some((_, is_dead))) => !is_dead || has_thread(&format!("/proc/{pid}/task")),
        Ok(None) => true,
        // The file may be hidden.
        Err(error) => !is_gone(&error) || exists(pid),
    }
}

fn exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_none_or(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

fn has_thread(tasks: &str) -> bool {
    let is_running = |entry: io::Result<DirEntry>| match entry.and_then(|entry| stat(entry.path())) {
        Ok(stat) => stat.is_none_or(|(_, is_dead)| !is_dead),
        Err(error) => !is_gone(&error),
    };
    match std::fs::read_dir(tasks) {
        Ok(mut tasks) => tasks.any(is_running),
        Err(error) => !is_gone(&error),
    }
}

/// Returns when a process or a thread started, and whether it is a zombie; `None` if the text is unreadable.
fn stat(directory: impl AsRef<Path>) -> io::Result<Option<(u64, bool)>> {
    let stat = std::fs::read(directory.as_ref().join("stat"))?;
    let stat = String::from_utf8_lossy(&stat);
    // The name of the program may contain anything, but nothing after it contains a parenthesis.
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields.split_whitespace());
    Ok(fields.and_then(|mut fields| {
        let is_dead = matches!(fields.clone().next(), Some("Z" | "X"));
        Some((fields.nth(START_TIME)?.parse().ok()?, is_dead))
    }))
}

#[cfg(test)]
mod tests;
