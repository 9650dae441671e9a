//! PostgreSQL while another transaction is in the way: what is passed by, what is waited for, and
//! what is seen afterwards. Each test is that other transaction itself, so nothing depends on luck.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls};

use super::bed::{Bed, completed};
use crate::store::{Claim, QueueSettings};
use crate::task::{NewTask, TaskId};

/// Far longer than anything here takes when it is not blocked.
const PATIENCE: Duration = Duration::from_secs(30);

/// A transaction of somebody else's, open until it is ended or dropped.
struct Other {
    client: Client,
    pid: i32,
}

impl Other {
    async fn begin(bed: &Bed) -> Self {
        let (client, connection) = tokio_postgres::connect(&bed.url, NoTls).await.expect("the server answers");
        tokio::spawn(connection);
        client.batch_execute("BEGIN").await.expect("begun");
        let pid = client.query_one("SELECT pg_backend_pid()", &[]).await.expect("asked").get(0);
        Self { client, pid }
    }

    async fn execute(&self, sql: &str) {
        self.client.batch_execute(sql).await.expect("nobody is in this transaction's way");
    }

    async fn end(self, how: &str) {
        self.execute(how).await;
    }

    /// Returns once somebody waits for this transaction; `work` is who should.
    async fn is_waited_for<T>(&self, work: &JoinHandle<T>) {
        let wait = async {
            loop {
                let waiting =
                    "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))";
                let waiting: bool = self.client.query_one(waiting, &[&self.pid]).await.expect("asked").get(0);
                if waiting {
                    return;
                }
                assert!(!work.is_finished(), "it did not wait for the other transaction");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("it waits");
    }
}

async fn a_task_that_someone_else_has_locked_is_passed_by(bed: Bed) {
    for bed in [bed.clone().narrow(), bed] {
        let tasks = bed.submit_many(3).await;
        let other = Other::begin(&bed).await;
        other.execute(&format!("SELECT 1 FROM tasks WHERE id = '{}' FOR UPDATE", tasks[0])).await;
        let claimed = tokio::time::timeout(PATIENCE, bed.claim_ids(10)).await.expect("waits for nobody");
        assert_eq!(claimed, tasks[1..]);
        other.end("COMMIT").await;
        assert_eq!(bed.claim_ids(10).await, tasks[..1]);
    }
}

async fn a_slot_that_is_being_taken_is_not_taken_again(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_running: Some(1), ..QueueSettings::default() }).await;
    let task = bed.submit(NewTask::new("h", &1).queue("q")).await;
    let other = Other::begin(&bed).await;
    other.execute("UPDATE limits SET running = running + 1 WHERE name = 'queue/q'").await;
    let claim = tokio::spawn({
        let bed = bed.clone();
        async move { bed.claim_ids(10).await }
    });
    other.is_waited_for(&claim).await;
    other.end("COMMIT").await;
    assert!(claim.await.expect("no panic").is_empty(), "the only slot was taken, not by {task}");
}

async fn what_was_held_back_at_the_moment_a_slot_got_free_goes_at_once(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_running: Some(1), ..QueueSettings::default() }).await;
    let lease = bed.running_as(NewTask::new("h", &1).queue("q")).await;
    let held_back = bed.submit(NewTask::new("h", &2).queue("q")).await;
    // A claim that found the slot taken.
    let other = Other::begin(&bed).await;
    other.execute("SELECT 1 FROM limits WHERE name = 'queue/q' FOR UPDATE").await;
    let park = format!("UPDATE tasks SET ready = false, parked = 'queue/q' WHERE id = '{held_back}'");
    other.execute(&park).await;
    let end = tokio::spawn({
        let bed = bed.clone();
        async move { bed.end(&lease, completed()).await }
    });
    other.is_waited_for(&end).await;
    other.end("COMMIT").await;
    end.await.expect("no panic");
    assert_eq!(bed.claim_ids(10).await, [held_back], "without a sweep");
}

async fn a_repeated_claim_waits_for_the_first_one_and_gives_what_that_got(bed: Bed) {
    let ask = bed.ask(10);
    assert!(bed.claim_as(&ask).await.leases.is_empty(), "there is nothing yet");
    let task = bed.submit(NewTask::new("h", &1)).await;
    // The first one, which is still under way on the server although its answer was given up.
    let other = Other::begin(&bed).await;
    let lock = ask.worker.as_u64_pair().1.cast_signed();
    other.execute(&format!("SELECT pg_advisory_xact_lock({lock})")).await;
    let take = format!(
        "UPDATE tasks SET state = 1, ready = false, owner = '{}', claim_no = {}, fence = fence + 1 WHERE id = '{task}'",
        ask.worker, ask.number
    );
    other.execute(&take).await;
    let again = tokio::spawn({
        let (bed, ask) = (bed.clone(), Claim { ..ask });
        async move { bed.claim_as(&ask).await.leases }
    });
    other.is_waited_for(&again).await;
    other.end("COMMIT").await;
    let leases = again.await.expect("no panic");
    assert_eq!(leases.iter().map(|lease| lease.task).collect::<Vec<_>>(), [task]);
}

async fn keys_are_written_in_their_order_whatever_the_batch_says(bed: Bed) {
    let insert = |key: &str| {
        format!(
            "INSERT INTO tasks (id, tenant, handler, queue, idem_key, max_attempts, created_at, priority, rank, state,
                                ready, last_seq, updated_at)
             VALUES ('{}', 'default', 'h', 'default', '{key}', 3, 0, 5, 0, 0, false, 1, 0)",
            TaskId::new()
        )
    };
    let other = Other::begin(&bed).await;
    other.execute(&insert("k5")).await;
    let batch: Vec<NewTask> = ["k9", "k5", "k1"].iter().map(|key| NewTask::new("h", key).key(*key)).collect();
    let submit = tokio::spawn({
        let (bed, batch) = (bed.clone(), batch.clone());
        async move { bed.store.submit(&batch).await.expect("the store answers") }
    });
    other.is_waited_for(&submit).await;
    // The batch waits at k5 and has not come to k9: whoever goes on there does not wait for it, else
    // the two would wait for each other.
    other.execute(&insert("k9")).await;
    other.end("ROLLBACK").await;
    let answers = submit.await.expect("no panic");
    assert!(answers.iter().all(|answer| answer.as_ref().is_ok_and(|accepted| accepted.new)), "{answers:?}");
}

on_every_store!(@ postgres, on_postgres,
    a_task_that_someone_else_has_locked_is_passed_by,
    a_slot_that_is_being_taken_is_not_taken_again,
    what_was_held_back_at_the_moment_a_slot_got_free_goes_at_once,
    a_repeated_claim_waits_for_the_first_one_and_gives_what_that_got,
    keys_are_written_in_their_order_whatever_the_batch_says
);
