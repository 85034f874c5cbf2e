//! Schemas of other versions.

use redb::TableDefinition;

use super::*;
use crate::store::OpenError;
use crate::store::load_error::LoadError;
use crate::store::tables::SCHEMA;

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

fn set_schema(root: &Root, version: u32) {
    let database = database(root);
    let transaction = database.begin_write().unwrap();
    let mut meta = transaction.open_table(META).unwrap();
    meta.insert("schema", &version.to_le_bytes()[..]).unwrap();
    drop(meta);
    transaction.commit().unwrap();
}

async fn root_with_a_pod() -> Root {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();
    root
}

#[tokio::test]
async fn a_newer_schema_is_refused_and_left_alone() {
    let root = root_with_a_pod().await;
    set_schema(&root, SCHEMA + 1);

    let refused = Store::open(root.options()).unwrap_err();

    let text = refused.to_string();
    assert!(matches!(refused, OpenError::NewerSchema { .. }), "{refused:?}");
    assert!(
        text.contains("has schema 2, but this devlet knows only up to 1"),
        "{text}"
    );
    assert!(root.names().iter().all(|name| !name.contains("unreadable")));
    set_schema(&root, SCHEMA);
    assert_eq!(uids(&root.open()), ["a"]);
}

#[tokio::test]
async fn an_unknown_older_schema_is_unreadable() {
    let root = root_with_a_pod().await;
    set_schema(&root, 0);
    let refused = root
        .database_file(Storage::default())
        .open()
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(refused, LoadError::Unreadable(_)), "{refused:?}");
}
