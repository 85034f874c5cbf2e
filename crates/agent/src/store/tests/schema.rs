//! Schemas of other versions.

use redb::TableDefinition;

use super::*;
use crate::store::OpenError;
use crate::store::database::{LoadError, Place};

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

fn set_schema(root: &Root, version: u32) {
    let database = redb::Database::open(root.database()).unwrap();
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

fn place(root: &Root) -> Place {
    Place {
        path: root.database(),
        storage: Storage::default(),
        counters: Arc::default(),
    }
}

#[tokio::test]
async fn a_newer_schema_is_refused_and_left_alone() {
    let root = root_with_a_pod().await;
    set_schema(&root, 2);

    let refused = Store::open(root.options()).unwrap_err();

    let text = refused.to_string();
    assert!(
        matches!(
            refused,
            OpenError::NewerSchema {
                found: 2,
                known: 1,
                ..
            }
        ),
        "{refused:?}"
    );
    assert!(
        text.contains("has schema 2, but this devlet knows only up to 1"),
        "{text}"
    );
    assert!(root.names().iter().all(|name| !name.contains("unreadable")));
    set_schema(&root, 1);
    assert_eq!(uids(&root.open()), ["a"]);
}

#[tokio::test]
async fn an_older_schema_is_migrated_step_by_step() {
    let root = root_with_a_pod().await;
    let note: fn(&redb::WriteTransaction) -> Result<(), redb::Error> = |transaction| {
        let mut meta = transaction.open_table(META)?;
        meta.insert("note", &b"two"[..])?;
        Ok(())
    };
    let extend: fn(&redb::WriteTransaction) -> Result<(), redb::Error> = |transaction| {
        let mut meta = transaction.open_table(META)?;
        let note = meta.remove("note")?.map(|note| note.value().to_vec());
        let note = [note.unwrap(), b", three".to_vec()].concat();
        meta.insert("note", note.as_slice())?;
        Ok(())
    };

    let loaded = place(&root).open_with(&[note, extend]).unwrap();

    assert_eq!(loaded.migrated_from, Some(1));
    assert_eq!(loaded.contents.pods.len(), 1);
    drop(loaded);
    let again = place(&root).open_with(&[note, extend]).unwrap();
    assert_eq!(again.migrated_from, None, "each step is taken once");
    drop(again);
    let refused = place(&root).open().map(|_| ()).unwrap_err();
    assert!(
        matches!(refused, LoadError::Newer { found: 3, known: 1 }),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_failed_migration_leaves_the_old_schema() {
    let root = root_with_a_pod().await;
    let fail: fn(&redb::WriteTransaction) -> Result<(), redb::Error> = |transaction| {
        transaction.open_table(META)?.insert("note", &b"half"[..])?;
        Err(redb::Error::Io(std::io::ErrorKind::StorageFull.into()))
    };
    let failed = place(&root).open_with(&[fail]).map(|_| ()).unwrap_err();
    assert!(matches!(failed, LoadError::Io(_)), "{failed:?}");
    assert_eq!(uids(&root.open()), ["a"]);
}

#[tokio::test]
async fn a_schema_of_nobody_is_unreadable() {
    let root = root_with_a_pod().await;
    set_schema(&root, 0);
    let refused = place(&root).open().map(|_| ()).unwrap_err();
    assert!(matches!(refused, LoadError::Unreadable(_)), "{refused:?}");
}
