//! The saga manifest of `examples/sagas`, run by the real binary on both stores.

mod common;

use std::path::Path;

use common::Bed;
use longhaul::{NewTask, State};
use serde_json::json;

const STEPS: [&str; 4] = ["create_dns", "create_cert", "deploy_container", "monitoring"];

async fn succeeds_and_is_undone(bed: Bed) {
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/sagas");
    let worker = bed.manifest_worker(&manifests, 4, 15.0);
    for fail in [None, Some(0), Some(1), Some(2), Some(3)] {
        let world = bed.folder().join("world");
        // From the run before.
        let _ = std::fs::remove_dir_all(&world);
        let input = json!({"app": "shop", "broken": fail.map_or("", |index| STEPS[index])});
        let id = bed.client.submit(NewTask::new("deploy_app", &input)).await.expect("accepted").id;
        let task = bed.ended(id).await;
        let history = std::fs::read_to_string(world.join("history")).unwrap_or_default();
        let two_words = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
        let history: Vec<String> = history.lines().map(two_words).collect();
        let done = &STEPS[..fail.unwrap_or(STEPS.len())];
        let mut wanted: Vec<String> = done.iter().map(|step| format!("make {step}")).collect();
        if let Some(index) = fail {
            wanted.extend(done.iter().rev().map(|step| format!("remove {step}")));
            let error = task.error.expect("says why");
            assert_eq!((task.state, &error.details["step"]), (State::Failed, &json!(STEPS[index])));
        } else {
            assert_eq!(task.state, State::Completed);
        }
        assert_eq!(history, wanted);
    }
    drop(worker);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_by_manifest_succeeds_or_is_undone_on_sqlite() {
    succeeds_and_is_undone(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_by_manifest_succeeds_or_is_undone_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        succeeds_and_is_undone(bed).await;
    }
}
