//! Hints between processes: "there is something to do", and a model's text as it comes. They are broadcasts: lost ones cost
//! a moment, never correctness, because everyone who waits for one also looks by itself.

use std::sync::Arc;
use std::time::Duration;

use longhaul::Relay;
use tokio::task::JoinSet;

use crate::bus::{Bus, BusError, Listener};

/// The pause after an error.
const PAUSE: Duration = Duration::from_secs(1);

/// Carries the hints of a process to others and back.
///
/// ```
/// use std::sync::Arc;
///
/// use longhaul::Client;
/// use longhaul_bus::{Bus, Hints, MemoryBus};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let client = Client::open("memory:").await?;
/// let bus: Arc<dyn Bus> = Arc::new(MemoryBus::new());
/// let hints = Hints::start(client.relay(), bus, "longhaul.hints").await?;
/// // What happens here is heard at once by every process that does the same.
/// drop(hints);
/// # Ok(())
/// # }
/// ```
pub struct Hints;

impl Hints {
    /// Starts to carry them over a channel of the bus, which all processes on the same store share and no others.
    pub async fn start(relay: Relay, bus: Arc<dyn Bus>, channel: &str) -> Result<HintsHandle, BusError> {
        let listener = bus.listen(channel).await?;
        let mut tasks = JoinSet::new();
        tasks.spawn(hear(relay.clone(), listener));
        tasks.spawn(tell(relay, bus, channel.to_owned()));
        Ok(HintsHandle { _tasks: tasks })
    }
}

/// Hints are carried as long as this lives.
pub struct HintsHandle {
    _tasks: JoinSet<()>,
}

async fn tell(relay: Relay, bus: Arc<dyn Bus>, channel: String) {
    loop {
        let hints = relay.next().await;
        if let Err(error) = bus.broadcast(&channel, hints.into()).await {
            tracing::debug!(%error, "hints are not told to others");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

async fn hear(relay: Relay, mut listener: Box<dyn Listener>) {
    loop {
        match listener.next().await {
            Ok(hints) => relay.hear(&hints),
            Err(error) => {
                tracing::debug!(%error, "hints of others are not heard");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
