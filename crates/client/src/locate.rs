//! Where devlet keeps its files, and so where its socket is.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The variable that names the root directory.
pub const ROOT_VARIABLE: &str = "DEVLET_ROOT";

/// The root directory of a node: the kubelet's.
pub const SYSTEM_ROOT: &str = "/var/lib/kubelet";

/// The socket below a root directory.
pub fn socket(root: &Path) -> PathBuf {
    root.join("devlet").join("devlet.sock")
}

/// The sockets to try, in this order. A directory that was named, here or in `DEVLET_ROOT`, is the only one;
/// otherwise it is the user's own and then the system's.
pub fn sockets(root: Option<&Path>) -> Vec<PathBuf> {
    let roots = roots(root, |name| std::env::var_os(name));
    roots.iter().map(|root| socket(root)).collect()
}

/// The root directory of a devlet that does not run as root: `devlet` below the user's state directory.
/// `None` if there is neither `XDG_STATE_HOME` nor `HOME`.
pub fn user_root() -> Option<PathBuf> {
    user_root_from(|name| std::env::var_os(name))
}

/// The root directory that `DEVLET_ROOT` names.
pub fn named_root() -> Option<PathBuf> {
    let root = std::env::var_os(ROOT_VARIABLE).filter(|root| !root.is_empty());
    root.map(PathBuf::from)
}

fn roots(named: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(root) = named {
        vec![root.to_owned()]
    } else if let Some(root) = set(ROOT_VARIABLE) {
        vec![PathBuf::from(root)]
    } else {
        let own = user_root_from(&variable);
        own.into_iter().chain([PathBuf::from(SYSTEM_ROOT)]).collect()
    }
}

fn user_root_from(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    // The XDG specification: what is not absolute does not count.
    let absolute = |name: &str| {
        variable(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    Some(state?.join("devlet"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(named: Option<&str>, variables: &[(&str, &str)]) -> Vec<String> {
        let variable = |name: &str| {
            let set = variables.iter().find(|(key, _)| *key == name);
            set.map(|(_, value)| OsString::from(value))
        };
        let roots = roots(named.map(Path::new), variable);
        roots.iter().map(|root| root.display().to_string()).collect()
    }

    #[test]
    fn a_directory_that_was_named_is_the_only_one() {
        let variables = [("DEVLET_ROOT", "/env"), ("HOME", "/home/me")];
        assert_eq!(found(Some("/named"), &variables), ["/named"]);
        assert_eq!(found(None, &variables), ["/env"]);
    }

    #[test]
    fn otherwise_the_users_own_comes_before_the_systems() {
        let system = "/var/lib/kubelet";
        assert_eq!(
            found(None, &[("HOME", "/home/me")]),
            ["/home/me/.local/state/devlet", system]
        );
        let variables = [
            ("HOME", "/home/me"),
            ("XDG_STATE_HOME", "/state"),
            ("DEVLET_ROOT", ""),
        ];
        assert_eq!(found(None, &variables), ["/state/devlet", system]);
        let variables = [("HOME", "/home/me"), ("XDG_STATE_HOME", "relative")];
        assert_eq!(found(None, &variables), ["/home/me/.local/state/devlet", system]);
        assert_eq!(found(None, &[]), [system]);
    }

    #[test]
    fn the_socket_has_its_place_below_the_root() {
        assert_eq!(
            socket(Path::new("/root-dir")),
            Path::new("/root-dir/devlet/devlet.sock")
        );
    }
}
