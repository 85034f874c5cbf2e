//! A daemon to test: the built binary with its own root directory.

// Clippy does not treat helper functions as tests, and a benchmark uses only some of them.
#![allow(clippy::unwrap_used, clippy::panic, dead_code)]

use std::borrow::BorrowMut;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use devlet_testkit::{PATIENCE, print_lines};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Interval between two looks at a state that does not report its changes.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Creates a root directory with a path short enough for sockets below it.
pub(crate) fn root() -> TempDir {
    tempfile::Builder::new()
        .prefix("dl")
        .rand_bytes(4)
        .tempdir_in("/tmp")
        .unwrap()
}

pub(crate) fn devlet() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devlet"));
    command
        .env_remove("DEVLET_ROOT")
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::null());
    command
}

/// A running daemon; killed when dropped.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) root: PathBuf,
    lines: Receiver<String>,
    pub(crate) banner: String,
}

impl Daemon {
    /// Starts a daemon with a root directory, and returns once it has printed that it runs.
    pub(crate) fn on(root: &Path) -> Self {
        Self::with(root, &[])
    }

    pub(crate) fn with(root: &Path, args: &[&str]) -> Self {
        let mut command = devlet();
        command.arg("serve").arg("--root-dir").arg(root).args(args);
        Self::started(command, root)
    }

    /// Starts a daemon with a configuration file.
    pub(crate) fn configured(root: &Path, config: &str) -> Self {
        let file = root.join("devlet.yaml");
        std::fs::write(&file, config).unwrap();
        Self::with(root, &["--config", file.to_str().unwrap()])
    }

    /// Runs a command that starts a daemon. The daemon's log becomes output of the test.
    pub(crate) fn started(command: impl BorrowMut<Command>, root: &Path) -> Self {
        Self::spawn(command, root, |_| {})
    }

    /// Runs a command that starts a daemon, and passes each line of its log to `each`.
    fn spawn(
        mut command: impl BorrowMut<Command>,
        root: &Path,
        each: impl FnMut(&str) + Send + 'static,
    ) -> Self {
        let command = command.borrow_mut().stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        print_lines(child.stderr.take().unwrap(), each);
        let stdout = child.stdout.take().unwrap();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut daemon = Self {
            child,
            root: root.to_owned(),
            lines,
            banner: String::new(),
        };
        daemon.read_banner();
        daemon
    }

    /// Starts a daemon as [`Daemon::with`] does, and returns its log too.
    pub(crate) fn logged(root: &Path, args: &[&str]) -> (Self, Log) {
        let mut command = devlet();
        command.arg("serve").arg("--root-dir").arg(root).args(args);
        let (sender, lines) = channel();
        let daemon = Self::spawn(command, root, move |line| {
            // A test may drop the log before the daemon ends.
            let _ = sender.send(line.to_owned());
        });
        (daemon, Log { lines })
    }

    /// Returns the address that the daemon serves HTTP at.
    pub(crate) fn http(&self) -> String {
        let line = self.banner.lines().find(|line| line.contains("HTTP")).unwrap();
        let address = line.split("http://").nth(1).unwrap();
        address.split('/').next().unwrap().to_owned()
    }

    fn read_banner(&mut self) {
        while !self.banner.contains("Ctrl-C") {
            let line = self.lines.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("the daemon does not run: {}", self.banner));
            self.banner.push_str(&line);
            self.banner.push('\n');
        }
    }

    /// Returns a command for this daemon.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = devlet();
        command.env("DEVLET_ROOT", &self.root).args(args);
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let output = self.run(&[args, &["-o", "json"]].concat());
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a command that must be refused, and returns the reason.
    pub(crate) fn refused(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(
            output.status.code(),
            Some(1),
            "{args:?}: {}{}",
            stdout(&output),
            stderr(&output)
        );
        stderr(&output)
    }

    /// Admits a pod with one container, and returns its devices.
    pub(crate) fn admit(&self, name: &str, limit: &str) -> Vec<String> {
        ids(&self.json(&["admit", "--name", name, "--limit", limit]))
    }

    /// Watches a list until it is as wanted.
    pub(crate) fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        let mut watch = self.command(&["get", what, "--watch", "-o", "json"]);
        let watch = watch.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut watch = Watch(watch.spawn().unwrap());
        print_lines(watch.0.stderr.take().unwrap(), |_| {});
        let lines = BufReader::new(watch.0.stdout.take().unwrap()).lines();
        let mut last = Value::Null;
        for line in lines {
            last = serde_json::from_str(&line.unwrap()).unwrap();
            if wanted(&last) {
                return last;
            }
            assert!(Instant::now() < deadline, "{what} stay {last}");
        }
        panic!("{what} ended with {last}");
    }

    /// Waits until a resource has this capacity, all of it allocatable.
    pub(crate) fn until_capacity(&self, resource: &str, capacity: u64) {
        self.until("resources", |list| {
            let all = items(list);
            let found = all.iter().find(|each| each["name"] == resource);
            found.is_some_and(|each| each["capacity"] == capacity && each["allocatable"] == capacity)
        });
    }

    /// Waits until no plugin serves a resource.
    pub(crate) fn until_gone(&self, resource: &str) {
        self.until("resources", |list| {
            let all = items(list);
            let found = all.iter().find(|each| each["name"] == resource);
            found.is_some_and(|each| each["allocatable"] == 0)
        });
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &pid])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Stops the daemon cleanly, and returns its exit code.
    pub(crate) fn stop(mut self) -> Option<i32> {
        self.signal("-TERM");
        self.child.wait().unwrap().code()
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The log of a daemon.
pub(crate) struct Log {
    lines: Receiver<String>,
}

impl Log {
    /// Waits for the next line that contains one of these.
    pub(crate) fn until(&self, wanted: &[&str]) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("the log does not say {wanted:?}"));
            if wanted.iter().any(|part| line.contains(part)) {
                return line;
            }
        }
    }

    /// Returns the remaining lines. The daemon must have ended.
    pub(crate) fn rest(self) -> Vec<String> {
        self.lines.iter().collect()
    }
}

/// Waits for a state that does not report its changes: looks again after [`POLL_INTERVAL`].
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} does not happen");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Runs a command to its end, and returns its output. Kills it and panics after `limit`.
pub(crate) fn output_within(limit: Duration, command: &mut Command) -> Output {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    let (sender, ended) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output().unwrap()));
    ended.recv_timeout(limit).unwrap_or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        panic!("{command:?} has not ended within {limit:?}")
    })
}

/// A `get --watch`; killed when dropped.
struct Watch(Child);

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the list in the output of `get`, under any key.
pub(crate) fn items(list: &Value) -> Vec<Value> {
    match list {
        Value::Array(items) => items.clone(),
        Value::Object(keys) => keys
            .values()
            .find_map(Value::as_array)
            .cloned()
            .unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// Returns the IDs of the only resource of the only container.
pub(crate) fn ids(pod: &Value) -> Vec<String> {
    let ids = pod["containers"][0]["devices"][0]["ids"].as_array().unwrap();
    ids.iter().map(|id| id.as_str().unwrap().to_owned()).collect()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Sends a `GET`, and returns the whole answer, head and body.
pub(crate) fn http_get(address: &str, path: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}
