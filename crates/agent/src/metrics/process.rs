//! Metrics of this process, from `/proc`.

use std::fs;

/// Clock ticks per second in `/proc`, which the Linux ABI fixes.
const TICKS_PER_SECOND: f64 = 100.0;

/// The standard process metrics of Prometheus client libraries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Process {
    pub(super) cpu_seconds: f64,
    pub(super) start_seconds: f64,
    pub(super) resident_bytes: f64,
    pub(super) virtual_bytes: f64,
    pub(super) threads: f64,
    pub(super) open_fds: f64,
    pub(super) max_fds: f64,
}

impl Process {
    /// Returns `None` where there is no `/proc`.
    pub(super) fn read() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // The name, in parentheses, may contain blanks and parentheses.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let system = fs::read_to_string("/proc/stat").ok()?;
        let booted = number(&system, "btime")?;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        Some(Self {
            cpu_seconds: (field(14)? + field(15)?) / TICKS_PER_SECOND,
            start_seconds: booted + field(22)? / TICKS_PER_SECOND,
            resident_bytes: number(&status, "VmRSS:")? * 1024.0,
            virtual_bytes: number(&status, "VmSize:")? * 1024.0,
            threads: number(&status, "Threads:")?,
            open_fds: open_fds()?,
            #[allow(clippy::cast_precision_loss, reason = "for a chart")]
            max_fds: limit.current.map_or(f64::INFINITY, |most| most as f64),
        })
    }
}

/// Returns the number after `word` at the start of a line.
fn number(text: &str, word: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(word))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Counts the open descriptors, except the one that reads the directory.
#[allow(clippy::cast_precision_loss, reason = "for a chart")]
fn open_fds() -> Option<f64> {
    let entries = fs::read_dir("/proc/self/fd").ok()?;
    Some(entries.count().saturating_sub(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_in_proc_are_plausible() {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_secs_f64();
        let before = Process::read().unwrap();
        assert!(before.start_seconds <= now + 2.0, "{before:?}");
        assert!(before.start_seconds > now - 24.0 * 60.0 * 60.0, "{before:?}");
        assert!(before.resident_bytes > 100_000.0, "{before:?}");
        assert!(before.virtual_bytes >= before.resident_bytes, "{before:?}");
        assert!(before.threads >= 1.0, "{before:?}");
        assert!(
            before.open_fds >= 3.0 && before.max_fds > before.open_fds,
            "{before:?}"
        );
        // Tests run side by side and open files, too, but not hundreds.
        let files: Vec<fs::File> = (0..500).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        let after = Process::read().unwrap();
        assert!(after.open_fds > before.open_fds + 300.0, "{before:?} {after:?}");
        drop(files);
    }
}
