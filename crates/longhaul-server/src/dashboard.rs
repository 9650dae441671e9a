//! The dashboard: pages for people at `/`, made here and kept live by server-sent events.
//!
//! A page is whole as it is sent. What makes it live asks for the same page again and takes over what changed, so that
//! nothing is written twice, once here and once in the browser; only the list of a task's events, which may be long, is drawn
//! there. Everything is done with the [`longhaul::Client`] of who is signed in, as the routes do it: tenants, roles and
//! audits are the same. Nothing that comes from tasks is ever taken as HTML: templates escape, scripts set text, and the
//! browser is told to run only the files of [`assets`].

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};

use crate::routes::{artifacts, tasks as task_routes};
use crate::state::App;

mod actions;
mod artifact;
mod assets;
mod bulk;
mod chart;
mod fleet;
mod inbox;
mod live;
mod page;
mod pulse;
mod session;
mod show;
mod talk;
mod task;
mod tasks;
mod timeline;

pub(crate) use pulse::Pulses;

/// The pages, what they do, and what they are made of.
pub(crate) fn router(app: &App) -> Router<App> {
    let known = Router::new()
        .route("/", get(tasks::page))
        .route("/tasks/{id}", get(task::page))
        .route("/inbox", get(inbox::page))
        .route("/fleet", get(fleet::page))
        .route("/live", get(live::changes))
        .route("/tasks/{id}/live", get(live::task))
        .route("/tasks/{id}/log", get(live::log))
        .route("/tasks/{id}/export", get(task_routes::export))
        .route("/tasks/{id}/artifacts/{artifact}", get(artifact::page))
        .route("/tasks/{id}/artifacts/{artifact}/raw", get(artifacts::content))
        .route("/bulk", get(bulk::page).post(bulk::act))
        .route("/tasks/{id}/cancel", post(actions::cancel))
        .route("/tasks/{id}/resume", post(actions::resume))
        .route("/tasks/{id}/priority", post(actions::priority))
        .route("/tasks/{id}/message", post(actions::message))
        .route("/tasks/{id}/fork", post(actions::fork))
        .route("/tasks/{id}/undo", post(actions::undo))
        .route("/tasks/{id}/decide", post(actions::decide))
        .route("/tasks/{id}/approval", post(actions::approval))
        .route("/tasks/{id}/answer", post(actions::answer))
        .route("/tasks/{id}/redeliver", post(actions::redeliver))
        .route("/queue", post(actions::queue))
        .route("/schedule", post(actions::schedule))
        .route("/sign-out", post(session::sign_out))
        .route_layer(from_fn_with_state(app.clone(), session::identify));
    Router::new()
        .merge(known)
        .route("/sign-in", get(session::sign_in_page).post(session::sign_in))
        .route_layer(from_fn(page::for_people))
        .route("/assets/{version}/{file}", get(assets::file))
}
