//! Backups made while the store is in use.

mod common;

use std::path::Path;

use common::Bed;
use longhaul::{Client, Cursor, Error, NewTask, Run, State, TaskError, Worker};

async fn accept(bed: &Bed, n: u32) -> longhaul::TaskId {
    bed.client.announce(&["add"]).await.expect("announced");
    bed.client.submit(NewTask::new("add", &n)).await.expect("accepted").id
}

fn only(folder: &Path, name: &str) {
    let names: Vec<String> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, [name], "nothing else is left behind");
}

async fn is_a_store_of_its_own(bed: Bed) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("copy.db");
    let id = accept(&bed, 1).await;
    let mut events = bed.client.all_events(Some(&Cursor::START)).await.expect("begins");
    let (_, cursor) = events.next().await.expect("an event");
    let writers = bed.client.clone();
    let busy = tokio::spawn(async move {
        for n in 0..50 {
            writers.submit(NewTask::new("add", &n)).await.expect("accepted");
        }
    });
    bed.client.backup(&path).await.expect("copied");
    busy.await.expect("submitted");
    only(folder.path(), "copy.db");
    let later = accept(&bed, 2).await;
    let copy = Client::open(&format!("sqlite:{}", path.display())).await.expect("it opens");
    assert!(matches!(copy.task(later).await, Err(Error::NotFound(_))), "it is as it was then");
    let worker = Worker::new(&copy)
        .handler("add", |_run: Run, n: u32| async move { Ok::<_, TaskError>(n + 1) })
        .start()
        .await
        .expect("starts");
    let ended = copy.wait(id, common::PATIENCE).await.expect("the task ends");
    assert_eq!((ended.state, ended.result.expect("a result").get()), (State::Completed, "2"));
    let mut rest = copy.all_events(Some(&cursor)).await.expect("cursors are still good");
    let next = tokio::time::timeout(common::PATIENCE, rest.next()).await.expect("an event comes");
    assert!(next.expect("the store answers").0.task_id >= id);
    worker.stop().await;
    assert_eq!(bed.client.task(id).await.expect("there").state, State::Pending, "the original is untouched");
}

async fn overwrites_nothing(bed: Bed) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("precious");
    std::fs::write(&path, "precious").expect("written");
    let refused = bed.client.backup(&path).await.err();
    assert!(matches!(&refused, Some(Error::Invalid(invalid)) if invalid.field == "path"), "{refused:?}");
    assert_eq!(std::fs::read_to_string(&path).expect("there"), "precious");
    let nowhere = bed.client.backup(folder.path().join("no/such/folder")).await.err();
    assert!(matches!(nowhere, Some(Error::Invalid(_))), "{nowhere:?}");
    only(folder.path(), "precious");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_a_file_is_a_store_of_its_own() {
    is_a_store_of_its_own(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_a_store_in_memory_is_a_store_of_its_own() {
    is_a_store_of_its_own(Bed::memory().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_overwrites_nothing() {
    overwrites_nothing(Bed::sqlite().await).await;
    overwrites_nothing(Bed::memory().await).await;
    if let Some(bed) = Bed::postgres().await {
        overwrites_nothing(bed).await;
    }
}

/// With `pg_dump` at hand an archive that `pg_restore` reads, without it an error that says what to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_of_postgres_is_an_archive_or_says_what_to_run() {
    let Some(bed) = Bed::postgres().await else { return };
    accept(&bed, 1).await;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("copy.dump");
    match bed.client.backup(&path).await {
        Ok(()) => {
            only(folder.path(), "copy.dump");
            let archive = std::fs::read(&path).expect("read");
            assert_eq!(&archive[..5], b"PGDMP");
        }
        Err(error) => {
            let error = error.to_string();
            assert!(error.contains("pg_dump"), "{error}");
            assert!(
                std::fs::read_dir(folder.path()).expect("a folder").next().is_none(),
                "nothing is left behind"
            );
        }
    }
}
