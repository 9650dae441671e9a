//! What is logged while a task runs carries the task, its run and its step. One test: it has the log of
//! the whole process.

mod common;

use std::io::Write;
use std::sync::{Arc, Mutex};

use common::{Bed, at_once};
use longhaul::{NewTask, Run, State, TaskError, Worker};
use serde_json::Value;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("not poisoned").write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn lines(&self) -> Vec<Value> {
        let text = String::from_utf8(self.0.lock().expect("not poisoned").clone()).expect("text");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }
}

/// A field of the innermost span that has it.
fn field<'a>(line: &'a Value, span: &str, name: &str) -> Option<&'a Value> {
    let spans = line["spans"].as_array()?;
    spans.iter().rev().find(|found| found["name"] == span).and_then(|span| span.get(name))
}

async fn deploy(run: Run, (): ()) -> Result<(), TaskError> {
    tracing::info!("in the handler");
    let undo = async |_: u32| {
        tracing::info!("in the undo");
        Ok::<_, TaskError>(())
    };
    // Beside each other, and one of them in a task of its own: each line has its own step.
    let other = run.clone();
    let spawned = tokio::spawn(async move {
        other
            .step("spawned", async || {
                tracing::info!("in spawned");
                Ok::<_, TaskError>(0)
            })
            .await
    });
    let one = run.step("one", async || {
        tokio::task::yield_now().await;
        tracing::info!("in one");
        Ok::<_, TaskError>(1)
    });
    let two = run.step("two", async || {
        tokio::task::yield_now().await;
        tracing::info!("in two");
        Ok::<_, TaskError>(2)
    });
    let (one, two) = tokio::join!(one.undo(undo), two);
    one?;
    two?;
    spawned.await.expect("no panic")?;
    let broken = async || Err::<(), _>(TaskError::retryable("broken", "as asked"));
    run.step("broken", broken).retry(at_once(2)).await
}

#[tokio::test]
async fn every_line_of_a_run_carries_its_task_run_and_step() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .json()
        .with_max_level(tracing::Level::DEBUG)
        .with_writer(move || writer.clone())
        .init();
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client).handler("deploy", deploy).start().await.expect("a worker");
    let id = bed.client.submit(NewTask::new("deploy", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Failed);
    worker.stop().await;

    let lines = log.lines();
    let said = |message: &str| -> Vec<&Value> {
        lines.iter().filter(|line| line["fields"]["message"] == message).collect()
    };
    let id = Value::String(id.to_string());
    let steps = [
        ("in the handler", None),
        ("in one", Some("one")),
        ("in two", Some("two")),
        ("in spawned", Some("spawned")),
        ("in the undo", Some("undo one")),
    ];
    for (message, step) in steps {
        let found = said(message);
        assert_eq!(found.len(), 1, "{message}");
        assert_eq!(field(found[0], "run", "task"), Some(&id), "{message}");
        assert_eq!(field(found[0], "run", "run"), Some(&1.into()), "{message}");
        assert_eq!(field(found[0], "run", "handler"), Some(&"deploy".into()), "{message}");
        assert_eq!(field(found[0], "step", "step").and_then(Value::as_str), step, "{message}");
    }
    let steps_of = |message: &str| {
        let mut steps: Vec<&str> = said(message)
            .iter()
            .map(|line| field(line, "step", "step").and_then(Value::as_str).expect("in a step"))
            .collect();
        steps.sort_unstable();
        steps
    };
    assert_eq!(steps_of("the step starts"), ["broken", "broken", "one", "spawned", "two"]);
    assert_eq!(steps_of("the step is completed"), ["one", "spawned", "two"]);
    assert_eq!(steps_of("it failed and is tried again"), ["broken"]);
    assert_eq!(steps_of("the step failed"), ["broken"]);
    assert_eq!((steps_of("the undo starts"), steps_of("undone")), (vec!["undo one"], vec!["undo one"]));
    let over = said("the run is over");
    assert_eq!(over.len(), 1);
    assert_eq!((&over[0]["fields"]["outcome"], &over[0]["level"]), (&"failed".into(), &"WARN".into()));
}
