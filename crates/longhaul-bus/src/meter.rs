//! What the bus counts. Labels have few values; nothing here has a task's id.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

type Counters = Family<Vec<(&'static str, &'static str)>, Counter>;

/// What a publisher counts.
#[derive(Clone, Default)]
pub(crate) struct PublisherMeter {
    events: Counters,
}

impl PublisherMeter {
    pub(crate) fn published(&self, count: usize) {
        self.events.get_or_create(&vec![("outcome", "published")]).inc_by(count as u64);
    }

    pub(crate) fn failed(&self, count: usize) {
        self.events.get_or_create(&vec![("outcome", "failed")]).inc_by(count as u64);
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Events that were sent to the bus, by what became of it; those that failed are sent again";
        registry.register("bus_events", help, self.events.clone());
    }
}

/// What became of a message that is a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakenIn {
    New,
    Known,
    Rejected,
    PutOff,
}

impl TakenIn {
    const NAMES: [&str; 4] = ["new", "known", "rejected", "put_off"];
}

/// What an intake counts.
#[derive(Clone, Default)]
pub(crate) struct IntakeMeter {
    messages: Counters,
}

impl IntakeMeter {
    fn counter(&self, what: TakenIn) -> Counter {
        self.messages.get_or_create_owned(&vec![("outcome", TakenIn::NAMES[what as usize])])
    }

    pub(crate) fn count(&self, what: TakenIn) {
        self.counter(what).inc();
    }

    pub(crate) fn read(&self, what: TakenIn) -> u64 {
        self.counter(what).get()
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Messages that came from the bus as tasks, by what became of it";
        registry.register("bus_tasks", help, self.messages.clone());
    }
}
