//! What is counted, for Prometheus.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::http::{Method, StatusCode};
use longhaul::Client;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::problem::Problem;

/// The server's own numbers. Those of queues and workers are read from the store when they are asked for.
pub struct Metrics {
    registry: Registry,
    /// What others in this process count.
    others: Mutex<Vec<Registry>>,
    requests: Family<Answered, Counter>,
    durations: Family<Route, Histogram, fn() -> Histogram>,
    submitted: Counter,
    sse: Gauge,
    ws: Gauge,
    connections: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    method: String,
    route: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    method: String,
    route: String,
}

/// One that counts in a gauge for as long as it lives.
pub(crate) struct Reader(Gauge);

impl Reader {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("longhaul");
        let durations: Family<Route, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.0005, 2.0, 16)));
        let metrics = Self {
            requests: Family::default(),
            durations,
            submitted: Counter::default(),
            sse: Gauge::default(),
            ws: Gauge::default(),
            connections: Gauge::default(),
            registry: Registry::default(),
            others: Mutex::default(),
        };
        registry.register("http_requests", "Requests answered", metrics.requests.clone());
        let seconds = Unit::Seconds;
        registry.register_with_unit(
            "http_request_duration",
            "Time to the answer's head",
            seconds,
            metrics.durations.clone(),
        );
        registry.register("http_submitted", "Tasks accepted over HTTP", metrics.submitted.clone());
        registry.register("sse_clients", "Readers of event streams", metrics.sse.clone());
        registry.register("websocket_clients", "Open WebSockets", metrics.ws.clone());
        registry.register("http_connections", "Open connections", metrics.connections.clone());
        Self { registry, ..metrics }
    }

    pub(crate) fn submitted(&self, count: u64) {
        self.submitted.inc_by(count);
    }

    /// Requests to paths that are no route count together: their number is the client's to choose.
    pub(crate) fn answered(&self, method: &Method, route: &str, status: StatusCode, took: Duration) {
        let method = match *method {
            Method::GET
            | Method::POST
            | Method::PUT
            | Method::PATCH
            | Method::DELETE
            | Method::HEAD
            | Method::OPTIONS => method.to_string(),
            _ => "other".to_owned(),
        };
        let route = route.to_owned();
        self.durations
            .get_or_create(&Route { method: method.clone(), route: route.clone() })
            .observe(took.as_secs_f64());
        self.requests.get_or_create(&Answered { method, route, status: status.as_u16() }).inc();
    }

    pub(crate) fn sse_reader(&self) -> Reader {
        Reader::new(&self.sse)
    }

    pub(crate) fn ws_reader(&self) -> Reader {
        Reader::new(&self.ws)
    }

    pub(crate) fn connection(&self) -> Reader {
        Reader::new(&self.connections)
    }

    /// Shows what `fill` registers too, from now on. Its names begin with `longhaul_`.
    pub fn show_too(&self, fill: impl FnOnce(&mut Registry)) {
        let mut registry = Registry::with_prefix("longhaul");
        fill(&mut registry);
        self.others.lock().unwrap_or_else(PoisonError::into_inner).push(registry);
    }

    /// Everything, with what the store says now.
    pub(crate) async fn text(&self, client: &Client) -> Result<String, Problem> {
        let broken = |_| Problem::new("internal", "the numbers cannot be written");
        let mut own = String::new();
        text::encode(&mut own, &self.registry).map_err(broken)?;
        let mut stored = Registry::with_prefix("longhaul");
        stored.register_collector(Box::new(Stored::read(client).await?));
        client.register_metrics(&mut stored);
        let mut rest = String::new();
        text::encode(&mut rest, &stored).map_err(broken)?;
        // Each ends with a mark; there is one at the end of all.
        let mut all = without_mark(&own).to_owned();
        for registry in &*self.others.lock().unwrap_or_else(PoisonError::into_inner) {
            let mut theirs = String::new();
            text::encode(&mut theirs, registry).map_err(broken)?;
            all.push_str(without_mark(&theirs));
        }
        all.push_str(&rest);
        Ok(all)
    }
}

fn without_mark(text: &str) -> &str {
    text.trim_end().strip_suffix("# EOF").unwrap_or(text)
}

/// What the store says of queues, workers, subscribers and the outbox.
#[derive(Debug)]
struct Stored {
    queues: Vec<longhaul::store::QueueInfo>,
    workers: Vec<longhaul::store::WorkerInfo>,
    outbox: longhaul::OutboxStats,
    subscribers: Vec<longhaul::store::SubscriberInfo>,
    now: i64,
}

impl Stored {
    async fn read(client: &Client) -> Result<Self, Problem> {
        let now = client.clock().now().as_microsecond();
        Ok(Self {
            queues: client.queues().await?,
            workers: client.workers().await?,
            outbox: client.outbox_stats().await?,
            subscribers: client.subscribers().await?,
            now,
        })
    }
}

impl Collector for Stored {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        type Number = fn(&Stored, &longhaul::store::QueueInfo) -> f64;
        let numbers: [(&str, &str, Number); 5] = [
            ("queue_pending", "Tasks that wait to be run", |_, queue| queue.pending as f64),
            ("queue_running", "Tasks that run", |_, queue| queue.running as f64),
            ("queue_max_pending", "Pending tasks it accepts", |_, queue| queue.max_pending as f64),
            ("queue_oldest_age_seconds", "Age of the ready task at the head of the line", |stored, queue| {
                queue.oldest.map_or(0.0, |at| (stored.now - at).max(0) as f64 / 1e6)
            }),
            ("queue_paused", "Whether it rests", |_, queue| f64::from(u8::from(queue.paused))),
        ];
        for (name, help, number) in numbers {
            let mut family =
                encoder.encode_descriptor(name, help, None, prometheus_client::metrics::MetricType::Gauge)?;
            for queue in &self.queues {
                let labels = [("queue", queue.name.as_str())];
                ConstGauge::new(number(self, queue)).encode(family.encode_family(&labels)?)?;
            }
        }
        type Behind = fn(&Stored, &longhaul::store::SubscriberInfo) -> f64;
        let numbers: [(&str, &str, Behind); 3] = [
            (
                "subscriber_rows_behind",
                "Rows of the log that it has not passed, at most 100,000",
                |_, subscriber| subscriber.rows_behind as f64,
            ),
            ("subscriber_oldest_age_seconds", "Age of the oldest of them", |stored, subscriber| {
                subscriber.oldest.map_or(0.0, |at| (stored.now - at.as_microsecond()).max(0) as f64 / 1e6)
            }),
            ("subscriber_held", "Whether some process runs it", |_, subscriber| {
                f64::from(u8::from(subscriber.held_by.is_some()))
            }),
        ];
        for (name, help, number) in numbers {
            let mut family =
                encoder.encode_descriptor(name, help, None, prometheus_client::metrics::MetricType::Gauge)?;
            for subscriber in &self.subscribers {
                let labels = [("subscriber", subscriber.name.as_str())];
                ConstGauge::new(number(self, subscriber)).encode(family.encode_family(&labels)?)?;
            }
        }
        let oldest_due =
            self.outbox.oldest_due.map_or(0.0, |at| (self.now - at.as_microsecond()).max(0) as f64 / 1e6);
        let slots: u32 = self.workers.iter().map(|worker| worker.slots).sum();
        for (name, help, value) in [
            ("workers", "Workers that live", self.workers.len() as f64),
            ("worker_slots", "Tasks that all workers together run at once", f64::from(slots)),
            ("outbox_due", "Tasks of which something is to be delivered", self.outbox.due as f64),
            ("outbox_dead", "Deliveries that were given up", self.outbox.dead as f64),
            ("outbox_oldest_age_seconds", "How long the oldest of them has been due", oldest_due),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}
