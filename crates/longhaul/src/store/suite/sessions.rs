//! Locks that a service outside keeps too: given when it gave them, lost when it lost them.

use std::time::Duration;

use super::bed::{Bed, completed, secs, suspended};
use super::lock::{ask, change, make, release, several, token, tokens, waits};
use crate::state::StatePatch;
use crate::store::sessions::{FORGET, Look, Note, Said, Stage, Which};
use crate::store::{Action, ControlRefused, Lease, LockAction, LockInfo, LockToken};
use crate::task::{NewTask, TaskId};

const TTL: Duration = Duration::from_secs(10);
const REDIS: &str = "redis";

async fn by_redis(bed: &Bed) {
    bed.store.choose_lock_service(Some(REDIS)).await.expect("the store answers");
}

async fn due(bed: &Bed) -> Vec<Look> {
    bed.store.due_sessions(REDIS, secs(3), 100).await.expect("the store answers")
}

/// The only session that is due.
async fn look(bed: &Bed, stage: Stage) -> Look {
    let mut looks = due(bed).await;
    assert_eq!(looks.len(), 1, "one session is due: {looks:?}");
    assert_eq!(looks[0].stage, stage);
    looks.remove(0)
}

async fn note(bed: &Bed, look: &Look, said: Said) {
    let note = Note { look: look.clone(), said, ttl: TTL };
    bed.store.note_sessions(&[note]).await.expect("the store answers");
}

/// Lets the service give the lock that is asked for.
async fn given(bed: &Bed) -> Look {
    let look = look(bed, Stage::Asked).await;
    note(bed, &look, Said::Taken).await;
    look
}

async fn info(bed: &Bed, name: &str) -> Option<LockInfo> {
    let which = Which::One(name.to_owned());
    bed.store.locks("default", &which).await.expect("the store answers").pop()
}

async fn expired(bed: &Bed, task: TaskId) -> serde_json::Value {
    let event = bed.events(task).await.into_iter().find(|event| event.kind == "lock.expired");
    serde_json::to_value(event.expect("it is told").data).expect("JSON")
}

async fn a_lock_is_given_when_the_service_gave_it(bed: Bed) {
    by_redis(&bed).await;
    assert_eq!(bed.store.lock_service().await.expect("the store answers").as_deref(), Some(REDIS));
    let lease = bed.running().await;
    ask(&bed, &lease, "db").await;
    assert!(waits(&bed, &lease).await, "the service was not asked yet");
    let look = look(&bed, Stage::Asked).await;
    assert_eq!(look.key, "default/db");
    note(&bed, &look, Said::Taken).await;
    assert_eq!(token(&bed, &lease).await, look.token);
    let events = bed.events(lease.task).await;
    let acquired = events.last().expect("one");
    assert_eq!((acquired.kind.as_str(), &acquired.data["service"]), ("lock.acquired", &REDIS.into()));
    assert!(due(&bed).await.is_empty(), "there is nothing more to ask");
    let shown = info(&bed, "db").await.expect("it is there");
    assert_eq!((shown.holder, shown.token), (Some(lease.task), Some(look.token)));
    assert_eq!((shown.service.as_deref(), shown.waiting), (Some(REDIS), 0));
}

async fn a_session_is_given_to_one_process_and_again_when_that_says_nothing(bed: Bed) {
    by_redis(&bed).await;
    let lease = bed.running().await;
    ask(&bed, &lease, "db").await;
    let other = bed.another_process().await;
    let first = look(&bed, Stage::Asked).await;
    assert!(due(&other).await.is_empty(), "it is the first one's for now");
    for bed in [&bed, &other] {
        bed.advance(4);
    }
    let second = look(&other, Stage::Asked).await;
    assert_eq!(first.session, second.session, "one owner, whoever asks");
    note(&other, &second, Said::Taken).await;
    note(&bed, &first, Said::Taken).await;
    assert_eq!(tokens(&bed, lease.task).await, [second.token], "once");
}

async fn who_is_busy_outside_is_asked_again_and_the_line_stays_in_order(bed: Bed) {
    by_redis(&bed).await;
    let leases = several(&bed, 3).await;
    for lease in &leases {
        ask(&bed, lease, "db").await;
    }
    let asked = look(&bed, Stage::Asked).await;
    note(&bed, &asked, Said::Busy).await;
    assert!(due(&bed).await.is_empty(), "not at once");
    assert!(info(&bed, "db").await.expect("it is there").trouble.is_some_and(|why| why.contains("outside")));
    bed.advance(1);
    let again = given(&bed).await;
    assert_eq!(asked.session, again.session, "it keeps its place in the service's line");
    let mut last = 0;
    for (index, lease) in leases.iter().enumerate() {
        let token = token(&bed, lease).await;
        assert!(token > last);
        last = token;
        for other in &leases[index + 1..] {
            assert!(waits(&bed, other).await);
        }
        release(&bed, lease, "db", token).await;
        // Given back at the service before the next one asks there.
        let ended = look(&bed, Stage::Ended).await;
        note(&bed, &ended, Said::Released).await;
        if index < 2 {
            assert_ne!(given(&bed).await.session, ended.session, "each hold is a session of its own");
        }
    }
    assert!(due(&bed).await.is_empty() && info(&bed, "db").await.is_none(), "nothing is left");
}

async fn a_kept_session_goes_on_and_one_that_nobody_keeps_ends(bed: Bed) {
    by_redis(&bed).await;
    let (holder, next) = (bed.running().await, bed.running().await);
    ask(&bed, &holder, "db").await;
    given(&bed).await;
    ask(&bed, &next, "db").await;
    for _ in 0..10 {
        bed.pass(3).await;
        bed.heartbeat(&[&holder, &next]).await;
        let kept = look(&bed, Stage::Held).await;
        note(&bed, &kept, Said::Kept).await;
    }
    assert!(waits(&bed, &next).await, "30 s later it is held still");
    bed.pass(3).await;
    let failed = look(&bed, Stage::Held).await;
    note(&bed, &failed, Said::Failed("redis is not reachable (down)".to_owned())).await;
    bed.pass(4).await;
    assert!(waits(&bed, &next).await, "7 s after it was kept last, it counts");
    assert_eq!(info(&bed, "db").await.expect("there").holder, Some(holder.task));
    bed.pass(2).await;
    let why = expired(&bed, holder.task).await;
    assert_eq!((&why["reason"], &why["service"]), (&"session_ended".into(), &REDIS.into()));
    assert!(why["detail"].as_str().is_some_and(|why| why.contains("not reachable")), "{why}");
    assert!(waits(&bed, &next).await, "the service has to give it first");
    let ended = look(&bed, Stage::Ended).await;
    note(&bed, &ended, Said::Released).await;
    given(&bed).await;
    assert!(token(&bed, &next).await > tokens(&bed, holder.task).await[0]);
}

async fn a_lost_session_takes_the_lock_and_the_next_token_is_larger(bed: Bed) {
    by_redis(&bed).await;
    let (holder, next) = (bed.running().await, bed.running().await);
    ask(&bed, &holder, "db").await;
    given(&bed).await;
    ask(&bed, &next, "db").await;
    bed.end(&holder, suspended("timer", "sleep", Some(600))).await;
    bed.advance(3);
    let kept = look(&bed, Stage::Held).await;
    note(&bed, &kept, Said::Lost).await;
    assert_eq!(expired(&bed, holder.task).await["reason"], "session_lost");
    given(&bed).await;
    let old = tokens(&bed, holder.task).await[0];
    assert!(token(&bed, &next).await > old);
    // What was said of the old session changes nothing now.
    note(&bed, &kept, Said::Lost).await;
    assert_eq!(info(&bed, "db").await.expect("there").holder, Some(next.task));
    // Nor can the old holder give back what is not its.
    bed.pass(600).await;
    let again: Vec<Lease> = bed.claim(9).await;
    let again = again.into_iter().find(|lease| lease.task == holder.task).expect("it was woken");
    release(&bed, &again, "db", old).await;
    assert_eq!(bed.kinds(holder.task).await.last().map(String::as_str), Some("lock.not_held"));
}

async fn an_answer_that_comes_too_late_gives_nothing(bed: Bed) {
    by_redis(&bed).await;
    let lease = bed.running().await;
    ask(&bed, &lease, "db").await;
    let slow = look(&bed, Stage::Asked).await;
    bed.advance(9);
    note(&bed, &slow, Said::Taken).await;
    assert!(waits(&bed, &lease).await, "the service may have given it to someone else by now");
    given(&bed).await;
    token(&bed, &lease).await;
}

async fn a_lock_that_nobody_waits_for_any_more_is_given_back(bed: Bed) {
    by_redis(&bed).await;
    let lease = bed.running().await;
    let action = LockAction::Acquire { max_hold: secs(3_600), within: Some(secs(20)) };
    make(&bed, &change(&lease, "db", "lock/0/lock db", action)).await.expect("the lease is current");
    let asked = look(&bed, Stage::Asked).await;
    bed.heartbeat(&[&lease]).await;
    bed.pass(21).await;
    let ended = look(&bed, Stage::Ended).await;
    // Even when the service gave it in the same moment.
    note(&bed, &asked, Said::Taken).await;
    assert!(tokens(&bed, lease.task).await.is_empty());
    note(&bed, &ended, Said::Released).await;
    bed.sweep().await;
    assert!(info(&bed, "db").await.is_none());
    assert_eq!(bed.sweep().await.locks, 0);
}

async fn a_final_state_and_max_hold_end_the_session(bed: Bed) {
    by_redis(&bed).await;
    let lease = bed.running().await;
    ask(&bed, &lease, "db").await;
    given(&bed).await;
    bed.end(&lease, completed()).await;
    bed.store.let_go(&[lease.task]).await.expect("the store answers");
    let ended = look(&bed, Stage::Ended).await;
    note(&bed, &ended, Said::Released).await;

    let slow = bed.running().await;
    let action = LockAction::Acquire { max_hold: secs(5), within: None };
    make(&bed, &change(&slow, "db", "lock/0/lock db", action)).await.expect("the lease is current");
    given(&bed).await;
    bed.pass(6).await;
    assert_eq!(expired(&bed, slow.task).await["reason"], "max_hold");
    look(&bed, Stage::Ended).await;
}

async fn tokens_go_on_after_the_largest_that_the_service_knows(bed: Bed) {
    by_redis(&bed).await;
    let (first, other, next) = (bed.running().await, bed.running().await, bed.running().await);
    ask(&bed, &first, "db").await;
    let asked = look(&bed, Stage::Asked).await;
    note(&bed, &asked, Said::Outdated { largest: 1_000_000 }).await;
    let raised = given(&bed).await;
    assert_eq!(asked.session, raised.session);
    assert!(token(&bed, &first).await > 1_000_000);
    ask(&bed, &other, "disk").await;
    given(&bed).await;
    assert!(token(&bed, &other).await > token(&bed, &first).await, "for every lock");
    // One that is far behind does not take the counter back.
    ask(&bed, &next, "net").await;
    let asked = look(&bed, Stage::Asked).await;
    note(&bed, &asked, Said::Outdated { largest: 5 }).await;
    given(&bed).await;
    assert!(token(&bed, &next).await > token(&bed, &other).await);
}

async fn locks_go_back_to_the_store_when_that_is_chosen(bed: Bed) {
    by_redis(&bed).await;
    let (waiter, other) = (bed.running().await, bed.running().await);
    ask(&bed, &waiter, "db").await;
    bed.store.choose_lock_service(None).await.expect("the store answers");
    ask(&bed, &other, "disk").await;
    token(&bed, &other).await;
    assert!(waits(&bed, &waiter).await, "the service may have given it");
    // Nobody is there to give it back: after a while it has run out there.
    bed.heartbeat(&[&waiter]).await;
    bed.pass(FORGET.as_secs() + 1).await;
    bed.sweep().await;
    token(&bed, &waiter).await;
    assert!(due(&bed).await.is_empty());
}

async fn sweeps_leave_a_lock_alone_that_the_service_is_asked_for(bed: Bed) {
    by_redis(&bed).await;
    let lease = bed.running().await;
    ask(&bed, &lease, "db").await;
    for _ in 0..3 {
        assert_eq!(bed.sweep().await.locks, 0);
    }
}

async fn a_state_is_changed_under_a_lock_only_while_that_is_held(bed: Bed) {
    let (holder, next) = (bed.running().await, bed.running().await);
    let shared = bed.submit(NewTask::new("h", &1)).await;
    ask(&bed, &holder, "db").await;
    ask(&bed, &next, "db").await;
    let old = LockToken { name: "db".to_owned(), token: token(&bed, &holder).await };
    let patch = |under: &LockToken, goal: &str| {
        let patch = StatePatch { set_goal: Some(goal.to_owned()), ..StatePatch::default() };
        Action::Patch { patch, version: None, under: Some(under.clone()) }
    };
    bed.control(shared, patch(&old, "first")).await.expect("it is held");
    // Also before a sweep has taken it.
    bed.advance(3_601);
    let lost = Err(ControlRefused::LockLost { name: "db".to_owned(), token: old.token });
    assert_eq!(bed.control(shared, patch(&old, "late")).await, lost);
    bed.heartbeat(&[&holder, &next]).await;
    bed.sweep().await;
    let new = LockToken { name: "db".to_owned(), token: token(&bed, &next).await };
    assert_eq!(bed.control(shared, patch(&old, "later")).await, lost);
    bed.control(shared, patch(&new, "second")).await.expect("it is held");
    let (version, state) = bed.store.state(shared).await.expect("the store answers").expect("a state");
    assert_eq!((version, state.goal.as_str()), (2, "second"));
}

async fn a_sweep_can_leave_ticks_to_others(bed: Bed) {
    use crate::schedule::Schedule;
    let schedule = Schedule::every("often", secs(60), NewTask::new("h", &1));
    bed.store.save_schedule(&schedule).await.expect("the store answers").expect("saved");
    bed.advance(61);
    let swept = bed.store.sweep(100, false).await.expect("the store answers");
    assert_eq!((swept.ticks, swept.next_due_in), (0, None), "and they do not hurry it");
    assert!(bed.claim(5).await.is_empty());
    assert_eq!(bed.store.sweep(100, true).await.expect("the store answers").ticks, 1);
    assert_eq!(bed.claim(5).await.len(), 1);
}

on_every_store!(
    a_lock_is_given_when_the_service_gave_it,
    a_session_is_given_to_one_process_and_again_when_that_says_nothing,
    who_is_busy_outside_is_asked_again_and_the_line_stays_in_order,
    a_kept_session_goes_on_and_one_that_nobody_keeps_ends,
    a_lost_session_takes_the_lock_and_the_next_token_is_larger,
    an_answer_that_comes_too_late_gives_nothing,
    a_lock_that_nobody_waits_for_any_more_is_given_back,
    a_final_state_and_max_hold_end_the_session,
    tokens_go_on_after_the_largest_that_the_service_knows,
    locks_go_back_to_the_store_when_that_is_chosen,
    sweeps_leave_a_lock_alone_that_the_service_is_asked_for,
    a_state_is_changed_under_a_lock_only_while_that_is_held,
    a_sweep_can_leave_ticks_to_others,
);
