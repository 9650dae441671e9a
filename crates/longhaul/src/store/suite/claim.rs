//! Claiming: in order, once, and only what one has.

use std::collections::HashSet;

use super::bed::{Bed, LEASE, completed, retry, secs, write};
use crate::record::Record;
use crate::store::{Claim, Outcome, QueueSettings};
use crate::task::{NewTask, State, TaskId};

async fn a_lease_carries_what_a_run_needs(bed: Bed) {
    let task =
        NewTask::new("g", &"in").tenant("acme").queue("q").max_attempts(4).timeout(secs(60)).tag("app", "shop");
    let id = bed.submit(task).await;
    let lease = bed.claim_one().await;
    assert_eq!(
        (lease.task, lease.tenant.as_str(), lease.handler.as_str(), lease.queue.as_str()),
        (id, "acme", "g", "q")
    );
    assert_eq!((lease.attempts, lease.max_attempts, lease.crashes), (0, 4, 0));
    assert_eq!(lease.tags, [("app".to_owned(), "shop".to_owned())].into());
    let task = bed.store.task("acme", id).await.expect("the store answers").expect("there");
    assert_eq!(lease.deadline, task.deadline.map(|at| at.as_microsecond()));
    assert_eq!((task.state, task.fence, task.last_seq), (State::Running, lease.fence, lease.last_seq));
    let events = bed.events(id).await;
    assert_eq!(
        events.iter().map(|event| event.kind.as_str()).collect::<Vec<_>>(),
        ["task.submitted", "task.started"]
    );
    assert_eq!(events[1].run, lease.fence);
    let first = lease.log.first().expect("the log comes with the lease");
    let records = crate::record::records_of(first).expect("readable");
    assert!(matches!(&records[0], Record::Input(input) if input.get() == r#""in""#));
}

async fn a_lease_says_since_when_its_task_stood_in_line(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    let created = bed.task(id).await.created_at.as_microsecond();
    bed.advance(10);
    let lease = bed.claim_one().await;
    assert_eq!(lease.in_line_since, Some(created));
    bed.end(&lease, retry(20)).await;
    assert_eq!(bed.pass(30).await.due, 1);
    let its_time_came = bed.task(id).await.updated_at.as_microsecond();
    bed.advance(10);
    assert_eq!(bed.claim_one().await.in_line_since, Some(its_time_came));
    assert!(its_time_came >= created + 40_000_000);
}

async fn a_short_log_comes_whole_with_the_lease_and_of_a_long_one_the_first_row(bed: Bed) {
    let lease = bed.running().await;
    bed.commit(write(&lease, 1).step("one")).await.expect("written");
    bed.commit(write(&lease, 2).step("two").outcome(Outcome::Released)).await.expect("written");
    let lease = bed.claim_one().await;
    let steps: Vec<Record> =
        lease.log.iter().flat_map(|row| crate::record::records_of(row).expect("readable")).collect();
    assert_eq!(steps.len(), 3, "input and two steps");
    for number in 1..=70 {
        bed.commit(write(&lease, number).step(&format!("s{number}"))).await.expect("written");
    }
    bed.commit(write(&lease, 71).outcome(Outcome::Released)).await.expect("written");
    let lease = bed.claim_one().await;
    assert_eq!(lease.log.iter().map(|row| row.seq).collect::<Vec<_>>(), [1]);
    assert_eq!(bed.log(lease.task).await.len(), 1 + 1 + 2 + 1 + 71 + 1);
}

async fn tasks_of_equal_priority_are_claimed_in_the_order_of_their_creation(bed: Bed) {
    let mut created = bed.submit_many(20).await;
    for n in 0..10 {
        let handler = if n % 2 == 0 { "h" } else { "g" };
        let queue = ["default", "q", "r"][n % 3];
        created.push(bed.submit(NewTask::new(handler, &n).queue(queue)).await);
    }
    created.extend(bed.submit_many(20).await);
    let mut claimed = bed.claim_ids(7).await;
    claimed.extend(bed.claim_ids(1).await);
    claimed.extend(bed.claim_ids(100).await);
    assert_eq!(claimed, created);
}

async fn a_hotfix_passes_everything_that_waits(bed: Bed) {
    let idle = bed.submit(NewTask::new("h", &1).priority(0)).await;
    let mut routine = bed.submit_many(100).await;
    let hotfix = bed.submit(NewTask::new("h", &2).priority(9)).await;
    let elsewhere = bed.submit(NewTask::new("g", &3).queue("q").priority(9)).await;
    assert_eq!(bed.claim_ids(1).await, [hotfix]);
    assert_eq!(bed.claim_ids(1).await, [elsewhere]);
    routine.push(idle);
    assert_eq!(bed.claim_ids(200).await, routine);
}

async fn waiting_long_enough_outweighs_priority(bed: Bed) {
    bed.configure_queue("q", QueueSettings { ageing: secs(60), ..QueueSettings::default() }).await;
    let oldest = bed.submit(NewTask::new("h", &1).queue("q")).await;
    bed.advance(180);
    let old = bed.submit(NewTask::new("h", &2).queue("q")).await;
    bed.advance(120);
    let urgent = bed.submit(NewTask::new("h", &3).queue("q").priority(9)).await; // worth 240 s more than 5
    assert_eq!(bed.claim_ids(5).await, [oldest, urgent, old]);
}

async fn a_worker_gets_only_what_it_has(bed: Bed) {
    let mine = bed.submit(NewTask::new("h", &1).queue("q")).await;
    bed.submit(NewTask::new("g", &2).queue("q")).await;
    bed.submit(NewTask::new("h", &3).queue("r")).await;
    let narrow = Claim { handlers: vec!["h".into(), "other".into()], queues: vec!["q".into()], ..bed.ask(10) };
    let leases = bed.claim_as(&narrow).await.leases;
    assert_eq!(leases.iter().map(|lease| lease.task).collect::<Vec<_>>(), [mine]);
    let nothing = Claim { handlers: vec![], ..bed.ask(10) };
    assert!(bed.claim_as(&nothing).await.leases.is_empty());
    let nowhere = Claim { queues: vec![], ..bed.ask(10) };
    assert!(bed.claim_as(&nowhere).await.leases.is_empty());
    assert_eq!(bed.claim(10).await.len(), 2);
}

async fn a_handler_or_queue_named_twice_gives_each_task_once(bed: Bed) {
    bed.submit_many(4).await;
    let twice = ["h", "h"].map(String::from).to_vec();
    let ask = Claim { handlers: twice, queues: ["default", "default"].map(String::from).to_vec(), ..bed.ask(10) };
    let ids: HashSet<TaskId> = bed.claim_as(&ask).await.leases.into_iter().map(|lease| lease.task).collect();
    assert_eq!(ids.len(), 4);
}

async fn a_claim_takes_no_more_than_it_asks_for(bed: Bed) {
    assert!(bed.claim(5).await.is_empty(), "an empty queue gives nothing");
    bed.submit_many(5).await;
    assert!(bed.claim(0).await.is_empty());
    assert_eq!(bed.claim(3).await.len(), 3);
    assert_eq!(bed.claim(3).await.len(), 2);
    assert!(bed.claim(3).await.is_empty());
}

async fn concurrent_claimers_never_get_the_same_task_and_leave_none(bed: Bed) {
    bed.submit_many(300).await;
    let other = bed.another_process().await;
    let mut claimers = Vec::new();
    for n in 0..8 {
        let claimer = if n % 2 == 0 { bed.another_worker().await } else { other.another_worker().await };
        claimers.push(tokio::spawn(async move {
            let mut mine = Vec::new();
            loop {
                let ids = claimer.claim_ids(7).await;
                // Rows that others are just taking may be passed over, so ask until all have run.
                if ids.is_empty() && claimer.queue("default").await.pending == 0 {
                    return mine;
                }
                mine.extend(ids);
            }
        }));
    }
    let mut claimed = Vec::new();
    for claimer in claimers {
        claimed.extend(claimer.await.expect("no panic"));
    }
    let distinct: HashSet<TaskId> = claimed.iter().copied().collect();
    assert_eq!((claimed.len(), distinct.len()), (300, 300));
}

async fn fences_only_grow(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    let mut last = 0;
    for round in 0..6 {
        let lease = bed.claim_one().await;
        assert!(lease.fence > last, "round {round}: {} is not above {last}", lease.fence);
        last = lease.fence;
        match round % 3 {
            0 => bed.end(&lease, Outcome::Released).await,
            1 => bed.end(&lease, retry(0)).await,
            _ => {
                bed.commit(write(&lease, 1).step(&format!("s{round}"))).await.expect("written");
                bed.lose(&lease).await;
            }
        }
        assert!(bed.task(id).await.fence >= last);
    }
}

async fn a_repeated_claim_gives_the_same_leases(bed: Bed) {
    bed.submit_many(5).await;
    let ask = bed.ask(3);
    let first = bed.claim_as(&ask).await.leases;
    let again = bed.claim_as(&ask).await.leases;
    assert_eq!((first.len(), again.len()), (3, 3));
    for (first, again) in first.iter().zip(&again) {
        assert_eq!((first.task, first.fence, first.last_seq), (again.task, again.fence, again.last_seq));
        assert_eq!(first.log[0].records, again.log[0].records, "with the input");
    }
    for lease in &first {
        assert_eq!(bed.kinds(lease.task).await, ["task.submitted", "task.started"]);
    }
    assert_eq!(bed.queue("default").await.pending, 2);
    assert_eq!(bed.claim(5).await.len(), 2, "the next number takes what is left");
}

async fn a_repeated_claim_does_not_give_back_what_has_ended_since(bed: Bed) {
    bed.submit_many(2).await;
    let ask = bed.ask(2);
    let leases = bed.claim_as(&ask).await.leases;
    bed.end(&leases[0], completed()).await;
    let again = bed.claim_as(&ask).await.leases;
    assert!(again.iter().all(|lease| lease.task == leases[1].task), "only what it still holds: {again:?}");
}

async fn the_same_claim_number_of_another_worker_is_another_claim(bed: Bed) {
    bed.submit_many(2).await;
    let other = bed.another_worker().await;
    let one = bed.claim_as(&Claim { number: 1, ..bed.ask(1) }).await.leases;
    let two = other.claim_as(&Claim { number: 1, ..other.ask(1) }).await.leases;
    assert_eq!((one.len(), two.len()), (1, 1));
    assert_ne!(one[0].task, two[0].task);
}

async fn a_task_past_its_deadline_is_not_leased(bed: Bed) {
    let late = bed.submit(NewTask::new("h", &1).timeout(secs(10))).await;
    let fine = bed.submit(NewTask::new("h", &2).timeout(secs(100))).await;
    bed.advance(11);
    assert_eq!(bed.claim_ids(5).await, [fine], "even before a sweep has ended the other");
    bed.sweep().await;
    assert_eq!(bed.state(late).await, State::Failed);
}

async fn a_suspect_is_leased_only_to_a_worker_that_runs_nothing_else_and_then_alone(bed: Bed) {
    let suspect = bed.submit(NewTask::new("h", &1)).await;
    for _ in 0..2 {
        let lease = bed.claim_one().await;
        bed.lose(&lease).await;
    }
    assert_eq!(bed.task(suspect).await.crashes, 2);
    let others = bed.submit_many(2).await;
    let claimed = bed.claim_as(&bed.ask(1)).await;
    assert_eq!(claimed.leases.iter().map(|lease| lease.task).collect::<Vec<_>>(), [others[0]]);
    assert!(claimed.suspect_waits);
    let leases = bed.claim_idle(5).await;
    assert_eq!(leases.iter().map(|lease| (lease.task, lease.crashes)).collect::<Vec<_>>(), [(suspect, 2)]);
    let claimed = bed.claim_as(&bed.ask(5)).await;
    assert!(!claimed.suspect_waits, "none is left");
    assert_eq!(claimed.leases.len(), 1);
}

async fn many_suspects_in_front_do_not_block_what_comes_after_them(bed: Bed) {
    let suspects = bed.submit_many(60).await;
    for _ in 0..2 {
        assert_eq!(bed.claim(100).await.len(), 60);
        bed.pass(LEASE.as_secs() + 1).await;
    }
    let fine = bed.submit(NewTask::new("h", &1)).await;
    let claimed = bed.claim_as(&bed.ask(1)).await;
    assert_eq!(claimed.leases.iter().map(|lease| lease.task).collect::<Vec<_>>(), [fine]);
    assert!(claimed.suspect_waits);
    assert_eq!(bed.claim_idle(10).await.iter().map(|lease| lease.task).collect::<Vec<_>>(), suspects[..1]);
}

// A worker of one handler and one queue is the common case, and has a statement of its own on PostgreSQL.

async fn with_one_handler_a_hotfix_passes_everything_that_waits(bed: Bed) {
    let bed = bed.narrow();
    let idle = bed.submit(NewTask::new("h", &1).priority(0)).await;
    let mut routine = bed.submit_many(30).await;
    let hotfix = bed.submit(NewTask::new("h", &2).priority(9)).await;
    bed.submit(NewTask::new("g", &3).priority(9)).await;
    bed.submit(NewTask::new("h", &4).queue("q").priority(9)).await;
    assert_eq!(bed.claim_ids(1).await, [hotfix]);
    routine.push(idle);
    assert_eq!(bed.claim_ids(200).await, routine, "and nothing of other handlers or queues is taken");
}

async fn with_one_handler_concurrent_claimers_never_get_the_same_task_and_leave_none(bed: Bed) {
    concurrent_claimers_never_get_the_same_task_and_leave_none(bed.narrow()).await;
}

async fn with_one_handler_a_task_past_its_deadline_is_not_leased(bed: Bed) {
    a_task_past_its_deadline_is_not_leased(bed.narrow()).await;
}

async fn with_one_handler_a_suspect_is_leased_only_to_a_worker_that_runs_nothing_else_and_then_alone(bed: Bed) {
    a_suspect_is_leased_only_to_a_worker_that_runs_nothing_else_and_then_alone(bed.narrow()).await;
}

async fn with_one_handler_many_suspects_in_front_do_not_block_what_comes_after_them(bed: Bed) {
    many_suspects_in_front_do_not_block_what_comes_after_them(bed.narrow()).await;
}

on_every_store![
    a_lease_carries_what_a_run_needs,
    a_lease_says_since_when_its_task_stood_in_line,
    a_short_log_comes_whole_with_the_lease_and_of_a_long_one_the_first_row,
    tasks_of_equal_priority_are_claimed_in_the_order_of_their_creation,
    a_hotfix_passes_everything_that_waits,
    waiting_long_enough_outweighs_priority,
    a_worker_gets_only_what_it_has,
    a_handler_or_queue_named_twice_gives_each_task_once,
    a_claim_takes_no_more_than_it_asks_for,
    concurrent_claimers_never_get_the_same_task_and_leave_none,
    fences_only_grow,
    a_repeated_claim_gives_the_same_leases,
    a_repeated_claim_does_not_give_back_what_has_ended_since,
    the_same_claim_number_of_another_worker_is_another_claim,
    a_task_past_its_deadline_is_not_leased,
    a_suspect_is_leased_only_to_a_worker_that_runs_nothing_else_and_then_alone,
    many_suspects_in_front_do_not_block_what_comes_after_them,
    with_one_handler_a_hotfix_passes_everything_that_waits,
    with_one_handler_concurrent_claimers_never_get_the_same_task_and_leave_none,
    with_one_handler_a_task_past_its_deadline_is_not_leased,
    with_one_handler_a_suspect_is_leased_only_to_a_worker_that_runs_nothing_else_and_then_alone,
    with_one_handler_many_suspects_in_front_do_not_block_what_comes_after_them,
];
