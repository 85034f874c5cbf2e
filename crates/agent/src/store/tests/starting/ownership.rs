//! Files of other users, links, and non-regular files in the place of state files.

use super::*;

#[tokio::test]
async fn a_file_that_another_user_controls_is_quarantined_and_never_adopted() {
    use std::os::unix::fs::PermissionsExt as _;
    let is_root = rustix::process::geteuid().is_root();
    for how in [
        "group",
        "others",
        "two names",
        "too large",
        "named pipe",
        "directory",
        "link to a device",
        "dangling link",
        "owner",
    ] {
        if how == "owner" && !is_root {
            eprintln!("skipped: only root can give a file to another user");
            continue;
        }
        let root = root_with_a_pod().await;
        let file = root.checkpoint();
        let mode = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::remove_file(&file).unwrap();
        if !NOT_FILES.contains(&how) {
            std::fs::write(&file, kubelet_file(&[("a", &["00"]), ("k", &["01"])])).unwrap();
        }
        match how {
            "group" => mode(0o620),
            "others" => mode(0o602),
            "two names" => std::fs::hard_link(&file, root.path().join("second")).unwrap(),
            "too large" => {
                let file = std::fs::File::options().write(true).open(&file).unwrap();
                file.set_len(300 << 20).unwrap();
            }
            "owner" => std::os::unix::fs::chown(&file, Some(12345), None).unwrap(),
            other => make(other, &file),
        }

        let (store, report) = root.open_with_report();

        assert_eq!(uids(&store), ["a"], "{how}");
        let [aside] = &report.quarantined[..] else {
            panic!("{how}: {report:?}");
        };
        assert!(aside.kept.symlink_metadata().is_ok(), "{how}");
        // A kubelet may have written it, unless it is not a regular file or belongs to another user.
        let may_be_state = ["group", "others", "two names", "too large"].contains(&how);
        assert_eq!(report.blocked.is_some(), may_be_state, "{how}: {report:?}");
        if may_be_state {
            offer(&store, GPU, 8);
            assert!(refuses(&store), "{how}");
            store.forget().await.unwrap();
        }
        store.stop().await.unwrap();
        assert!(file.is_file(), "{how}: the mirror is back");
    }
}

#[tokio::test]
async fn a_database_or_id_that_another_user_controls_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    for name in ["state.redb", "node-id"] {
        let root = root_with_a_pod().await;
        let path = root.path().join(name);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
        let refused = Store::open(root.options()).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("chmod go-w {}", path.display())),
            "{refused}"
        );
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(uids(&root.open()), ["a"]);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            let refused = Store::open(root.options()).unwrap_err().to_string();
            assert!(
                refused.contains(&format!("chown 0 {}", path.display())),
                "{refused}"
            );
        } else {
            eprintln!("skipped: only root can give a file to another user");
        }
    }
}

#[tokio::test]
async fn a_non_regular_file_in_the_place_of_the_database_or_its_id_is_quarantined() {
    for kind in NOT_FILES {
        let root = root_with_a_pod().await;
        std::fs::remove_file(root.database()).unwrap();
        make(kind, &root.database());
        let (store, report) = root.open_with_report();
        assert!(
            matches!(report.blocked, Some(Blocked::LostDatabase { .. })),
            "{kind}: {report:?}"
        );
        assert_eq!(uids(&store), ["a"], "{kind}: as in the mirror");
        assert!(report.quarantined[0].kept.symlink_metadata().is_ok(), "{kind}");
        drop(store);

        let root = root_with_a_pod().await;
        std::fs::remove_file(root.path().join("node-id")).unwrap();
        make(kind, &root.path().join("node-id"));
        let (store, report) = root.open_with_report();
        assert_eq!(report.blocked, None, "{kind}");
        assert_eq!(report.quarantined.len(), 1, "{kind}");
        assert_eq!(uids(&store), ["a"], "{kind}");
    }
}

#[tokio::test]
async fn a_database_behind_a_link_stays_behind_it() {
    let root = root_with_a_pod().await;
    let disk = tempfile::tempdir().unwrap();
    let target = disk.path().join("state.redb");
    std::fs::rename(root.database(), &target).unwrap();
    std::os::unix::fs::symlink(&target, root.database()).unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(report.blocked, None);
    offer(&store, GPU, 8);
    std::fs::remove_file(&target).unwrap();
    admit(&store, "b", 1).await.unwrap();
    store.stop().await.unwrap();
    assert!(root.database().is_symlink() && target.is_file());
    assert_eq!(uids(&root.open()), ["a", "b"]);
}

#[tokio::test]
async fn a_database_behind_a_link_into_a_directory_of_another_user_is_rejected() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let root = root_with_a_pod().await;
    let (disk, between) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (target, hop) = (disk.path().join("state.redb"), between.path().join("hop"));
    std::fs::rename(root.database(), &target).unwrap();
    symlink(&target, &hop).unwrap();
    symlink(&hop, root.database()).unwrap();
    let allow = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    for open in [disk.path(), between.path()] {
        for mode in [0o777, 0o1777] {
            allow(open, mode);
            let refused = Store::open(root.options()).unwrap_err().to_string();
            let remedy = format!("chmod go-w {}", open.display());
            assert!(refused.contains(&remedy), "{refused}");
        }
        allow(open, 0o755);
    }
    assert_eq!(uids(&root.open()), ["a"]);
}
