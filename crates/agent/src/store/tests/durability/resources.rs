//! Records of resources: their last plugins, and their eviction.

use super::*;

#[tokio::test]
async fn the_last_plugin_of_a_resource_is_recorded() {
    let root = Root::new();
    let store = root.open();
    let connection = offer(&store, GPU, 2);
    offer(&store, "acme.com/nic", 2);
    let before = Moment(NOW.0 - 5);
    store.update(|node| node.connection_lost(connection, before));
    store.stop().await.unwrap();

    let store = root.open();

    let known = store.read(devlet_core::Node::known_resources);
    let last = |name: &str| known[name].clone().unwrap();
    assert_eq!(last(GPU).gone_since, before);
    assert!(
        last("acme.com/nic").gone_since >= NOW,
        "disconnected since the start"
    );
    assert_eq!(last("acme.com/nic").endpoint, "/run/plugin.sock");
}

#[tokio::test]
async fn a_new_plugin_is_flushed_asynchronously() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    let syncs = disk.syncs();

    let connection = offer(&store, GPU, 2);

    // The mirror is due in an hour.
    wait_for_resource(&store, GPU, |record| record["endpoint"] == "/run/plugin.sock").await;
    assert_eq!(disk.syncs(), syncs + 1);
    store.update(|node| node.connection_lost(connection, NOW));
    wait_for_resource(&store, GPU, |record| record["goneSince"] == NOW.0).await;
    assert_eq!(disk.syncs(), syncs + 2);
}

#[tokio::test]
async fn a_new_plugin_is_flushed_with_an_admission_without_another_sync() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    let syncs = disk.syncs();

    // The writer is held up until both changes are queued.
    disk.hold_syncs();
    let nothing = request("nothing", 0);
    let held = store.hold(&nothing, &Preferences::new()).unwrap().unwrap();
    let mut first = pin!(held.commit(&nothing, Vec::new()));
    assert!(start(&mut first).is_pending());
    disk.wait_for_a_sync();
    offer(&store, GPU, 2);
    let mut second = pin!(admit(&store, "a", 1));
    assert!(start(&mut second).is_pending());
    disk.release_syncs();
    first.await.unwrap();
    second.await.unwrap();

    let dump = store.dump().await.unwrap();
    assert_eq!(dump["resources"][GPU]["endpoint"], "/run/plugin.sock");
    assert_eq!(disk.syncs(), syncs + 2);
}

#[tokio::test]
async fn an_idle_resource_is_evicted() {
    let root = Root::new();
    let store = root.open();
    let long_ago = Moment(NOW.0 - EVICT_AFTER_MS);
    for (resource, since) in [("acme.com/old", long_ago), ("acme.com/new", NOW), (GPU, long_ago)] {
        let connection = offer(&store, resource, 2);
        if resource == GPU {
            admit(&store, "a", 1).await.unwrap();
        }
        store.update(|node| node.connection_lost(connection, since));
    }
    wait_for_resource(&store, "acme.com/old", serde_json::Value::is_null).await;
    store.stop().await.unwrap();

    let store = root.open();

    let known = store.read(devlet_core::Node::known_resources);
    let names: Vec<&str> = known.keys().map(devlet_core::ResourceName::as_str).collect();
    assert_eq!(
        names,
        [GPU, "acme.com/new"],
        "what is held, and what was left just now"
    );
    let dump = store.dump().await.unwrap();
    assert_eq!(dump["resources"].as_object().unwrap().len(), 2);
}

#[tokio::test]
async fn a_resource_from_a_file_is_evicted_unless_a_pod_holds_it() {
    let root = Root::new();
    let store = root.open();
    store.import(kubelet_file(&[]).as_bytes()).await.unwrap();
    let knows = |store: &Store| store.read(|node| node.known_resources().contains_key(GPU));
    assert!(knows(&store));
    store.stop().await.unwrap();

    let store = root.open();
    assert!(!knows(&store));
    wait_for_resource(&store, GPU, serde_json::Value::is_null).await;
    store
        .import(kubelet_file(&[("k", &["00"])]).as_bytes())
        .await
        .unwrap();
    store.stop().await.unwrap();
    assert!(knows(&root.open()));
}
