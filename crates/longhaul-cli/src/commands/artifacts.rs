//! `longhaul artifacts` and `artifact`.

use std::io::{IsTerminal as _, Write};
use std::path::Path as FilePath;

use reqwest::{Method, header};

use super::{cell, list, moment};
use crate::args::client::{ArtifactArgs, TaskArgs};
use crate::exit::Failure;
use crate::http::{Path, Server};
use crate::out;
use crate::table::Table;
use crate::units;

/// Between two pieces of an artifact; a day must be enough for all of it.
const SILENCE: std::time::Duration = std::time::Duration::from_secs(60);
const IN_ALL: std::time::Duration = std::time::Duration::from_secs(86_400);
/// What the server says of what is no text.
const BINARY: &str = "application/octet-stream";

pub(crate) async fn run(args: TaskArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&Path::task(&args.id, &["artifacts"])).await?;
    if args.remote.json {
        return answer.print();
    }
    let answer = answer.json()?;
    let mut table = Table::new(&["ARTIFACT", "TYPE", "SIZE", "STEP", "CREATED", "SUMMARY"]);
    for artifact in list(&answer, "artifacts")? {
        let id = if artifact["artifact_id"].is_null() { &artifact["id"] } else { &artifact["artifact_id"] };
        table.row([
            cell(id),
            cell(&artifact["type"]),
            artifact["bytes"].as_u64().map_or_else(|| "-".to_owned(), units::show_bytes),
            cell(&artifact["step"]),
            moment(&artifact["created_at"])
                .map_or_else(|| "-".to_owned(), |_| super::local(&artifact["created_at"])),
            cell(&artifact["summary"]),
        ]);
    }
    table.print()
}

pub(crate) async fn one(args: ArtifactArgs) -> Result<(), Failure> {
    let server = Server::new(&args.server)?;
    let path = Path::task(&args.id, &["artifacts", &args.artifact]);
    let mut call = server.request(Method::GET, &path).accept("*/*").timeout(IN_ALL);
    if let Some(range) = &args.range {
        call = call.header(header::RANGE, &format!("bytes={range}"));
    }
    let mut response = call.open().await?;
    let is_text = response.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind != BINARY);
    if args.output.is_none() && !is_text && std::io::stdout().is_terminal() {
        return Err(Failure::usage(
            "the artifact is binary and would garble the terminal; say -o FILE, or pipe it",
        ));
    }
    let mut file = args.output.as_deref().map(Partial::beside).transpose()?;
    loop {
        let lost = |why: String| Failure::internal(format!("the artifact broke off in the middle: {why}"));
        let chunk = tokio::time::timeout(SILENCE, response.chunk()).await;
        let chunk =
            chunk.map_err(|_| lost("the server is silent".to_owned()))?.map_err(|e| lost(e.to_string()))?;
        match (&mut file, chunk) {
            (Some(file), Some(chunk)) => file.write(&chunk)?,
            (None, Some(chunk)) => out::raw(&chunk)?,
            (_, None) => break,
        }
    }
    match (file, &args.output) {
        (Some(file), Some(path)) => file.keep(path),
        _ => Ok(()),
    }
}

/// A file that gets its name when it is complete, so that half an artifact is never taken for one.
struct Partial {
    file: tempfile::NamedTempFile,
}

impl Partial {
    fn beside(path: &FilePath) -> Result<Self, Failure> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(FilePath::new("."));
        let file = tempfile::Builder::new().prefix(".longhaul-").tempfile_in(folder);
        let file =
            file.map_err(|error| Failure::usage(format!("cannot write to {}: {error}", folder.display())))?;
        Ok(Self { file })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file
            .write_all(bytes)
            .map_err(|error| Failure::internal(format!("cannot write the artifact: {error}")))
    }

    fn keep(self, path: &FilePath) -> Result<(), Failure> {
        let kept = self.file.persist(path);
        kept.map(drop).map_err(|error| Failure::usage(format!("cannot write {}: {}", path.display(), error.error)))
    }
}
