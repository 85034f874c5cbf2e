//! Schemas of other versions.

use prost::Message as _;
use redb::{ReadableTable as _, TableDefinition};

use super::*;
use crate::store::OpenError;
use crate::store::database::{LoadError, Row};
use crate::store::record::PodRecord;

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const PODS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("pods");

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
    set_schema(&root, 4);

    let refused = Store::open(root.options()).unwrap_err();

    let text = refused.to_string();
    assert!(
        matches!(
            refused,
            OpenError::NewerSchema {
                found: 4,
                known: 3,
                ..
            }
        ),
        "{refused:?}"
    );
    assert!(
        text.contains("has schema 4, but this devlet knows only up to 3"),
        "{text}"
    );
    assert!(root.names().iter().all(|name| !name.contains("unreadable")));
    set_schema(&root, 3);
    assert_eq!(uids(&root.open()), ["a"]);
}

#[tokio::test]
async fn an_older_schema_is_migrated_step_by_step() {
    let root = root_with_a_pod().await;
    let none: fn(&redb::WriteTransaction) -> Result<(), redb::Error> = |_| Ok(());
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

    set_schema(&root, 1);

    let loaded = root
        .place(Storage::default())
        .open_with(&[none, note, extend])
        .unwrap();

    assert_eq!(loaded.migrated_from, Some(1));
    assert_eq!(loaded.contents.pods.len(), 1);
    drop(loaded);
    let again = root
        .place(Storage::default())
        .open_with(&[none, note, extend])
        .unwrap();
    assert_eq!(again.migrated_from, None, "each step is taken once");
    drop(again);
    let refused = root.place(Storage::default()).open().map(|_| ()).unwrap_err();
    assert!(
        matches!(refused, LoadError::Newer { found: 4, known: 3 }),
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
    set_schema(&root, 1);
    let failed = root
        .place(Storage::default())
        .open_with(&[fail])
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(failed, LoadError::Io(_)), "{failed:?}");
    assert_eq!(uids(&root.open()), ["a"]);
}

#[tokio::test]
async fn a_schema_of_nobody_is_unreadable() {
    let root = root_with_a_pod().await;
    set_schema(&root, 0);
    let refused = root.place(Storage::default()).open().map(|_| ()).unwrap_err();
    assert!(matches!(refused, LoadError::Unreadable(_)), "{refused:?}");
}

#[tokio::test]
async fn pods_of_schema_1_have_containers_that_are_not_known() {
    let root = root_with_a_pod().await;
    {
        let database = database(&root);
        let transaction = database.begin_write().unwrap();
        let mut pods = transaction.open_table(PODS).unwrap();
        let bytes = pods.get("a").unwrap().unwrap().value().to_vec();
        let mut record = PodRecord::decode(&bytes[..]).unwrap();
        assert_eq!(record.containers, ["main"]);
        record.containers.clear();
        pods.insert("a", record.encode_to_vec().as_slice()).unwrap();
        drop(pods);
        transaction.commit().unwrap();
    }
    set_schema(&root, 1);
    take_the_journal_away(&root);

    let (store, report) = root.open_with_report();

    assert_eq!(report.migrated_from, Some(1));
    assert!(pods(&store)[0].may_have("anything"));
    store.stop().await.unwrap();
    assert_eq!(root.open_with_report().1.migrated_from, None);
}

#[tokio::test]
async fn a_database_of_schema_2_gets_a_place_for_claims() {
    let root = root_with_a_pod().await;
    {
        let database = database(&root);
        let transaction = database.begin_write().unwrap();
        let claims: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("claims");
        assert!(transaction.delete_table(claims).unwrap());
        transaction.commit().unwrap();
    }
    set_schema(&root, 2);

    let (store, report) = root.open_with_report();

    assert_eq!(report.migrated_from, Some(2));
    assert_eq!(uids(&store), ["a"]);
    claims::drive(&store);
    claims::admit_claiming(&store, "b", "one").await.unwrap();
    store.stop().await.unwrap();
    let store = root.open();
    assert_eq!(uids(&store), ["a", "b"]);
    assert_eq!(claims::claims(&store).len(), 1);
}

#[tokio::test]
async fn what_is_in_the_journal_is_migrated_too_and_the_journal_goes_on() {
    let root = root_with_a_pod().await;
    let store = root.open();
    let pod = pods(&store)[0].clone();
    store.stop().await.unwrap();
    let named = |uid: &str| {
        Row::pod(&Pod {
            uid: uid.into(),
            ..pod.clone()
        })
    };
    let step: fn(&redb::WriteTransaction) -> Result<(), redb::Error> = |_| Ok(());
    let steps = [step; 1];
    set_schema(&root, 2);
    let mut loaded = root.place(Storage::default()).open_with(&steps).unwrap();
    loaded.database.write(&[named("b")]).unwrap();
    drop(loaded);
    set_schema(&root, 1);

    let mut loaded = root.place(Storage::default()).open_with(&steps).unwrap();
    assert_eq!(loaded.migrated_from, Some(1));
    assert_eq!(loaded.contents.pods.len(), 2);
    loaded.database.write(&[named("c")]).unwrap();
    drop(loaded);

    let again = root.place(Storage::default()).open_with(&steps).unwrap();
    assert_eq!(again.contents.pods.len(), 3);
}
