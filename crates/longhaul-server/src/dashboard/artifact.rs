//! An artifact, shown as text, a page of it at a time; what is no text can be had as a file.

use askama::Template;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;

use super::page::{Frame, render};
use super::session::Visitor;
use super::show;
use crate::body::{OfTask, Params};
use crate::problem::Problem;
use crate::routes::artifacts::piece;
use crate::state::App;

/// How much is shown at once.
const PAGE: u64 = 64 * 1024;

#[derive(Deserialize)]
pub(super) struct At {
    #[serde(default)]
    offset: u64,
}

#[derive(Template)]
#[template(path = "artifact.html")]
struct Page {
    frame: Frame,
    id: String,
    /// The same, in an address.
    address: String,
    kind: String,
    summary: String,
    size: String,
    binary: bool,
    text: String,
    shown: String,
    before: Option<u64>,
    after: Option<u64>,
}

/// The page.
pub(super) async fn page(
    State(app): State<App>,
    visitor: Visitor,
    OfTask(task, id): OfTask<String>,
    Params(at): Params<At>,
) -> Result<Response, Problem> {
    let piece = piece(&app, &visitor.caller, task, &id, at.offset, PAGE).await?;
    let state = visitor.client().state(task).await?.map(|(_, state)| state).unwrap_or_default();
    let known = state.artifacts.into_iter().find(|known| known.artifact_id == id);
    let (kind, summary) = known.map_or_else(Default::default, |known| (known.kind, known.summary));
    let end = at.offset + piece.bytes.len() as u64;
    let text = if piece.binary { String::new() } else { String::from_utf8_lossy(&piece.bytes).into_owned() };
    let mut frame = Frame::new(&visitor, format!("Artifact {}", show::cut(&id, 40).0), "tasks").await?;
    // Its bytes never change.
    frame.stream.clear();
    let view = Page {
        frame,
        address: format!("/tasks/{task}/artifacts/{}", show::query_value(&id).replace('/', "%2F")),
        kind,
        summary,
        size: show::bytes(piece.size),
        binary: piece.binary,
        text,
        shown: format!("{} to {}", show::number(at.offset), show::number(end)),
        before: (at.offset > 0).then(|| at.offset.saturating_sub(PAGE)),
        after: (end < piece.size).then_some(end),
        id,
    };
    Ok(render(StatusCode::OK, &view))
}
