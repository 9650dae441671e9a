//! Artifacts in a folder, in memory and, where `LONGHAUL_TEST_S3` names a bucket (`s3://BUCKET/PREFIX`, with the `AWS_…`
//! variables), in an S3-compatible store.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use longhaul_agent::artifact::{ArtifactError, Artifacts, Stored};

/// Every storage that can be had, each empty.
fn storages() -> (tempfile::TempDir, Vec<Artifacts>) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut urls = vec!["memory:".to_owned(), format!("file:{}", folder.path().join("artifacts").display())];
    match std::env::var("LONGHAUL_TEST_S3") {
        Ok(url) => urls.push(format!("{}/{}", url.trim_end_matches('/'), uuid::Uuid::now_v7())),
        Err(_) => eprintln!("skipped on S3: LONGHAUL_TEST_S3 names no bucket"),
    }
    let opened = urls.iter().map(|url| Artifacts::open(url).expect("the storage opens")).collect();
    (folder, opened)
}

fn files(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            names.extend(files(&entry.path()));
        } else {
            names.push(entry.path().display().to_string());
        }
    }
    names
}

/// A log of about this size, in chunks.
fn log_chunks(bytes: usize) -> impl Iterator<Item = String> {
    let mut line = 0_u64;
    let mut written = 0;
    std::iter::from_fn(move || {
        if written >= bytes {
            return None;
        }
        let mut chunk = String::new();
        while chunk.len() < 50_000 {
            line += 1;
            let what = if line == 4_321 { "ERROR disk full on /var" } else { "GET /index.html 200" };
            chunk.push_str(&format!("{line:08} {what} {}\n", "x".repeat(70)));
        }
        written += chunk.len();
        Some(chunk)
    })
}

async fn write_log(artifacts: &Artifacts, bytes: usize) -> Stored {
    let mut writer = artifacts.writer("default");
    for chunk in log_chunks(bytes) {
        writer.write(chunk.as_bytes()).await.expect("written");
    }
    writer.finish().await.expect("stored")
}

#[tokio::test]
async fn an_artifact_is_known_by_what_is_in_it_and_belongs_to_one_tenant() {
    let (_folder, storages) = storages();
    for artifacts in storages {
        let stored = artifacts.put("acme", Bytes::from_static(b"hello\n")).await.expect("stored");
        assert_eq!(
            stored.artifact_id, "sha256-5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
            "{artifacts:?}"
        );
        let again = artifacts.put("acme", Bytes::from_static(b"hello\n")).await.expect("stored");
        assert_eq!(again, stored);
        let id = &stored.artifact_id;
        assert_eq!(artifacts.info("acme", id).await.expect("found"), Some(6));
        assert_eq!(artifacts.info("other", id).await.expect("looked"), None);
        assert!(matches!(artifacts.read("other", id, 0..9).await, Err(ArtifactError::NotFound(_))));
        artifacts.probe().await.expect("it works");
    }
}

#[tokio::test]
async fn the_same_content_is_stored_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let artifacts = Artifacts::open(&folder.path().display().to_string()).expect("open");
    let one = write_log(&artifacts, 1_000_000).await;
    let two = write_log(&artifacts, 1_000_000).await;
    assert_eq!(one, two);
    assert_eq!(files(folder.path()).len(), 1, "{:?}", files(folder.path()));
}

#[tokio::test]
async fn a_large_artifact_is_read_by_ranges_lines_and_patterns() {
    let (_folder, storages) = storages();
    for artifacts in storages {
        let stored = write_log(&artifacts, 12_000_000).await;
        let id = &stored.artifact_id;
        assert!(stored.summary.contains("MB of text"), "{}", stored.summary);
        assert!(stored.excerpt.contains("4321: 00004321 ERROR disk full"), "{}", stored.excerpt);
        assert_eq!(artifacts.info("default", id).await.expect("found"), Some(stored.bytes));

        let page = artifacts.lines("default", id, 4_320, 3, 8_000).await.expect("lines");
        assert!(page.text.starts_with("4320: 00004320 GET"), "{}", page.text);
        assert_eq!((page.lines, page.next_line), (3, Some(4_323)));
        let last = artifacts.lines("default", id, stored.lines, 10, 8_000).await.expect("lines");
        assert_eq!((last.lines, last.next_line), (1, None));
        let past = artifacts.lines("default", id, stored.lines + 5, 10, 8_000).await.expect("lines");
        assert_eq!((past.lines, past.text.as_str()), (0, ""));
        let tight = artifacts.lines("default", id, 7, 100, 30).await.expect("lines");
        assert_eq!((tight.lines, tight.next_line), (1, Some(8)));
        assert!(tight.text.len() <= 30);

        let found = artifacts.search("default", id, "(?i)error .* /var", 5, 8_000).await.expect("searched");
        assert_eq!(found.matches.iter().map(|found| found.line).collect::<Vec<_>>(), [4_321]);
        assert!(!found.more);
        let at = found.matches[0].offset;
        let bytes = artifacts.read("default", id, at..at + 15).await.expect("read");
        assert_eq!(&bytes[..], b"ERROR disk full");
        let many = artifacts.search("default", id, "GET", 5, 8_000).await.expect("searched");
        assert_eq!((many.matches.len(), many.more), (5, true));

        let end = artifacts.read("default", id, stored.bytes - 3..u64::MAX).await.expect("read");
        assert_eq!(&end[..], b"xx\n");
        assert!(artifacts.read("default", id, stored.bytes..u64::MAX).await.expect("read").is_empty());
        let mut stream = artifacts.stream("default", id, 0..u64::MAX).await.expect("stream");
        let mut bytes = 0;
        while let Some(chunk) = stream.try_next().await.expect("a chunk") {
            bytes += chunk.len() as u64;
        }
        assert_eq!(bytes, stored.bytes);
    }
}

#[tokio::test]
async fn a_pattern_that_is_none_says_why() {
    let artifacts = Artifacts::open("memory:").expect("open");
    let stored = artifacts.put("default", Bytes::from_static(b"x")).await.expect("stored");
    for (pattern, why) in [("(", "unclosed group"), ("(\\w{500}){500}", "too large"), (&"x".repeat(1_001), "1001")]
    {
        let error =
            artifacts.search("default", &stored.artifact_id, pattern, 1, 100).await.expect_err("no pattern");
        assert!(matches!(error, ArtifactError::BadPattern(_)));
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[tokio::test]
async fn one_line_without_end_can_be_searched_and_read() {
    let artifacts = Artifacts::open("memory:").expect("open");
    let text = format!("{}needle{}", "a".repeat(200_000), "b".repeat(200_000));
    let stored = artifacts.put("default", text.into()).await.expect("stored");
    let found = artifacts.search("default", &stored.artifact_id, "needle", 5, 8_000).await.expect("searched");
    assert_eq!((found.matches[0].line, found.matches[0].offset), (1, 200_000));
    assert!(found.matches[0].text.starts_with('…') && found.matches[0].text.len() < 600);
    let page = artifacts.lines("default", &stored.artifact_id, 1, 10, 8_000).await.expect("lines");
    assert!(page.text.len() < 3_000 && page.text.contains("[397,806 bytes]"), "{}", page.text);
}

#[tokio::test]
async fn nothing_outside_of_the_storage_can_be_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("artifacts");
    std::fs::write(folder.path().join("secret"), "secret").expect("written");
    let artifacts = Artifacts::open(&root.display().to_string()).expect("open");
    for id in ["../../secret", "..%2F..%2Fsecret", "sha256-../secret", "/etc/passwd", ""] {
        assert!(matches!(artifacts.read("default", id, 0..9).await, Err(ArtifactError::BadId(_))), "{id}");
    }
    for tenant in ["..", ".", "../..", "a/b", "ünï code", ".incoming", "%2E%2E"] {
        let stored = artifacts.put(tenant, Bytes::from_static(b"mine")).await.expect("stored");
        let read = artifacts.read(tenant, &stored.artifact_id, 0..9).await.expect("read");
        assert_eq!(&read[..], b"mine");
    }
    assert!(matches!(artifacts.put("", Bytes::new()).await, Err(ArtifactError::NoTenant)));
    let outside: Vec<String> =
        files(folder.path()).into_iter().filter(|file| !file.starts_with(&root.display().to_string())).collect();
    assert_eq!(outside.len(), 1, "only the secret: {outside:?}");
    assert_eq!(std::fs::read_dir(&root).expect("a folder").count(), 7, "each tenant has a folder of its own");
}

#[tokio::test]
async fn symbolic_links_in_the_folder_are_not_followed() {
    let folder = tempfile::tempdir().expect("a folder");
    let elsewhere = tempfile::tempdir().expect("another");
    let artifacts = Artifacts::open(&folder.path().display().to_string()).expect("open");
    let stored = artifacts.put("default", Bytes::from_static(b"hello\n")).await.expect("stored");
    let file = folder.path().join("default").join(&stored.artifact_id);
    std::fs::rename(&file, elsewhere.path().join("file")).expect("moved");
    std::os::unix::fs::symlink(elsewhere.path().join("file"), &file).expect("linked");
    let read = artifacts.read("default", &stored.artifact_id, 0..9).await;
    assert!(matches!(read, Err(ArtifactError::Link(_))), "{read:?}");
    std::os::unix::fs::symlink(elsewhere.path(), folder.path().join("acme")).expect("linked");
    let put = artifacts.put("acme", Bytes::from_static(b"hello\n")).await;
    assert!(matches!(put, Err(ArtifactError::Link(_))), "{put:?}");
    assert_eq!(files(elsewhere.path()).len(), 1);
}

#[tokio::test]
async fn a_writer_that_is_dropped_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let artifacts = Artifacts::open(&folder.path().display().to_string()).expect("open");
    let mut writer = artifacts.writer("default");
    writer.write(&vec![b'x'; 3_000_000]).await.expect("written");
    assert_eq!(files(folder.path()).len(), 1, "it is under way");
    drop(writer);
    let gone = async {
        while !files(folder.path()).is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), gone).await.expect("it is removed");
}

#[tokio::test]
async fn what_a_kill_left_unfinished_is_tidied_up_when_it_is_old() {
    let (folder, storages) = storages();
    let incoming = folder.path().join("artifacts/.incoming");
    std::fs::create_dir_all(&incoming).expect("made");
    std::fs::write(incoming.join("019a-left-behind#1"), "half of it").expect("written");
    for artifacts in storages {
        let stored = write_log(&artifacts, 600_000).await;
        let here = artifacts.url().starts_with("file:");
        assert_eq!(artifacts.tidy(Duration::from_secs(86_400)).await.expect("tidied"), 0);
        assert_eq!(artifacts.tidy(Duration::ZERO).await.expect("tidied"), usize::from(here), "{artifacts:?}");
        assert_eq!(artifacts.info("default", &stored.artifact_id).await.expect("found"), Some(stored.bytes));
    }
    assert_eq!(files(folder.path()).len(), 1);
}

#[tokio::test]
async fn a_single_long_line_is_read_to_its_end_by_bytes() {
    let line = "größe=1;".repeat(60_000);
    let (_folder, storages) = storages();
    for artifacts in storages {
        let id = artifacts.put("t", line.clone().into()).await.expect("stored").artifact_id;
        let (mut read, mut from, mut pages) = (String::new(), 0, 0);
        loop {
            let page = artifacts.text("t", &id, from, 4_001).await.expect("read");
            read.push_str(&page.text);
            pages += 1;
            match page.next_byte {
                Some(next) => from = next,
                None => break,
            }
        }
        assert!(read == line && pages > 100, "{pages} pages with {} bytes", read.len());
        let end = artifacts.text("t", &id, line.len() as u64, 100).await.expect("nothing is no error");
        assert_eq!((end.text.as_str(), end.next_byte), ("", None));
    }
}
