//! The limit on open files, and connection limits that fit it: every plugin and caller uses a descriptor.

use super::http;
use devlet_agent::limits::Limits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors reserved for devlet: sockets, directories, the database, HTTP connections.
const RESERVED: usize = 64 + http::CONNECTIONS;

/// The most opens of static pods that the kernel gives at a time. It denies those that do not get a descriptor.
const OPENS: usize = 170;

/// Raises the soft limit on open files to the hard limit, and returns it. The soft limit exists for programs that use
/// `select`.
pub(super) fn raise() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "limit on open files not raised");
    }
    let current = getrlimit(Resource::Nofile).current;
    current.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX))
}

/// Lowers the connection limits so that one user cannot take all descriptors.
pub(super) fn fit(limits: &mut Limits, files: usize, is_shield: bool) {
    // A shield has a socket and a connection of the kubelet for each resource.
    let shield = if is_shield {
        limits.plugins.saturating_mul(2).saturating_add(OPENS)
    } else {
        0
    };
    let reserved = shield.saturating_add(RESERVED);
    let wanted = [limits.plugins, limits.connections_per_uid, limits.callers_per_uid];
    let wanted = wanted.into_iter().fold(reserved, usize::saturating_add);
    if wanted <= files {
        return;
    }
    let own = reserved.min(files / 2);
    let room = (files - own).saturating_sub(limits.plugins.min(files / 4));
    let connections = &mut limits.connections_per_uid;
    *connections = (*connections).min(room / 4).max(1);
    limits.callers_per_uid = limits.callers_per_uid.min(room / 2).max(1);
    tracing::warn!(
        files,
        wanted,
        connectionsPerUid = limits.connections_per_uid,
        callersPerUid = limits.callers_per_uid,
        "connection limits lowered to fit the limit on open files; raise that (LimitNOFILE= of systemd, ulimit -n), or set \
         lower limits in the configuration"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_fit_the_descriptors_stay() {
        let mut limits = Limits::default();
        fit(&mut limits, RESERVED + 1024 + 256 + 4096, false);
        fit(&mut limits, RESERVED + OPENS + 3 * 1024 + 256 + 4096, true);
        assert_eq!(limits, Limits::default());
    }

    #[test]
    fn with_few_descriptors_one_user_cannot_take_all_of_them() {
        for (files, is_shield) in [
            (1, true),
            (16, false),
            (64, true),
            (256, false),
            (1024, true),
            (5000, false),
        ] {
            let mut limits = Limits::default();
            fit(&mut limits, files, is_shield);
            let (connections, callers) = (limits.connections_per_uid, limits.callers_per_uid);
            assert!(connections >= 1 && callers >= 1, "{files}");
            assert!(connections <= 256 && callers < 4096, "{files}");
            assert!(
                connections + callers <= (files * 3 / 4).max(2),
                "{files}: {connections}, {callers}"
            );
        }
    }

    #[test]
    fn lower_configured_limits_stay() {
        let mut limits = Limits {
            callers_per_uid: 3,
            ..Limits::default()
        };
        limits.connections_per_uid = 2;
        fit(&mut limits, 64, true);
        assert_eq!((limits.connections_per_uid, limits.callers_per_uid), (2, 3));
    }
}
