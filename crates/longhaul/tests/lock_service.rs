//! Locks that a service outside keeps too, as a program sees them. The service here is one in memory that can
//! be down or forget things at will; the real ones are tested in `longhaul-bus`.

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use common::{Bed, PATIENCE, at_once};
use longhaul::{
    Client, LockClaim, LockService, LockServiceError, NewTask, Run, Schedule, State, StatePatch, Take, TaskError,
    TaskId, Worker, WorkerHandle,
};
use tokio::time::Instant;

#[derive(Default)]
struct Inside {
    held: HashMap<String, (String, Instant)>,
    largest: u64,
    down: bool,
    calls: u64,
}

/// A lock service in memory.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Inside>>);

impl Memory {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().expect("not poisoned")
    }

    fn call(&self) -> Result<MutexGuard<'_, Inside>, LockServiceError> {
        let mut inside = self.inside();
        inside.calls += 1;
        if inside.down {
            let why = "it is down".to_owned();
            return Err(LockServiceError::Unavailable { service: "memory".to_owned(), why });
        }
        inside.held.retain(|_, (_, until)| *until > Instant::now());
        Ok(inside)
    }

    /// Somebody else has it.
    fn occupy(&self, lock: &str) {
        let name = format!("locks/default/{lock}");
        self.inside().held.insert(name, ("somebody".to_owned(), Instant::now() + PATIENCE));
    }

    /// Whoever has it has it no longer.
    fn forget(&self, lock: &str) {
        self.inside().held.remove(&format!("locks/default/{lock}"));
    }

    fn holder(&self, lock: &str) -> Option<String> {
        self.inside().held.get(&format!("locks/default/{lock}")).map(|(owner, _)| owner.clone())
    }
}

#[async_trait]
impl LockService for Memory {
    fn name(&self) -> &str {
        "memory"
    }

    fn ttl(&self) -> Duration {
        Duration::from_secs(2)
    }

    async fn take(&self, claim: &LockClaim<'_>) -> Result<Take, LockServiceError> {
        let mut inside = self.call()?;
        if inside.held.get(claim.name).is_some_and(|(owner, _)| owner != claim.owner) {
            return Ok(Take::Busy);
        }
        if !inside.held.contains_key(claim.name)
            && let Some(token) = claim.token
        {
            if token <= inside.largest {
                return Ok(Take::Outdated { largest: inside.largest });
            }
            inside.largest = token;
        }
        let until = Instant::now() + claim.ttl;
        inside.held.insert(claim.name.to_owned(), (claim.owner.to_owned(), until));
        Ok(Take::Taken)
    }

    async fn keep(&self, claim: &LockClaim<'_>) -> Result<bool, LockServiceError> {
        let mut inside = self.call()?;
        let held = inside.held.get_mut(claim.name).filter(|(owner, _)| owner == claim.owner);
        Ok(held.map(|(_, until)| *until = Instant::now() + claim.ttl).is_some())
    }

    async fn release(&self, claim: &LockClaim<'_>) -> Result<(), LockServiceError> {
        let mut inside = self.call()?;
        if inside.held.get(claim.name).is_some_and(|(owner, _)| owner == claim.owner) {
            inside.held.remove(claim.name);
        }
        Ok(())
    }
}

async fn with_service(bed: &Bed) -> Memory {
    let service = Memory::default();
    bed.client.use_lock_service(Arc::new(service.clone())).await.expect("taken");
    service
}

/// Takes the lock `db`, waits for a signal if told to, and says its token and whether it had the lock until then.
async fn hold(run: Run, word: String) -> Result<(u64, bool), TaskError> {
    let lock = run.lock("db").await?;
    if word == "stay" {
        run.signal::<()>("go").await?;
    }
    let token = lock.token();
    Ok((token, lock.release().await?))
}

async fn start(client: &Client) -> WorkerHandle {
    Worker::new(client).retry(at_once(2)).handler("h", hold).start().await.expect("starts")
}

async fn submit(bed: &Bed, word: &str) -> TaskId {
    bed.client.submit(NewTask::new("h", &word)).await.expect("accepted").id
}

async fn result(bed: &Bed, id: TaskId) -> (u64, bool) {
    let task = bed.ended(id).await;
    let result = task.result.unwrap_or_else(|| panic!("a result: {:?}", task.error));
    serde_json::from_str(result.get()).expect("a token and a word")
}

/// Waits until a condition holds.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}"));
}

on_every_store!(
    a_lock_is_had_at_the_service_while_the_task_has_it_and_no_longer,
    who_is_outside_is_waited_for_and_the_reason_is_told,
    while_the_service_is_down_asking_waits_and_holding_goes_on_until_the_session_ends,
    a_task_whose_session_is_lost_learns_of_it_and_cannot_write_any_more,
    tokens_are_larger_than_those_of_other_stores_at_the_same_service,
    a_lock_outlives_its_worker_when_another_one_keeps_its_session,
    ticks_go_on_when_the_leader_dies_and_when_the_service_does,
    a_second_service_is_refused,
);

async fn a_lock_is_had_at_the_service_while_the_task_has_it_and_no_longer(bed: Bed) {
    let service = with_service(&bed).await;
    let worker = start(&bed.client).await;
    let id = submit(&bed, "stay").await;
    let acquired = bed.event(id, "lock.acquired").await;
    assert_eq!(acquired.data["service"], "memory");
    let owner = service.holder("db").expect("it is held there");
    bed.waiting_for(id, "signal").await;
    // Longer than a session lasts by itself, with the task suspended.
    tokio::time::sleep(service.ttl() * 2).await;
    assert_eq!(service.holder("db"), Some(owner), "it is kept");
    let shown = bed.client.lock("db").await.expect("the store answers").expect("it is held");
    assert_eq!((shown.holder, shown.token), (Some(id), acquired.data["token"].as_u64()));
    bed.client.signal(id, "go", &()).await.expect("sent");
    assert!(result(&bed, id).await.1);
    until("it is given back", async || service.holder("db").is_none()).await;
    assert!(bed.client.locks("", 10).await.expect("the store answers").is_empty());
    worker.stop().await;
}

async fn who_is_outside_is_waited_for_and_the_reason_is_told(bed: Bed) {
    let service = with_service(&bed).await;
    service.occupy("db");
    let worker = start(&bed.client).await;
    let id = submit(&bed, "go").await;
    bed.waiting_for(id, "lock").await;
    until("it says why", async || {
        let why = bed.client.why(id).await.expect("the store answers");
        why.sentence.contains("someone outside has it")
    })
    .await;
    service.forget("db");
    assert!(result(&bed, id).await.1);
    worker.stop().await;
}

async fn while_the_service_is_down_asking_waits_and_holding_goes_on_until_the_session_ends(bed: Bed) {
    let service = with_service(&bed).await;
    let worker = start(&bed.client).await;
    let holder = submit(&bed, "stay").await;
    bed.waiting_for(holder, "signal").await;
    service.inside().down = true;
    let began = Instant::now();
    let next = submit(&bed, "go").await;
    bed.waiting_for(next, "lock").await;
    let expired = bed.event(holder, "lock.expired").await;
    assert!(began.elapsed() < service.ttl() + Duration::from_secs(2), "after {:?}", began.elapsed());
    assert_eq!(expired.data["reason"], "session_ended");
    assert!(expired.data["detail"].as_str().is_some_and(|why| why.contains("it is down")), "{:?}", expired.data);
    until("it says why", async || bed.client.why(next).await.expect("answers").sentence.contains("it is down"))
        .await;
    assert_eq!(bed.client.task(next).await.expect("there").state, State::Waiting);
    service.inside().down = false;
    let larger = result(&bed, next).await;
    bed.client.signal(holder, "go", &()).await.expect("sent");
    let smaller = result(&bed, holder).await;
    assert!(larger.1 && !smaller.1, "only the second one had it until it gave it back");
    assert!(smaller.0 < larger.0);
    worker.stop().await;
}

async fn a_task_whose_session_is_lost_learns_of_it_and_cannot_write_any_more(bed: Bed) {
    let service = with_service(&bed).await;
    let client = bed.client.clone();
    let shared = Worker::new(&bed.client)
        .queues(["shared"])
        .handler("shared", |run: Run, _: ()| async move { run.signal::<()>("go").await });
    let shared = shared.start().await.expect("starts");
    let state = bed.client.submit(NewTask::new("shared", &()).queue("shared")).await.expect("accepted").id;
    bed.waiting_for(state, "signal").await;
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, _: String| {
            let client = client.clone();
            async move {
                let lock = run.lock("db").await?;
                let write = async |goal: &str| {
                    let patch = StatePatch { set_goal: Some(goal.to_owned()), ..StatePatch::default() };
                    client.patch_state_under(&lock.proof(), state, patch, None).await
                };
                write("held").await.map_err(|error| TaskError::fatal("refused", error.to_string()))?;
                assert!(lock.is_held().await?);
                run.publish("test.wrote", &()).await?;
                lock.lost().await?;
                let refused = write("lost").await.err().map(|error| error.to_string());
                Ok::<_, TaskError>(refused.unwrap_or_default())
            }
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, "").await;
    bed.event(id, "test.wrote").await;
    service.forget("db");
    let refused = bed.ended(id).await.result.expect("a result");
    assert!(refused.get().contains("not held with token"), "{refused}");
    assert_eq!(bed.event(id, "lock.expired").await.data["reason"], "session_lost");
    let (_, state) = bed.client.state(state).await.expect("answers").expect("a state");
    assert_eq!(state.goal, "held");
    worker.stop().await;
    shared.stop().await;
}

async fn tokens_are_larger_than_those_of_other_stores_at_the_same_service(bed: Bed) {
    let service = with_service(&bed).await;
    service.inside().largest = 41;
    let worker = start(&bed.client).await;
    let id = submit(&bed, "go").await;
    assert!(result(&bed, id).await.0 > 41);
    worker.stop().await;
}

async fn a_lock_outlives_its_worker_when_another_one_keeps_its_session(bed: Bed) {
    let service = with_service(&bed).await;
    let worker = start(&bed.client).await;
    let id = submit(&bed, "stay").await;
    bed.waiting_for(id, "signal").await;
    let owner = service.holder("db");
    // It dies; one that has nothing to do with the task keeps the session.
    worker.abort();
    let other = bed.client.clone();
    let keeper = Worker::new(&other).queues(["other"]).start().await.expect("starts");
    tokio::time::sleep(service.ttl() * 2).await;
    assert_eq!(service.holder("db"), owner);
    keeper.stop().await;
    let worker = start(&bed.client).await;
    bed.client.signal(id, "go", &()).await.expect("sent");
    assert!(result(&bed, id).await.1);
    worker.stop().await;
}

async fn ticks_go_on_when_the_leader_dies_and_when_the_service_does(bed: Bed) {
    let service = with_service(&bed).await;
    let tick = async |run: Run, _: ()| run.publish("test.ticked", &()).await;
    let start = || Worker::new(&bed.client).handler("tick", tick).start();
    let leads = || {
        let inside = service.inside();
        inside.held.iter().find(|(name, _)| name.contains("leaders/")).map(|(_, (owner, _))| owner.clone())
    };
    let first = start().await.expect("starts");
    until("someone leads", async || leads().is_some()).await;
    let leader = leads();
    let second = start().await.expect("starts");
    let task = NewTask::new("tick", &());
    let often = Schedule::every("often", Duration::from_secs(1), task);
    let planned = bed.client.schedule(often).await.expect("saved");
    let newest = async || bed.client.schedules().await.expect("answers")[0].last_at;
    until("it ticks", async || newest().await.is_some()).await;
    assert_eq!(leads(), leader, "the second one does not lead");
    first.abort();
    let before = newest().await;
    until("another one leads", async || leads().is_some_and(|now| Some(now) != leader)).await;
    until("it ticks again", async || newest().await > before).await;
    service.inside().down = true;
    let before = newest().await;
    until("it ticks without a leader", async || newest().await > before).await;
    second.stop().await;
    // Whatever happened, a tick has one task at most.
    let first = planned.next_at.expect("it was planned");
    let ticks = newest().await.expect("it ticked").duration_since(first).as_secs() + 1;
    let filter = longhaul::Filter { limit: 1_000, ..longhaul::Filter::default() };
    let tasks = bed.client.list(&filter).await.expect("answers").len();
    assert!(i64::try_from(tasks).expect("few") <= ticks, "{tasks} tasks for {ticks} ticks");
}

async fn a_second_service_is_refused(bed: Bed) {
    let service = with_service(&bed).await;
    assert_eq!(bed.client.lock_service().await.expect("answers").as_deref(), Some("memory"));
    let again = bed.client.use_lock_service(Arc::new(service)).await;
    assert!(again.is_err_and(|error| error.to_string().contains("another client")));
    bed.client.use_store_locks().await.expect("the store answers");
    assert_eq!(bed.client.lock_service().await.expect("answers"), None);
    let worker = start(&bed.client).await;
    let id = submit(&bed, "go").await;
    assert!(result(&bed, id).await.1);
    assert!(bed.event(id, "lock.acquired").await.data.get("service").is_none());
    worker.stop().await;
}
