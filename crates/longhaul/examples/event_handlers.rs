//! Handlers of events: one writes mail when a disk was cleaned, another counts what was completed. Each has
//! its own place in the events, and goes on where it was when it is started again.
//!
//! `cargo run -p longhaul --example event_handlers`

use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longhaul::{Client, NewTask, Run, SubscriberHandle, TaskError, Told, Worker};
use serde_json::json;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run().await
}

/// Tells what it did as an event of its own.
async fn clean(run: Run, host: String) -> Result<u64, TaskError> {
    let freed = run.step("clean", async || Ok::<_, TaskError>(host.len() as u64 * 100)).await?;
    run.publish("disk.cleaned", &json!({"host": host, "freed_mb": freed})).await?;
    Ok(freed)
}

type Sent = Arc<Mutex<Vec<String>>>;

/// Sends a mail for each disk. The mail server does not answer the first time: the handler is called
/// again, and neither the tasks nor the other handler notice.
async fn send_mail(client: &Client, sent: &Sent) -> Result<SubscriberHandle, longhaul::Error> {
    let (sent, first) = (Arc::clone(sent), Arc::new(Mutex::new(true)));
    let handler = move |told: Told| {
        let (sent, away) = (Arc::clone(&sent), std::mem::take(&mut *first.lock().expect("no panic")));
        async move {
            if away {
                return Err(TaskError::retryable("away", "the mail server does not answer"));
            }
            let (host, freed) = (&told.event.data["host"], &told.event.data["freed_mb"]);
            sent.lock().expect("no panic").push(format!("{host}: {freed} MB"));
            Ok(())
        }
    };
    let pause = Duration::from_millis(10);
    client.subscriber("mail").types(["disk.cleaned"])?.back_off(pause, pause).start(handler).await
}

/// Waits until a subscriber has handled this many events.
async fn handled(subscriber: &SubscriberHandle, count: u64) -> Result<(), Box<dyn Error>> {
    let wait = async {
        while subscriber.stats().handled < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    Ok(tokio::time::timeout(Duration::from_secs(10), wait).await?)
}

pub(crate) async fn run() -> Result<(), Box<dyn Error>> {
    let client = Client::open("memory:").await?;
    let worker = Worker::new(&client).handler("clean", clean).start().await?;
    let sent = Sent::default();

    let mail = send_mail(&client, &sent).await?;
    let count = client.subscriber("count").types(["task.completed"])?.start(async |_| Ok(())).await?;
    client.submit(NewTask::new("clean", &"web-1")).await?;
    handled(&mail, 1).await?;
    handled(&count, 1).await?;
    println!("mail was sent after {} failed calls", mail.stats().failed);

    // What happens while nobody handles it is not missed.
    mail.stop().await;
    let id = client.submit(NewTask::new("clean", &"web-2")).await?.id;
    client.wait(id, Duration::from_secs(10)).await?;
    handled(&count, 2).await?;
    for known in client.subscribers().await? {
        println!("'{}' is {} rows behind", known.name, known.rows_behind);
    }
    let mail = send_mail(&client, &sent).await?;
    while sent.lock().expect("no panic").len() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(*sent.lock().expect("no panic"), [r#""web-1": 500 MB"#, r#""web-2": 500 MB"#]);
    println!("sent: {}", sent.lock().expect("no panic").join(", "));

    mail.stop().await;
    count.stop().await;
    worker.stop().await;
    Ok(())
}
