//! Control groups of containers: processes of a container may outlive its first one.
//!
//! The group is found when a container starts: the directory that holds its first process and no other, in any hierarchy
//! of v1 or v2. A container that has no group of its own, or one that devlet cannot see, is judged by its first process.

use std::path::{Component, Path, PathBuf};

use super::process::is_gone;

/// Returns the group that a process has alone.
pub(crate) fn of(pid: u32) -> Option<PathBuf> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let pid = pid.to_string();
    let has_it_alone = |directory: &PathBuf| {
        let processes = std::fs::read_to_string(directory.join("cgroup.procs"));
        processes.is_ok_and(|processes| processes.split_whitespace().eq([pid.as_str()]))
    };
    directories(&groups, &mounts).find(has_it_alone)
}

/// Returns `true` if a process is in a group or below it, also if that cannot be determined.
pub(crate) fn is_populated(directory: &Path) -> bool {
    match std::fs::read_to_string(directory.join("cgroup.events")) {
        Ok(events) => !events.lines().any(|line| line == "populated 0"),
        // v1 has no such file.
        Err(error) if is_gone(&error) => has_process(directory),
        Err(_) => true,
    }
}

fn has_process(directory: &Path) -> bool {
    match std::fs::read_to_string(directory.join("cgroup.procs")) {
        Ok(processes) if processes.trim().is_empty() => {}
        Ok(_) => return true,
        Err(error) => return !is_gone(&error),
    }
    match std::fs::read_dir(directory) {
        Ok(mut entries) => entries.any(|entry| match entry {
            Ok(entry) => entry.file_type().is_ok_and(|kind| kind.is_dir()) && has_process(&entry.path()),
            Err(error) => !is_gone(&error),
        }),
        Err(error) => !is_gone(&error),
    }
}

/// Returns where the groups of `/proc/PID/cgroup` are, according to `/proc/self/mountinfo`.
fn directories<'a>(groups: &'a str, mounts: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
    let groups = groups
        .lines()
        .filter_map(|group| group.split_once(':')?.1.split_once(':'));
    groups.flat_map(|(controllers, path)| {
        let mounts = mounts.lines();
        mounts.filter_map(move |mount| directory(mount, controllers, path))
    })
}

/// Returns the directory of a group at a mount, if the mount shows it.
fn directory(mount: &str, controllers: &str, path: &str) -> Option<PathBuf> {
    let (place, file_system) = mount.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, point) = (place.next()?, place.next()?);
    let mut file_system = file_system.split(' ');
    let (kind, options) = (file_system.next()?, file_system.nth(1)?);
    let is_hierarchy = match controllers {
        "" => kind == "cgroup2",
        _ => {
            let has = |controller| options.split(',').any(|option| option == controller);
            kind == "cgroup" && controllers.split(',').all(has)
        }
    };
    // Both paths are relative to the namespace of devlet, and have `..` above it.
    let below = Path::new(path).strip_prefix(root).ok()?;
    let is_shown = below
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    (is_hierarchy && is_shown).then(|| Path::new(point).join(below))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime shared:9 - cgroup cgroup rw,devices
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
";
    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
";

    fn found(groups: &str, mounts: &str) -> Vec<String> {
        let all = directories(groups, mounts);
        all.map(|directory| directory.display().to_string()).collect()
    }

    #[test]
    fn a_group_is_found_in_each_layout() {
        let v1 = "9:name=systemd:/kubepods/p/c\n5:devices:/kubepods/p/c\n2:cpu,cpuacct:/kubepods/p/c\n";
        let in_v1 = ["systemd", "devices", "cpu"].map(|name| format!("/sys/fs/cgroup/{name}/kubepods/p/c"));
        assert_eq!(found(v1, V1), in_v1);

        let v2 = "0::/kubepods.slice/cri-containerd-c.scope\n";
        let in_v2 = "/sys/fs/cgroup/kubepods.slice/cri-containerd-c.scope";
        assert_eq!(found(v2, V2), [in_v2]);

        let unified = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified");
        let hybrid = format!("{v1}0::/\n");
        let all = found(&hybrid, &format!("{V1}{unified}"));
        assert_eq!(all[..3], in_v1);
        assert_eq!(all[3..], ["/sys/fs/cgroup/unified/"]);
    }

    #[test]
    fn a_group_outside_of_the_own_namespace_is_found_if_it_is_mounted() {
        let group = "0::/../../kubepods/p/c\n";
        assert!(found(group, V2).is_empty());
        let host = "30 23 0:26 /../.. /host/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(found(group, host), ["/host/cgroup/kubepods/p/c"]);
        let other = "30 23 0:26 /kubepods/q /q rw - cgroup2 cgroup2 rw\n";
        assert!(found("0::/kubepods/p/c\n", other).is_empty());
        assert!(found("damaged\n0::\n", "damaged - cgroup2\n").is_empty());
    }

    #[test]
    fn a_group_that_is_gone_has_no_process() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_populated(&root.path().join("gone")));
        // It exists, and does not say.
        std::fs::create_dir_all(root.path().join("odd/cgroup.procs")).unwrap();
        assert!(is_populated(&root.path().join("odd")));
    }
}
