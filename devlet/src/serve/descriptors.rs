//! How many files may be open, and what that leaves for peers: every plugin and caller takes a descriptor.

use super::http;
use devlet_agent::limits::Limits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that devlet needs for itself: sockets, directories, the database, HTTP connections.
const OWN: usize = 64 + http::CONNECTIONS;

/// Raises the limit as far as it goes; the lower one is there for programs that use `select`. What it is then.
pub(super) fn raise() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    let current = getrlimit(Resource::Nofile).current;
    current.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX))
}

/// Lowers what one user may have so that one alone cannot take all descriptors.
pub(super) fn fit(limits: &mut Limits, files: usize) {
    let wanted = [
        limits.plugins,
        limits.server.connections_per_uid,
        limits.callers_per_uid,
    ];
    let wanted = wanted.into_iter().fold(OWN, usize::saturating_add);
    if wanted <= files {
        return;
    }
    let own = OWN.min(files / 2);
    let room = (files - own).saturating_sub(limits.plugins.min(files / 4));
    let connections = &mut limits.server.connections_per_uid;
    *connections = (*connections).min(room / 4).max(1);
    limits.callers_per_uid = limits.callers_per_uid.min(room / 2).max(1);
    tracing::warn!(
        files,
        wanted,
        connectionsPerUid = limits.server.connections_per_uid,
        callersPerUid = limits.callers_per_uid,
        "fewer files may be open than plugins and one user's callers can take: limits are lowered to these; raise the \
         limit of open files (LimitNOFILE= of systemd, ulimit -n), or set them under limits"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_for_which_there_are_descriptors_stay() {
        let mut limits = Limits::default();
        fit(&mut limits, OWN + 1024 + 256 + 4096);
        assert_eq!(limits, Limits::default());
    }

    #[test]
    fn with_few_descriptors_one_user_cannot_take_them_all() {
        for files in [1, 16, 64, 256, 1024, 5000] {
            let mut limits = Limits::default();
            fit(&mut limits, files);
            let (connections, callers) = (limits.server.connections_per_uid, limits.callers_per_uid);
            assert!(connections >= 1 && callers >= 1, "{files}");
            assert!(connections <= 256 && callers < 4096, "{files}");
            assert!(
                connections + callers <= (files * 3 / 4).max(2),
                "{files}: {connections}, {callers}"
            );
        }
    }

    #[test]
    fn what_is_set_lower_stays() {
        let mut limits = Limits {
            callers_per_uid: 3,
            ..Limits::default()
        };
        limits.server.connections_per_uid = 2;
        fit(&mut limits, 64);
        assert_eq!(
            (limits.server.connections_per_uid, limits.callers_per_uid),
            (2, 3)
        );
    }
}
