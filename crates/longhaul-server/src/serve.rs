//! Connections: accepting them within bounds, and ending them in order.
//!
//! A connection that sends its request slowly, or does not take its answer, is cut off. There are never more than the
//! settings allow; further ones wait in the system's queue.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::state::App;

/// The largest head of a request.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// How many headers a request may have.
const MAX_HEADERS: usize = 100;
/// How long requests under way may go on after the server was told to stop.
const DRAIN: Duration = Duration::from_secs(20);
/// The pause after the system could not give a connection (too many open files, say).
const PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop` is ready; then finishes what is under way, ends streams, and returns.
pub async fn serve(listener: TcpListener, app: App, stop: impl Future<Output = ()>) {
    let router = crate::router(app.clone());
    serve_router(listener, app, router, stop).await;
}

/// The same, with routes that were made for this app, [`crate::router_with`] for one.
pub async fn serve_router(listener: TcpListener, app: App, router: Router, stop: impl Future<Output = ()>) {
    let places = Arc::new(Semaphore::new(app.settings().max_connections.max(1)));
    let connections = TaskTracker::new();
    let mut stop = pin!(stop);
    loop {
        let accepted = async {
            // The semaphore is never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, stream) = tokio::select! {
            accepted = accepted => match accepted {
                (Ok(place), Ok((stream, _))) => (place, stream),
                (_, Err(error)) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                (Err(_), _) => break,
            },
            () = &mut stop => break,
        };
        let (router, app) = (router.clone(), app.clone());
        connections.spawn(async move {
            let _counted = app.metrics().connection();
            connection(stream, router, &app).await;
            drop(place);
        });
    }
    drop(listener);
    app.stop();
    connections.close();
    if tokio::time::timeout(DRAIN, connections.wait()).await.is_err() {
        tracing::warn!(left = connections.len(), "some connections did not end in time");
    }
}

async fn connection(stream: TcpStream, router: Router, app: &App) {
    let settings = app.settings();
    // Small answers must not wait for company.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(settings.request_timeout));
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        router.clone().oneshot(request.map(axum::body::Body::new))
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(settings.request_timeout)
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(Box::pin(stream)), service)
            .with_upgrades()
    );
    let stopping = app.stopping();
    tokio::select! {
        // A client that leaves in the middle is nobody's fault.
        ended = connection.as_mut() => if let Err(error) = ended { tracing::debug!(%error, "a connection ended early") },
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
