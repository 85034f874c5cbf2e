use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use devlet_testkit::skip;

use super::*;

/// A program whose first thread ends, while another one runs until the standard input ends.
const PROGRAM: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static void *wait_for_input(void *nothing) {
    char text[4096];
    do {
        FILE *file = fopen("/proc/self/stat", "r");
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
    } while (strstr(text, ") Z") == NULL);
    write(1, "ready\n", 6);
    read(0, text, 1);
    return NULL;
}
int main(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, wait_for_input, NULL);
    pthread_exit(NULL);
}
"#;

/// A process that runs until its standard input ends.
fn waiting(mut command: Command) -> Child {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().unwrap()
}

fn end(mut child: Child) {
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[test]
fn a_process_is_told_from_a_later_one_with_its_id() {
    let own = find(std::process::id()).unwrap();
    assert!(!has_ended(&own));
    let later = ContainerProcess {
        started: own.started + 1,
        ..own
    };
    assert!(has_ended(&later));
}

#[test]
fn a_process_is_absent_only_once_it_has_been_reaped() {
    let mut child = waiting(Command::new("cat"));
    let pid = child.id();
    assert!(!is_absent(pid));
    child.kill().unwrap();
    // Its state stays until its parent reads the exit code.
    assert!(!is_absent(pid));
    child.wait().unwrap();
    assert!(is_absent(pid));
}

#[test]
fn a_process_that_has_ended_is_dead() {
    let child = waiting(Command::new("cat"));
    let process = find(child.id()).unwrap();
    assert!(!has_ended(&process));
    end(child);
    assert!(has_ended(&process));
    assert_eq!(find(process.pid), None);
    // In another PID namespace, its ID means nothing.
    let elsewhere = ContainerProcess {
        pid_namespace: process.pid_namespace + 1,
        ..process
    };
    assert!(!has_ended(&elsewhere));
}

#[test]
fn a_process_lives_while_one_of_its_threads_does() {
    let directory = tempfile::tempdir().unwrap();
    let (source, program) = (directory.path().join("main.c"), directory.path().join("main"));
    std::fs::write(&source, PROGRAM).unwrap();
    let compiled = Command::new("cc")
        .arg("-pthread")
        .arg("-o")
        .args([&program, &source])
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        return skip("no C compiler");
    }
    let mut child = waiting(Command::new(program));
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut ready)
        .unwrap();
    assert_eq!(ready, "ready\n");

    let process = find(child.id()).unwrap();

    assert!(!has_ended(&process));
    end(child);
    assert!(has_ended(&process));
}

/// A control group, removed at the end.
struct Group(PathBuf);

impl Group {
    /// Creates a group in each hierarchy that can be written.
    fn all() -> Vec<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let hierarchies = mounts.lines().filter(|mount| mount.contains(" - cgroup"));
        let points = hierarchies.filter_map(|mount| mount.split(' ').nth(4));
        let paths = points.map(|point| PathBuf::from(format!("{point}/devlet-test-{}", std::process::id())));
        paths
            .filter(|path| std::fs::create_dir(path).is_ok())
            .map(Self)
            .collect()
    }

    fn add(&self, child: &Child) -> bool {
        std::fs::write(self.0.join("cgroup.procs"), child.id().to_string()).is_ok()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_container_lives_while_a_process_is_in_its_control_group() {
    let mut is_tested = false;
    for group in Group::all() {
        let (first, second) = (waiting(Command::new("cat")), waiting(Command::new("cat")));
        // A group of cpuset has no processors at first.
        if !group.add(&first) {
            end(first);
            end(second);
            continue;
        }
        let path = Some(group.0.display().to_string());
        let process = find(first.id()).unwrap();
        assert_eq!(process.cgroup, path);
        let below = Group(group.0.join("below"));
        std::fs::create_dir(&below.0).unwrap();
        assert!(below.add(&second));
        // A process that shares its groups has none of its own.
        assert_eq!(find(std::process::id()).unwrap().cgroup, None);

        end(first);
        assert!(!has_ended(&process), "{path:?}");
        end(second);
        assert!(has_ended(&process), "{path:?}");
        drop((below, group));
        assert!(has_ended(&process), "{path:?}");
        is_tested = true;
    }
    if !is_tested {
        skip("no control group can be written");
    }
}
