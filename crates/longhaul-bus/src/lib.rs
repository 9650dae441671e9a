//! The bus of Longhaul: the broker that a company already has. Events leave through it, tasks arrive through it,
//! results go back through it, and processes tell each other through it when there is something to do.
//!
//! [`connect`] gives a [`Bus`] for a URL. What is built on it sees no broker. Beside it, [`locks`] has the lock services.

mod address;
pub mod bus;
mod cloud_event;
mod held;
mod hints;
mod intake;
#[cfg(feature = "kafka")]
mod kafka;
pub mod locks;
pub mod memory;
mod meter;
mod nats;
mod opening;
mod outage;
mod publisher;
mod rabbitmq;
mod redis;
mod replies;
mod tls;

use std::sync::Arc;

pub use bus::{
    Bus, BusError, Consumer, Delivery, Kind, Listener, Message, NotPublished, Outgoing, Subscription, To, Topic,
};
pub use cloud_event::Mode;
pub use hints::{Hints, HintsHandle};
pub use intake::{Intake, IntakeCounts, IntakeHandle, IntakeSettings};
pub use memory::MemoryBus;
pub use publisher::{Publisher, PublisherHandle, PublisherSettings};
pub use replies::{BusReplies, ReplyAddresses};

/// Connects to the broker that the URL names: `nats://` or `tls://` (NATS), `redis://` or `rediss://`, `amqp://` or `amqps://`
/// (RabbitMQ), `kafka://` or `kafka+tls://` (with the feature `kafka`), `memory:` (within this process).
///
/// `SCHEME://USER:PASSWORD@HOST:PORT?NAME=VALUE`; `docs/bus.md` has the parameters of each.
pub async fn connect(url: &str) -> Result<Arc<dyn Bus>, BusError> {
    if url == "memory:" {
        return Ok(Arc::new(MemoryBus::new()));
    }
    match url.split_once("://").map(|(scheme, _)| scheme) {
        Some("nats" | "tls") => Ok(Arc::new(nats::Nats::connect(url).await?)),
        Some("redis" | "rediss") => Ok(Arc::new(redis::Redis::connect(url).await?)),
        Some("amqp" | "amqps") => Ok(Arc::new(rabbitmq::RabbitMq::connect(url).await?)),
        #[cfg(feature = "kafka")]
        Some("kafka" | "kafka+tls") => Ok(Arc::new(kafka::Kafka::connect(url).await?)),
        #[cfg(not(feature = "kafka"))]
        Some("kafka" | "kafka+tls") => {
            let why = "this program was built without Kafka; build it with the feature 'kafka'";
            Err(BusError::Invalid(why.to_owned()))
        }
        _ => Err(BusError::Invalid(
            "the URL of the bus must begin with nats://, tls://, redis://, rediss://, amqp://, amqps://, kafka://, \
             kafka+tls:// or be memory:"
                .to_owned(),
        )),
    }
}
