//! What people and other programs ask of tasks.

use std::collections::{BTreeSet, HashMap};

use serde_json::json;
use uuid::Uuid;

use super::PostgresStore;
use super::connect::Tx;
use super::heads::{self, Decided};
use super::sessions;
use super::state::{self, States};
use crate::event::{LogEntry, NewEvent};
use crate::record::Record;
use crate::state::StatePatch;
use crate::store::ask;
use crate::store::clock::micros;
use crate::store::locks::key;
use crate::store::rules::{self, Change, Head};
use crate::store::{Action, Ask, Control, ControlRefused, Controlled, QueueSettings, StoreError};
use crate::task::TaskId;

/// How often a request is repeated that the server ended to break a deadlock.
const DEADLOCKS: usize = 5;

type Answer = Result<Controlled, ControlRefused>;

/// The requests are decided one after the other, each on what the ones before it left, and written
/// together.
pub(super) async fn control(store: &PostgresStore, batch: &[Control]) -> Result<Vec<Answer>, StoreError> {
    // A cancel locks a tree from the top, a commit its batch in the order of ids: should they wait for
    // each other, the server ends one of them, and nothing of it happened.
    for _ in 0..DEADLOCKS {
        match try_control(store, batch).await {
            Err(error) if error.is_deadlock() => tracing::debug!(%error, "trying again"),
            answer => return answer,
        }
    }
    try_control(store, batch).await
}

async fn try_control(store: &PostgresStore, batch: &[Control]) -> Result<Vec<Answer>, StoreError> {
    let tasks: BTreeSet<Uuid> = batch.iter().map(|control| control.task.0).collect();
    let tasks: Vec<Uuid> = tasks.into_iter().collect();
    // Whoever is removed or opened again holds no lock from before.
    let over = |control: &&Control| matches!(control.action, Action::Delete | Action::Resume);
    let over: Vec<TaskId> = batch.iter().filter(over).map(|control| control.task).collect();
    if !over.is_empty() {
        super::locks::let_go(store, &over).await?;
    }
    let tx = store.tx().await?;
    tx.begin().await?;
    let held = sessions::held(store, &tx, batch).await?;
    let heads = heads::read(&tx, &tasks).await?;
    let mut desk = Desk {
        held,
        now: heads::now(store, &tx).await?,
        ageing: ageing(&tx, batch, &heads).await?,
        states: states(&tx, batch).await?,
        heads: heads.into_iter().map(|head| (head.id.0, head)).collect(),
        decided: Decided::default(),
        patched: States::default(),
        removed: Vec::new(),
        asks: asks(&tx, batch).await?,
        answered: Vec::new(),
        resumed: Vec::new(),
        arrived: arrived(&tx, batch).await?,
    };
    let answers = batch.iter().map(|control| desk.decide(control)).collect();

    desk.decided.write(store, &tx, desk.now).await?;
    if !desk.answered.is_empty() {
        super::asks::decide(&tx, &desk.answered).await?;
    }
    if !desk.patched.is_empty() {
        state::save(&tx, &desk.patched).await?;
    }
    if !desk.removed.is_empty() {
        state::remove(&tx, &desk.removed).await?;
    }
    if !desk.resumed.is_empty() {
        open_again(&tx, &desk.resumed).await?;
        desk.decided.told.due = true;
    }
    tx.commit().await?;
    let ended = desk.decided.told.finished.clone();
    store.tell(desk.decided.told);
    if !ended.is_empty()
        && let Err(error) = super::locks::let_go(store, &ended).await
    {
        tracing::debug!(%error, "locks of tasks that ended are left to the sweep");
    }
    Ok(answers)
}

/// What resumed tasks need beside their rows: what was asked before counts no longer, what their
/// children came to is told again, and no snapshot tells of what was undone.
async fn open_again(tx: &Tx, resumed: &[Head]) -> Result<(), StoreError> {
    let ids = |heads: &mut dyn Iterator<Item = &Head>| heads.map(|head| head.id.0).collect::<Vec<Uuid>>();
    let (all, undone) = (ids(&mut resumed.iter()), ids(&mut resumed.iter().filter(|head| head.may_be_undone())));
    tx.execute(include_str!("sql/resume_asks.sql"), &[&all]).await?;
    tx.execute(include_str!("sql/resume_children.sql"), &[&all]).await?;
    tx.execute("DELETE FROM checkpoints WHERE task = ANY ($1::uuid[])", &[&undone]).await?;
    Ok(())
}

/// How much waiting a step of priority is worth, by queue; read only when a priority changes.
async fn ageing(tx: &Tx, batch: &[Control], heads: &[Head]) -> Result<HashMap<String, i64>, StoreError> {
    if !batch.iter().any(|control| matches!(control.action, Action::Priority(_))) {
        return Ok(HashMap::new());
    }
    let queues: Vec<&str> = heads.iter().map(|head| head.queue.as_str()).collect();
    let rows = tx.rows("SELECT name, ageing FROM queues WHERE name = ANY ($1::text[])", &[&queues]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// The states of tasks that are to be patched.
async fn states(tx: &Tx, batch: &[Control]) -> Result<States, StoreError> {
    let patched: Vec<Uuid> = batch
        .iter()
        .filter(|control| matches!(control.action, Action::Patch { .. }))
        .map(|control| control.task.0)
        .collect();
    if patched.is_empty() { Ok(States::default()) } else { state::read(tx, &patched).await }
}

/// The signals of this batch that may have been sent before and were.
async fn arrived(tx: &Tx, batch: &[Control]) -> Result<BTreeSet<(Uuid, Uuid)>, StoreError> {
    let again = |control: &Control| match control.action {
        Action::Signal { id, again: true, .. } => Some((control.task.0, id)),
        _ => None,
    };
    let again: Vec<(Uuid, Uuid)> = batch.iter().filter_map(again).collect();
    if again.is_empty() {
        return Ok(BTreeSet::new());
    }
    let (tasks, ids): (Vec<Uuid>, Vec<String>) = again.iter().map(|(task, id)| (*task, id.to_string())).unzip();
    let mut found = BTreeSet::new();
    for row in tx.rows(include_str!("sql/log_naming.sql"), &[&tasks, &ids]).await? {
        let (task, records): (Uuid, String) = (row.try_get(0)?, row.try_get(1)?);
        let here = again.iter().filter(|(asked, id)| *asked == task && rules::has_arrived(&records, *id));
        found.extend(here.copied());
    }
    Ok(found)
}

/// What is asked of people in tasks that someone answers.
async fn asks(tx: &Tx, batch: &[Control]) -> Result<Vec<Ask>, StoreError> {
    let answered = |control: &&Control| matches!(control.action, Action::Answer { .. } | Action::Approve { .. });
    let tasks: Vec<Uuid> = batch.iter().filter(answered).map(|control| control.task.0).collect();
    if tasks.is_empty() { Ok(Vec::new()) } else { super::asks::of_tasks(tx, &tasks).await }
}

/// Everything the decisions are made from, and what they come to.
struct Desk {
    now: i64,
    /// Locks under which something is asked and that are held, with their tokens.
    held: BTreeSet<(String, u64)>,
    ageing: HashMap<String, i64>,
    heads: HashMap<Uuid, Head>,
    states: States,
    decided: Decided,
    patched: States,
    removed: Vec<Uuid>,
    /// What is asked of people in tasks that someone answers.
    asks: Vec<Ask>,
    answered: Vec<Ask>,
    resumed: Vec<Head>,
    /// Signals that are in the log already, by task and id.
    arrived: BTreeSet<(Uuid, Uuid)>,
}

impl Desk {
    fn decide(&mut self, control: &Control) -> Answer {
        let head = self.heads.get(&control.task.0).filter(|head| head.tenant == control.tenant);
        let Some(head) = head.cloned() else { return Err(ControlRefused::NotFound) };
        if let Action::Signal { id, again: true, .. } = control.action
            && self.arrived.contains(&(head.id.0, id))
        {
            return Ok(Controlled { state: head.state, changed: false, version: 0 });
        }
        let ageing = self.ageing.get(&head.queue).copied();
        let ageing = ageing.unwrap_or_else(|| micros(QueueSettings::default().ageing));
        let change = match &control.action {
            Action::Answer { .. } | Action::Approve { .. } => Some(self.answer(&head, control)?),
            _ => rules::control(&head, control, ageing, self.now)?,
        };
        let Some(mut change) = change else {
            return Ok(Controlled { state: head.state, changed: false, version: 0 });
        };
        let (state, mut version) = (change.head.state, 0);
        match &control.action {
            Action::Delete => {
                self.decided.forget(head.id);
                self.decided.told.finished.push(head.id);
                self.heads.remove(&head.id.0);
                self.patched.remove(&head.id.0);
                self.removed.push(head.id.0);
            }
            action => {
                if let Action::Patch { patch, version: expected, under } = action {
                    if let Some(lock) = under
                        && !self.held.contains(&(key(&head.tenant, &lock.name), lock.token))
                    {
                        return Err(lock.lost());
                    }
                    version = self.patch(&mut change, control, patch, *expected)?;
                }
                if matches!(action, Action::Resume) {
                    self.resumed.push(head.clone());
                }
                let head = self.decided.add(&head, change);
                self.heads.insert(head.id.0, head);
            }
        }
        if let Action::Signal { id, .. } = control.action {
            self.arrived.insert((control.task.0, id));
        }
        self.decided.told.controlled.push(control.task);
        Ok(Controlled { state, changed: true, version })
    }

    /// Decides on an answer or an approval, and notes it.
    fn answer(&mut self, head: &Head, control: &Control) -> Result<Change, ControlRefused> {
        let asks: Vec<Ask> = self.asks.iter().filter(|ask| ask.task_id == head.id).cloned().collect();
        let (change, decided) = ask::answer(head, control, &asks, self.now)?;
        let ask = self.asks.iter_mut().find(|ask| ask.task_id == head.id && ask.id == decided.id);
        if let Some(ask) = ask {
            ask.status = decided.status;
            ask.decided_by = Some(control.by.clone());
            ask.decided_at = Some(self.now);
            ask.reason = decided.reason;
            self.answered.push(ask.clone());
        }
        Ok(change)
    }

    /// Changes the task's state, adds that to the change, and gives the new version.
    fn patch(
        &mut self,
        change: &mut Change,
        control: &Control,
        patch: &StatePatch,
        expected: Option<u64>,
    ) -> Result<u64, ControlRefused> {
        let (mut version, mut state) = self.states.get(&control.task.0).cloned().unwrap_or_default();
        if expected.is_some_and(|expected| expected != version) {
            return Err(ControlRefused::VersionConflict { current: version });
        }
        state.apply(patch);
        version += 1;
        self.states.insert(control.task.0, (version, state.clone()));
        self.patched.insert(control.task.0, (version, state));
        let event = NewEvent::new("state.patched", json!({"version": version, "patch": patch, "by": control.by}));
        change.entry = LogEntry::new(&[event], &[Record::Patched { patch: patch.clone(), version }]);
        Ok(version)
    }
}
