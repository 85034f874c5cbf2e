//! Paths of devlet's root directory and socket.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment variable with the root directory.
pub const ROOT_VARIABLE: &str = "DEVLET_ROOT";

/// The root directory of a node, which is that of the kubelet.
pub const SYSTEM_ROOT: &str = "/var/lib/kubelet";

/// The root directory of a devlet beside a kubelet.
pub const SHIELD_ROOT: &str = "/var/lib/devlet";

/// Returns the path of the socket below a root directory.
pub fn socket(root: &Path) -> PathBuf {
    root.join("devlet").join("devlet.sock")
}

/// Returns the sockets to try, in this order. `root` or `DEVLET_ROOT` is the only candidate if given. Otherwise
/// the user's own root comes first, then the system's.
pub fn sockets(root: Option<&Path>) -> Vec<PathBuf> {
    let roots = roots(root, |name| std::env::var_os(name));
    roots.iter().map(|root| socket(root)).collect()
}

/// Returns the root directory of a devlet that does not run as root: `devlet` below the user's state directory.
/// `None` if neither `XDG_STATE_HOME` nor `HOME` is set.
pub fn user_root() -> Option<PathBuf> {
    user_root_from(|name| std::env::var_os(name))
}

/// Returns the root directory in `DEVLET_ROOT`.
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
    // As the XDG specification requires, a relative path is ignored.
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
    fn a_given_directory_is_the_only_one() {
        let variables = [("DEVLET_ROOT", "/env"), ("HOME", "/home/me")];
        assert_eq!(found(Some("/named"), &variables), ["/named"]);
        assert_eq!(found(None, &variables), ["/env"]);
    }

    #[test]
    fn without_a_given_directory_the_users_root_comes_before_the_systems() {
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
    fn the_socket_is_in_the_devlet_directory_below_the_root() {
        assert_eq!(
            socket(Path::new("/root-dir")),
            Path::new("/root-dir/devlet/devlet.sock")
        );
    }
}
