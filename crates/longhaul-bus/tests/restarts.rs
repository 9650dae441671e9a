//! A broker that is killed and comes back: nothing that it acknowledged is lost, order stays, and everyone connects again
//! by itself. A program of its own, because it takes the broker away from everyone else.

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Bed, PATIENCE, assert_in_order, next, numbered, publish, standing, subscription};
use longhaul_bus::Outgoing;
use tokio::sync::Mutex;

/// One broker is killed by one test at a time.
static TURNS: [Mutex<()>; 4] = [const { Mutex::const_new(()) }; 4];

mod brokers {
    macro_rules! on_every_broker {
        ($($place:literal $broker:ident $(#[$attribute:meta])?),* $(,)?) => {
            $(
                $(#[$attribute])?
                mod $broker {
                    use super::super::{TURNS, common::Bed};

                    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                    async fn what_was_acknowledged_is_there_after_a_kill() {
                        let _turn = TURNS[$place].lock().await;
                        if let Some(bed) = Bed::$broker().await {
                            super::super::what_was_acknowledged_is_there_after_a_kill(bed).await;
                        }
                    }

                    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                    async fn listeners_hear_again_after_a_restart() {
                        let _turn = TURNS[$place].lock().await;
                        if let Some(bed) = Bed::$broker().await {
                            super::super::listeners_hear_again_after_a_restart(bed).await;
                        }
                    }
                }
            )*
        };
    }
    on_every_broker! { 0 nats, 1 redis, 2 rabbitmq, 3 kafka #[cfg(feature = "kafka")] }
}

async fn what_was_acknowledged_is_there_after_a_kill(bed: Bed) {
    const KEYS: usize = 20;
    const EACH: usize = 50;
    let topic = bed.log();
    let what = subscription(topic.clone(), "all");
    let mut consumer = bed.bus.consume(&what).await.expect("a consumer");
    bed.remember_queues();
    let waves = Arc::new(AtomicUsize::new(0));
    let (bus, published) = (bed.another().await, Arc::clone(&waves));
    let publishing = tokio::spawn(async move {
        for turn in 0..EACH {
            let wave: Vec<Outgoing> = (0..KEYS).map(|key| numbered(&topic, &format!("k{key}"), turn)).collect();
            publish(&*bus, &wave).await;
            published.fetch_add(1, Ordering::SeqCst);
        }
    });
    let (mut taken, mut seen) = (Vec::new(), HashSet::new());
    let mut kills = 0;
    while seen.len() < KEYS * EACH {
        // Twice: while it is being written to, and when everything was.
        let due = [EACH / 5, EACH][kills.min(1)];
        if kills < 2 && waves.load(Ordering::SeqCst) >= due {
            if !bed.control("kill") {
                eprintln!("skipped: {} cannot be killed here (no script for it)", bed.name);
                publishing.abort();
                return;
            }
            assert!(bed.control("start"));
            kills += 1;
        }
        let delivery = next(&mut *consumer).await;
        seen.insert(delivery.message.body.clone());
        taken.push((standing(&delivery), delivery.message.clone()));
        // The broker may be gone just now: it is given again.
        if let Err(error) = delivery.ack().await {
            eprintln!("acknowledging: {error}");
        }
    }
    publishing.await.expect("all were published");
    assert!(kills >= 1, "it was never killed");
    // What is given again comes later, and stands where it stood.
    taken.sort_by_key(|(standing, _)| *standing);
    assert_in_order(taken.iter().map(|(_, message)| message), EACH);
}

async fn listeners_hear_again_after_a_restart(bed: Bed) {
    let channel = bed.channel();
    let mut listener = bed.bus.listen(&channel).await.expect("a listener");
    if !bed.control("stop") {
        eprintln!("skipped: {} cannot be stopped here (no script for it)", bed.name);
        return;
    }
    assert!(bed.control("start"));
    let heard = tokio::time::timeout(PATIENCE, async {
        loop {
            // Broadcasts may be lost while everyone connects again.
            if let Err(error) = bed.bus.broadcast(&channel, "look".into()).await {
                eprintln!("broadcasting: {error}");
            }
            match tokio::time::timeout(Duration::from_millis(500), listener.next()).await {
                Ok(Ok(heard)) => return heard,
                Ok(Err(error)) => eprintln!("listening: {error}"),
                Err(_) => {}
            }
        }
    });
    assert_eq!(heard.await.expect("it is heard again"), "look");
}
