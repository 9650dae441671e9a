//! Text that breaks lesser stores: kept and given back as it was, on every store.

use serde_json::json;

use super::bed::{Bed, done, raw, secs, suspended, write};
use crate::error::TaskError;
use crate::record::{Decision, Record};
use crate::state::{Fact, StatePatch};
use crate::store::{Action, Claim, Control, Filter, NewCheckpoint, Outcome, Settings};
use crate::task::{MAX_INPUT_BYTES, NewTask, State};

const NASTY: &[&str] = &[
    "nul \0 inside",
    "\0",
    "emoji 🦀👩‍👩‍👧‍👦 and zalgo Z͑ͫ̓ͪ",
    "right to left \u{202e}abc and \u{feff}bom",
    "quotes ' \" ` \\ \\\\ \\u0000 $1 %s {} ; DROP TABLE tasks; --",
    "lines \r\n \u{2028} \u{1}\u{1f}\u{7f}",
    "\u{10ffff}\u{fffd}\u{fffe}",
    "",
];

async fn nasty_input_results_and_events_come_back_as_they_were(bed: Bed) {
    for &text in NASTY {
        let value = json!({"text": text, text: [text]});
        let lease = bed.running_as(NewTask::new("h", &value)).await;
        let stored = serde_json::to_string(&value).expect("it serialises");
        let written = write(&lease, 1)
            .record(done(text, &stored))
            .event(text)
            .outcome(Outcome::Completed { result: raw(&stored) });
        bed.commit(written).await.expect("written");
        let task = bed.task(lease.task).await;
        assert_eq!(task.input.get(), stored);
        assert_eq!(task.result.expect("kept").get(), stored);
        let events = bed.events(lease.task).await;
        assert_eq!((events[2].kind.as_str(), &events[2].data), (text, &json!({"of": text})));
        let records = bed.records(lease.task).await;
        assert!(
            matches!(&records[1], Record::Done { step, result, .. } if step == text && result.get() == stored)
        );
    }
}

async fn raw_json_keeps_its_spelling(bed: Bed) {
    for text in [
        r#""\u0000""#,
        r#"{"a":1,"a":2}"#,
        r#"{"\u0000":"\ud83e\udd80"}"#,
        "1.0e+2",
        "-0.0",
        "123456789012345678901234567890.5",
        "[ ]",
        "null",
        r#" {"b" : 1 } "#,
    ] {
        let id = bed.submit(NewTask::with_raw("h", raw(text))).await;
        assert_eq!(bed.task(id).await.input.get(), raw(text).get());
    }
}

async fn nasty_errors_reasons_names_and_states_come_back_as_they_were(bed: Bed) {
    for &text in NASTY {
        let lease = bed.running().await;
        let fact = Fact { key: text.into(), value: json!({ text: text }), source: text.into() };
        let patch =
            StatePatch { set_goal: Some(text.into()), add_facts: vec![fact.clone()], ..StatePatch::default() };
        bed.control(lease.task, Action::Patch { patch, version: None, under: None }).await.expect("patched");
        let (_, state) = bed.store.state(lease.task).await.expect("the store answers").expect("there");
        assert_eq!((state.goal.as_str(), &state.known_facts[0]), (text, &fact));

        let error = TaskError::fatal(text, text).detail(text, text).caused_by(TaskError::in_doubt(text, text));
        bed.end(&lease, Outcome::Failed { error: error.clone(), attempt: true }).await;
        assert_eq!(bed.task(lease.task).await.error, Some(error));

        let lease = bed.running().await;
        bed.end(&lease, suspended("in_doubt", text, None)).await;
        assert_eq!(bed.task(lease.task).await.waiting_for.expect("waits").id, text);
        let action = Action::Decide { step: text.into(), decision: Decision::Retry, reason: Some(text.into()) };
        let control = Control { tenant: "default".into(), task: lease.task, by: text.into(), action };
        bed.store.control(&[control]).await.expect("the store answers").remove(0).expect("decided");
        let cancel = Action::Cancel { undo: true, reason: Some(text.into()) };
        assert_eq!(bed.control(lease.task, cancel).await.expect("cancelled").state, State::Cancelled);
        assert!(bed.task(lease.task).await.error.expect("says why").message.ends_with(text));
    }
}

async fn nasty_checkpoints_and_progress_come_back_as_they_were(bed: Bed) {
    let lease = bed.running().await;
    for (&text, number) in NASTY.iter().zip(1..) {
        let data = json!({ text: text }).to_string();
        let progress = json!({"task_id": lease.task, "step": 1, "total_step": 0, "status": "thinking",
            "tool": text, "message": text, "time": "2026-01-01T00:00:00Z"});
        let checkpoint =
            NewCheckpoint { version: 1, iteration: number, data: data.clone(), max_count: 1, max_age: secs(60) };
        let written = write(&lease, number).event("progress").with(|commit| {
            commit.checkpoint = Some(checkpoint);
            commit.progress = Some(progress.to_string());
        });
        bed.commit(written).await.expect("written");
        assert_eq!(bed.store.checkpoints(lease.task).await.expect("the store answers")[0].data, data);
        let seen = bed.task(lease.task).await.progress.expect("kept");
        assert_eq!((seen.message.as_str(), seen.tool.as_deref()), (text, Some(text)));
    }
}

async fn nasty_keys_names_and_labels_are_exact(bed: Bed) {
    let keys = ["k", "K", "k ", "' OR 1=1 --", "%", "_", "\\", "é", "e\u{301}", "🦀", "$1", "\u{10ffff}"];
    for key in keys {
        let task = NewTask::new("h", &key).key(key).concurrency_key(key).tag("label", key);
        bed.submit(task).await;
    }
    for key in keys {
        let found = bed.list(Filter { tag: Some(("label".into(), key.into())), ..Filter::default() }).await;
        assert_eq!(found.len(), 1, "{key}");
        let again = NewTask::new("h", &key).key(key).concurrency_key(key).tag("label", key);
        assert_eq!(bed.try_submit(&again).await.expect("known").id, found[0]);
    }
    assert_eq!(bed.claim(100).await.len(), keys.len(), "no two share a concurrency key");
}

async fn nasty_queues_and_tenants_are_exact(bed: Bed) {
    let names = ["a", "A", "a'b", "a\"b", "a%", "a_", "a\\", "é", "e\u{301}", "🦀", "{a}", "a,b"];
    let settings = Settings {
        queues: names.iter().map(|&name| (name.to_owned(), Default::default())).collect(),
        tenant_max_running: names.iter().map(|&name| (name.to_owned(), 1)).collect(),
        ..Settings::default()
    };
    bed.configure(settings).await;
    for name in names {
        bed.submit(NewTask::new("h", &name).queue(name).tenant(name).tag("of", name)).await;
        bed.submit(NewTask::new("h", &name).queue(name).tenant(name)).await;
    }
    for name in names {
        assert_eq!(bed.queue(name).await.pending, 2, "{name}");
        let theirs = bed.store.list(name, &Filter::default()).await.expect("the store answers").tasks;
        assert!(theirs.len() == 2 && theirs.iter().all(|task| task.queue == name), "{name}");
        let leases = bed.claim_as(&Claim { queues: vec![name.to_owned()], ..bed.ask(10) }).await.leases;
        assert_eq!(leases.len(), 1, "{name}: one of the tenant may run");
    }
}

async fn questions_with_nul_in_them_find_nothing(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1).tag("a", "b")).await;
    let nul = || Some("a\0b".to_owned());
    for filter in [
        Filter { handler: nul(), ..Filter::default() },
        Filter { queue: nul(), ..Filter::default() },
        Filter { tag: Some(("a".into(), "b\0".into())), ..Filter::default() },
        Filter { tag: Some(("a\0".into(), "b".into())), ..Filter::default() },
    ] {
        assert!(bed.list(filter).await.is_empty());
    }
    assert!(bed.store.list("default\0", &Filter::default()).await.expect("the store answers").tasks.is_empty());
    assert!(bed.store.task("default\0", id).await.expect("the store answers").is_none());
    let ask = Claim { queues: vec!["default\0".into()], handlers: vec!["h\0".into()], ..bed.ask(1) };
    assert!(bed.claim_as(&ask).await.leases.is_empty());
}

async fn very_long_text_comes_back_whole(bed: Bed) {
    let long = format!("\"{}\"", "🦀é\\u0000x".repeat((MAX_INPUT_BYTES - 2) / 13));
    let lease = bed.running_as(NewTask::with_raw("h", raw(&long))).await;
    assert_eq!(bed.task(lease.task).await.input.get(), long);
    let step = "s".repeat(100_000);
    bed.commit(write(&lease, 1).record(done(&step, &long)).event("step.completed")).await.expect("written");
    let records = bed.records(lease.task).await;
    assert!(
        matches!(&records[1], Record::Done { step: name, result, .. } if *name == step && result.get() == long)
    );
    let name = "n".repeat(128);
    let key = "k".repeat(255);
    bed.store.register(&super::bed::worker(&[&name])).await.expect("registered");
    let task = NewTask::new(&name, &1).queue(&name).tenant(&name).key(&key).concurrency_key(&key).tag("t", &key);
    bed.submit(task).await;
    let ask = Claim { queues: vec![name.clone()], handlers: vec![name.clone()], ..bed.ask(1) };
    assert_eq!(bed.claim_as(&ask).await.leases.len(), 1);
}

on_every_store![
    nasty_input_results_and_events_come_back_as_they_were,
    raw_json_keeps_its_spelling,
    nasty_errors_reasons_names_and_states_come_back_as_they_were,
    nasty_checkpoints_and_progress_come_back_as_they_were,
    nasty_keys_names_and_labels_are_exact,
    nasty_queues_and_tenants_are_exact,
    questions_with_nul_in_them_find_nothing,
    very_long_text_comes_back_whole,
];
