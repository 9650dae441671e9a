//! An engine beside the bus.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use longhaul::{Client, Filter, Run, Task, TaskError, Worker, WorkerHandle};
use longhaul_bus::{Delivery, Message, Outgoing, To, Topic};
use serde_json::{Value, json};

use super::{Standing, standing};

/// A store in a folder that is removed with this value.
pub struct Store {
    pub client: Client,
    pub url: String,
    _folder: tempfile::TempDir,
}

pub async fn store() -> Store {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let url = format!("sqlite:{}", folder.path().join("test.db").display());
    Store { client: Client::open(&url).await.expect("a store in a file"), url, _folder: folder }
}

/// A worker with the handler `count`: as many steps as its input says, one event of its own, the number as its result.
pub async fn worker(client: &Client) -> WorkerHandle {
    let count = async |run: Run, steps: u64| {
        for step in 0..steps {
            run.step(format!("step {step}"), async || Ok::<_, TaskError>(step)).await?;
        }
        run.publish("counted.all", &json!({ "steps": steps })).await?;
        Ok::<_, TaskError>(steps)
    };
    let worker = Worker::new(client).handler("count", count);
    worker.start().await.expect("a worker starts")
}

/// A message that asks for a task.
pub fn asked(topic: &Topic, id: &str, body: &Value) -> Outgoing {
    let message = Message { id: Some(id.to_owned()), body: body.to_string().into(), ..Message::default() };
    Outgoing { to: To::Topic { topic: topic.clone(), subject: String::new() }, message }
}

/// All tasks of a client's tenant.
pub async fn all_tasks(client: &Client) -> Vec<Task> {
    let (mut tasks, mut after) = (Vec::new(), None);
    loop {
        let filter = Filter { limit: 1_000, after, ..Filter::default() };
        let page = client.page(&filter).await.expect("a page of tasks");
        tasks.extend(page.tasks);
        after = page.next;
        if after.is_none() {
            return tasks;
        }
    }
}

/// Waits until `holds` says so; looks again and again, because what it looks at tells nobody.
pub async fn eventually(what: &str, patience: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(patience, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    assert!(waited.await.is_ok(), "not within {patience:?}: {what}");
}

/// A structured CloudEvent.
pub fn cloud_event(message: &Message) -> Value {
    assert_eq!(message.content_type.as_deref(), Some("application/cloudevents+json"));
    serde_json::from_slice(&message.body).expect("JSON")
}

/// An event that was heard.
pub struct One {
    pub event: Value,
    /// Where it stands, the first place if it was published again; where brokers do not say, when it first came.
    standing: Standing,
}

/// Events of tasks as they stand at the broker. One that is given again may come late, behind others of its task: so
/// order is judged by where they stand. What comes again must be the same.
#[derive(Default)]
pub struct Heard {
    pub by_task: HashMap<String, BTreeMap<u64, One>>,
    pub again: usize,
    /// How many came behind a later one of their task.
    pub late: usize,
    came: u64,
}

impl Heard {
    pub fn hear(&mut self, delivery: &Delivery) {
        let event = cloud_event(&delivery.message);
        assert_eq!(event["id"], json!(delivery.message.id), "the id of the message is the event's");
        let task = event["subject"].as_str().expect("a task").to_owned();
        let sequence = event["sequence"].as_str().and_then(|sequence| sequence.parse().ok()).expect("a number");
        assert_eq!(event["id"], format!("{task}/{sequence}"));
        self.came += 1;
        let standing = standing(delivery).unwrap_or((0, self.came, 0));
        let heard = self.by_task.entry(task).or_default();
        match heard.get_mut(&sequence) {
            Some(other) => {
                assert_eq!(other.event, event, "what comes again is the same");
                other.standing = other.standing.min(standing);
                self.again += 1;
            }
            None => {
                self.late += usize::from(heard.last_key_value().is_some_and(|(&last, _)| last > sequence));
                heard.insert(sequence, One { event, standing });
            }
        }
    }

    pub fn count(&self) -> usize {
        self.by_task.values().map(BTreeMap::len).sum()
    }

    /// Every event of these tasks was heard, and each stands behind the one before it.
    pub fn assert_complete(&self, tasks: &[Task]) {
        for task in tasks {
            let heard = self.by_task.get(&task.id.to_string());
            let numbers: Vec<u64> = heard.into_iter().flat_map(BTreeMap::keys).copied().collect();
            assert_eq!(numbers, (1..=task.last_seq).collect::<Vec<_>>(), "the events of {}", task.id);
            let standing: Vec<Standing> = heard.into_iter().flatten().map(|(_, one)| one.standing).collect();
            let one_partition = standing.iter().all(|(partition, ..)| *partition == standing[0].0);
            assert!(
                one_partition && standing.is_sorted_by(|one, next| one < next),
                "the events of {} stand at {standing:?}",
                task.id
            );
        }
    }
}
