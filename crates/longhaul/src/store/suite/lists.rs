//! Searches, children, tenants in lists; and the trace a task carries.

use serde_json::json;

use super::bed::{Bed, completed};
use crate::store::list::SEARCHED_PER_PAGE;
use crate::store::{Filter, QueueSettings};
use crate::task::{NewTask, State, TaskId};

fn search(q: &str) -> Filter {
    Filter { q: Some(q.to_owned()), ..Filter::default() }
}

async fn a_search_finds_text_in_inputs_in_either_case_and_nothing_else(bed: Bed) {
    let disk = bed.submit(NewTask::new("h", &"Check the DISK of web-1").tag("disk", "yes")).await;
    let app = bed.submit(NewTask::new("h", &json!({"app": "shop", "note": "100% _full_ \"now\" C:\\tmp"}))).await;
    bed.submit(NewTask::new("h", &"1000 fulls")).await;
    assert_eq!(bed.list(search("disk")).await, [disk]);
    assert_eq!(bed.list(search("the Disk of WEB")).await, [disk]);
    for (q, why) in [
        ("100%", "a percent sign is one"),
        ("_FULL_", "an underscore is one"),
        ("\"now\"", "quotes as they are read"),
        ("c:\\tmp", "so are backslashes"),
        ("shop", "values"),
        ("note", "and names"),
    ] {
        assert_eq!(bed.list(search(q)).await, [app], "{why}");
    }
    for absent in ["input", "1%0", "handler", "x\0y"] {
        assert!(bed.list(search(absent)).await.is_empty(), "{absent}");
    }
    assert_eq!(bed.list(search("")).await.len(), 3, "nothing to look for");
    let both = Filter { handler: Some("g".into()), ..search("disk") };
    assert!(bed.list(both).await.is_empty());
}

async fn a_search_goes_on_where_it_stopped_and_finds_everything(bed: Bed) {
    let gate = QueueSettings { max_pending: 100_000, ..QueueSettings::default() };
    bed.configure_queue("default", gate).await;
    let first = bed.submit(NewTask::new("h", &"needle")).await;
    for _ in 0..SEARCHED_PER_PAGE / 1_000 {
        bed.submit_many(1_000).await;
    }
    let newest = bed.submit(NewTask::new("h", &"needle")).await;
    let (mut found, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let page =
            bed.store.list("default", &Filter { after, ..search("needle") }).await.expect("the store answers");
        found.extend(page.tasks.iter().map(|task| task.id));
        pages += 1;
        let Some(next) = page.next else { break };
        after = Some(next);
    }
    assert_eq!(found, [newest, first]);
    assert_eq!(pages, 2, "a page looks at a bounded number of tasks");
}

async fn a_page_says_where_to_go_on_only_when_there_may_be_more(bed: Bed) {
    let ids = bed.submit_many(3).await;
    let page = |limit| Filter { limit, oldest_first: true, ..Filter::default() };
    let list = async |filter: &Filter| bed.store.list("default", filter).await.expect("the store answers");
    assert_eq!(list(&page(2)).await.next, Some(ids[1]));
    assert_eq!(list(&page(4)).await.next, None);
}

async fn a_list_is_filtered_by_parent(bed: Bed) {
    let parent = bed.running().await.task;
    let mut children: Vec<TaskId> = Vec::new();
    for n in 0..3 {
        let mut task = NewTask::new("h", &n);
        task.parent = Some(parent);
        children.push(bed.submit(task).await);
    }
    bed.submit_many(3).await;
    let of = |parent| Filter { parent: Some(parent), oldest_first: true, ..Filter::default() };
    assert_eq!(bed.list(of(parent)).await, children);
    assert_eq!(bed.list(Filter { after: Some(children[0]), ..of(parent) }).await, children[1..]);
    assert_eq!(bed.list(Filter { state: Some(State::Pending), ..of(parent) }).await, children);
    assert!(bed.list(Filter { state: Some(State::Failed), ..of(parent) }).await.is_empty());
    children.reverse();
    assert_eq!(bed.list(Filter { oldest_first: false, ..of(parent) }).await, children);
    assert!(bed.list(of(children[0])).await.is_empty());
}

async fn a_tenant_lists_its_own_tasks_in_every_state_and_order(bed: Bed) {
    let theirs = bed.submit(NewTask::new("h", &1).tenant("acme")).await;
    let ours = bed.submit(NewTask::new("h", &1)).await;
    let list = async |tenant: &str, filter: Filter| -> Vec<TaskId> {
        let page = bed.store.list(tenant, &filter).await.expect("the store answers");
        page.tasks.into_iter().map(|task| task.id).collect()
    };
    let of = |state| Filter { state: Some(state), ..Filter::default() };
    for (tenant, id) in [("acme", theirs), ("default", ours)] {
        assert_eq!(list(tenant, Filter::default()).await, [id]);
        assert_eq!(list(tenant, Filter { oldest_first: true, ..Filter::default() }).await, [id]);
        assert_eq!(list(tenant, of(State::Pending)).await, [id]);
        assert_eq!(list(tenant, search("1")).await, [id]);
        assert!(list(tenant, of(State::Running)).await.is_empty());
    }
    let leases = bed.claim(2).await;
    for (tenant, id) in [("acme", theirs), ("default", ours)] {
        assert_eq!(list(tenant, of(State::Running)).await, [id]);
    }
    for lease in &leases {
        bed.end(lease, completed()).await;
    }
    for (tenant, id) in [("acme", theirs), ("default", ours)] {
        assert_eq!(list(tenant, of(State::Completed)).await, [id]);
    }
}

async fn a_lease_carries_the_trace_its_task_was_submitted_with(bed: Bed) {
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    bed.submit(NewTask::new("h", &1).traceparent(TRACE)).await;
    let ask = bed.ask(1);
    for _ in 0..2 {
        let leases = bed.claim_as(&ask).await.leases;
        assert_eq!(leases[0].traceparent.as_deref(), Some(TRACE), "also when the claim is repeated");
    }
    assert_eq!(bed.running().await.traceparent, None);
    let narrow = bed.narrow();
    let lease = narrow.running_as(NewTask::new("h", &2).traceparent(TRACE)).await;
    assert_eq!(lease.traceparent.as_deref(), Some(TRACE));
}

on_every_store![
    a_search_finds_text_in_inputs_in_either_case_and_nothing_else,
    a_search_goes_on_where_it_stopped_and_finds_everything,
    a_page_says_where_to_go_on_only_when_there_may_be_more,
    a_list_is_filtered_by_parent,
    a_tenant_lists_its_own_tasks_in_every_state_and_order,
    a_lease_carries_the_trace_its_task_was_submitted_with,
];
