//! What a broker gave and a lost connection swallowed comes before what is newer, where the broker can say what that was.

mod common;

use std::time::Duration;

use common::{Bed, PATIENCE, next, number, numbered, publish, subscription};
use longhaul_bus::Subscription;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// What stands between a consumer and its broker.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// Everything passes.
    Open,
    /// What the broker says with these bytes in it is swallowed.
    Without(&'static str),
    /// Every connection breaks.
    Cut,
}

/// A way to a server that can be cut.
struct Between {
    address: String,
    way: watch::Sender<Way>,
    task: JoinHandle<()>,
}

impl Drop for Between {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Between {
    async fn us_and(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address").to_string();
        let (way, seen) = watch::channel(Way::Open);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(pass(client, server.clone(), seen.clone()));
            }
        });
        Self { address, way, task }
    }
}

async fn pass(client: TcpStream, server: String, mut way: watch::Receiver<Way>) {
    let server = TcpStream::connect(server).await.expect("the server is there");
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let heard = way.clone();
    let back = async {
        let mut bytes = vec![0; 16 * 1024];
        while let Ok(count @ 1..) = from_server.read(&mut bytes).await {
            let has = |what: &str| bytes[..count].windows(what.len()).any(|some| some == what.as_bytes());
            let swallowed = matches!(*heard.borrow(), Way::Without(what) if has(what));
            if !swallowed && to_client.write_all(&bytes[..count]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        () = back => {}
        _ = way.wait_for(|way| *way == Way::Cut) => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_redis_gave_to_a_lost_connection_is_not_overtaken() {
    let Some(bed) = Bed::redis().await else { return };
    let (login, server) = bed.url.rsplit_once('@').expect("a user and a password");
    let between = Between::us_and(server.to_owned()).await;
    let bus = longhaul_bus::connect(&format!("{login}@{}", between.address)).await.expect("Redis answers");
    let topic = bed.log();
    // Longer than anything here is waited for: nothing comes by being idle.
    let what = Subscription { ack_wait: PATIENCE * 10, ..subscription(topic.clone(), "all") };
    let mut consumer = bus.consume(&what).await.expect("a consumer");
    publish(&*bed.bus, &[numbered(&topic, "a", 0), numbered(&topic, "a", 1)]).await;
    let being_worked_on = next(&mut *consumer).await;
    next(&mut *consumer).await.ack().await.expect("an acknowledgement");

    between.way.send_replace(Way::Without("a 2"));
    publish(&*bed.bus, &[numbered(&topic, "a", 2)]).await;
    let client = redis::Client::open(bed.url.as_str()).expect("a client");
    let mut direct = client.get_multiplexed_async_connection().await.expect("a connection");
    let given = async {
        loop {
            let mut pending = redis::cmd("XPENDING");
            pending.arg(&*topic.name).arg("all");
            let (count, ..): (u64, redis::Value, redis::Value, redis::Value) =
                pending.query_async(&mut direct).await.expect("an answer");
            if count == 2 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, given).await.expect("Redis gives it, and it does not arrive");
    between.way.send_replace(Way::Cut);
    publish(&*bed.bus, &[numbered(&topic, "a", 3)]).await;
    between.way.send_replace(Way::Open);

    // What is being worked on here did arrive; what was acknowledged is done.
    for expected in [2, 3] {
        let delivery = next(&mut *consumer).await;
        assert_eq!(number(&delivery.message), ("a".to_owned(), expected));
        delivery.ack().await.expect("an acknowledgement");
    }
    being_worked_on.ack().await.expect("an acknowledgement");
}
