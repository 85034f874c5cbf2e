//! Processes of containers, told apart by their start time.

use devlet_core::shield::ContainerProcess;

/// The field of `/proc/PID/stat` after the name of the program that has the start time.
const START_TIME: usize = 19;

/// Returns the process with this ID; `None` if there is none.
pub fn find(pid: u32) -> Option<ContainerProcess> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may contain anything, but nothing after it contains a parenthesis.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    // A zombie holds no device.
    let is_dead = matches!(fields.clone().next(), Some("Z" | "X"));
    let started = fields.nth(START_TIME)?.parse().ok()?;
    (!is_dead).then_some(ContainerProcess { pid, started })
}

/// Returns `true` if the process still runs.
pub fn is_alive(process: ContainerProcess) -> bool {
    find(process.pid) == Some(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_a_later_one_with_its_id() {
        let own = find(std::process::id()).unwrap();
        assert!(is_alive(own));
        let later = ContainerProcess {
            started: own.started + 1,
            ..own
        };
        assert!(!is_alive(later));
    }

    #[test]
    fn a_process_that_nobody_waited_for_is_dead() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let process = find(child.id()).unwrap();
        assert!(is_alive(process));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!is_alive(process));
    }
}
