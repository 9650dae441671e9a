//! How a run shows itself to those who operate it: spans that carry task, run and step, lines in the
//! log, and what is counted.
//!
//! A run has a span `run`, and each try of a step, an undo or a `verify` a span `step` below it, in which
//! everything is logged that the effect logs itself. A span that the filter does not want costs nothing.

use std::future::Future;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::instrument::{Instrument, Instrumented};
use tracing::{Span, field};

use super::Run;
use crate::error::TaskError;
use crate::meter::{Ended, HandlerMeter, StepEnded};
use crate::store::Lease;
use crate::trace;

/// The span of a run, part of the trace that its task was submitted with.
pub(crate) fn run_span(lease: &Lease) -> Span {
    let span = tracing::info_span!(
        "run",
        task = %lease.task,
        handler = lease.handler,
        run = lease.fence,
        attempt = lease.attempts + 1,
        otel.status_code = field::Empty,
    );
    if let Some(traceparent) = lease.traceparent.as_deref().filter(|_| !span.is_disabled()) {
        trace::adopt(&span, traceparent);
    }
    span
}

/// Says that the run whose span this is in begins.
pub(crate) fn begins(lease: &Lease) {
    if lease.fence == 1 {
        tracing::debug!(queue = lease.queue, "the run begins");
    } else {
        tracing::info!(queue = lease.queue, "the run goes on from what is recorded");
    }
}

/// Says that the run whose span this is in is over.
pub(super) fn is_over(ended: Ended, error: Option<&TaskError>) {
    let outcome = ended.name();
    if matches!(ended, Ended::Failed | Ended::Retry | Ended::Lost) {
        Span::current().record("otel.status_code", "ERROR");
    }
    match (ended, error) {
        (Ended::Failed | Ended::Retry, Some(error)) => {
            tracing::warn!(outcome, code = error.code, %error, "the run is over");
        }
        (Ended::Lost, _) => tracing::warn!(outcome, "the run is over"),
        _ => tracing::info!(outcome, "the run is over"),
    }
}

impl Run {
    /// A span below that of the run.
    fn step_span(&self, step: &str, attempt: u32) -> Span {
        // The parent is named: the handler may do its steps in tasks and spans of its own.
        let parent = self.inner.span.lock().unwrap_or_else(PoisonError::into_inner);
        tracing::info_span!(parent: &*parent, "step", step, attempt, otel.status_code = field::Empty)
    }

    /// Lets go of the run's span, so that it ends with the run, whoever still has the run.
    pub(crate) fn end_span(&self) {
        *self.inner.span.lock().unwrap_or_else(PoisonError::into_inner) = Span::none();
    }

    /// One try of a step.
    pub(super) fn try_step(&self, step: &str, attempt: u32) -> Try {
        let tried = self.begin(step, attempt, false);
        tried.span.in_scope(|| tracing::debug!("the step starts"));
        tried
    }

    /// One try of an undo.
    pub(super) fn try_undo(&self, step: &str, attempt: u32) -> Try {
        let tried = self.begin(step, attempt, true);
        tried.span.in_scope(|| tracing::info!("the undo starts"));
        tried
    }

    /// Asking whether a step in doubt happened.
    pub(super) fn try_verify(&self, step: &str, attempt: u32) -> Try {
        let tried = self.begin(step, attempt, false);
        tried.span.in_scope(|| tracing::info!("asking whether it happened"));
        tried
    }

    fn begin(&self, step: &str, attempt: u32, undo: bool) -> Try {
        let span = self.step_span(step, attempt);
        let traceparent = match span.is_disabled() {
            true => None,
            false => trace::traceparent(&span),
        };
        let traceparent = traceparent.or_else(|| self.inner.lease.traceparent.clone());
        Try { span, traceparent, meter: Arc::clone(&self.inner.meter), begun: Instant::now(), undo }
    }
}

/// One try of an effect. One that is dropped without a word was given up with its run.
pub(super) struct Try {
    span: Span,
    /// The trace to pass on to the outside.
    pub(super) traceparent: Option<String>,
    meter: Arc<HandlerMeter>,
    begun: Instant,
    undo: bool,
}

impl Try {
    /// The effect, in the span of the try. What is done before there is a future is in it too.
    pub(super) fn watch<F: Future>(&self, work: impl FnOnce() -> F) -> Instrumented<F> {
        self.span.in_scope(work).instrument(self.span.clone())
    }

    pub(super) fn completed(self) {
        let took = self.took();
        if self.undo {
            self.meter.step_ended(StepEnded::Undone);
            self.span.in_scope(|| tracing::info!(?took, "undone"));
        } else {
            self.meter.step_ended(StepEnded::Completed);
            self.span.in_scope(|| tracing::info!(?took, "the step is completed"));
        }
    }

    /// It failed and will be tried again.
    pub(super) fn retried(self, error: &TaskError, delay: Duration) {
        let took = self.took();
        self.meter.step_ended(StepEnded::Retried);
        self.not_ok(|| tracing::warn!(code = error.code, %error, ?took, ?delay, "it failed and is tried again"));
    }

    /// It failed for good.
    pub(super) fn failed(self, error: &TaskError) {
        let took = self.took();
        if self.undo {
            self.meter.step_ended(StepEnded::NotUndone);
            self.not_ok(|| tracing::error!(code = error.code, %error, ?took, "it could not be undone"));
        } else {
            self.meter.step_ended(StepEnded::Failed);
            self.not_ok(|| tracing::warn!(code = error.code, %error, ?took, "the step failed"));
        }
    }

    /// Whether it happened is not known.
    pub(super) fn in_doubt(self, error: &TaskError) {
        let took = self.took();
        self.not_ok(|| tracing::warn!(code = error.code, %error, ?took, "whether it happened is not known"));
    }

    /// What `verify` said of a step in doubt: it happened, it did not, or that it cannot tell.
    pub(super) fn verified(self, happened: Result<bool, &TaskError>) {
        let took = self.took();
        match happened {
            Ok(happened) => {
                if happened {
                    self.meter.step_ended(StepEnded::Completed);
                }
                self.span.in_scope(|| tracing::info!(happened, ?took, "verified"));
            }
            Err(error) => self.not_ok(|| tracing::warn!(%error, ?took, "verify could not tell")),
        }
    }

    fn not_ok(&self, log: impl FnOnce()) {
        self.span.record("otel.status_code", "ERROR");
        self.span.in_scope(log);
    }

    fn took(&self) -> Duration {
        let took = self.begun.elapsed();
        self.meter.step_tried(took);
        took
    }
}
