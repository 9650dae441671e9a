//! Accepting tasks.
//!
//! The bound of a queue is exact: those who submit far from it share a lock per queue; near it the
//! lock is taken alone, after everyone who shared it has committed, and the queue is counted again.
//! Locks come first (queues, then digests), then keys in order, then the counts.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use futures_util::future::{join, join4};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connect::Tx;
use super::outbox::{self, Hooks};
use super::rows::{get_id, to_i32, to_i64, to_json};
use super::{PostgresStore, Told, lock};
use crate::faults::{self, Mutant};
use crate::store::clock::micros;
use crate::store::outbox::RETRY_SUBMIT;
use crate::store::subscribers::Late;
use crate::store::{Accepted, QueueSettings, StoreError, SubmitRefused, undo_refused};
use crate::task::{Deadline, Invalid, NewTask, Priority};

type Answer = Result<Accepted, SubmitRefused>;

/// The class of the locks of queues, apart from all other locks of the database.
const QUEUE_LOCKS: i32 = 0x6c68;
/// How many pending tasks others may add while this transaction is under way.
const MARGIN: i64 = 4_000;

/// A batch on its way.
struct Batch<'a> {
    tasks: &'a [NewTask],
    /// What makes an equal submit equal; only for those with a key or a window.
    digests: Vec<Option<[u8; 32]>>,
    answers: Vec<Option<Answer>>,
    /// Equal submits within the batch: the later one, and the first, whose answer it gets.
    behind: HashMap<usize, usize>,
}

/// What a queue allows.
struct Room {
    max: i64,
    pending: i64,
    ageing: Duration,
    /// How many tasks of the batch want in.
    wanted: i64,
}

impl Room {
    fn is_tight(&self) -> bool {
        self.pending + self.wanted > self.max - MARGIN.max(self.wanted * 4)
    }

    fn is_short(&self) -> bool {
        self.pending + self.wanted > self.max
    }
}

type Rooms = HashMap<String, Room>;

pub(super) async fn submit(store: &PostgresStore, tasks: &[NewTask]) -> Result<Vec<Answer>, StoreError> {
    let mut batch = Batch::new(tasks);
    let mut unregistered = batch.handlers_to_look_up(store);
    if !unregistered.is_empty() {
        let tx = store.tx().await?;
        look_up(store, &tx, &mut unregistered).await?;
        tx.end();
    }
    let Entered { tx, rooms, hooks, now, alone, suspects } = enter(store, &batch).await?;

    batch.find_equal(&tx, now).await?;
    let refusable = |task: &NewTask| {
        unregistered.contains(&task.handler) || (alone && rooms.get(&task.queue).is_some_and(Room::is_short))
    };
    // A known task is given whatever its queue or handler is like now.
    let doubtful: Vec<usize> = batch.open().filter(|&n| refusable(&tasks[n])).collect();
    batch.find_known(&tx, &doubtful).await?;
    batch.refuse(&unregistered, &rooms, alone);

    batch.refuse_orphans(&tx).await?;
    batch.refuse_hooked(store, &tx, &hooks).await?;
    let late = if suspects { store.late_subscriber().await? } else { store.late.get().flatten() };
    batch.refuse_late(&tx, late.as_ref()).await?;
    batch.note_undos(&tx).await?;

    let told = batch.insert(store, tx, &rooms, &hooks, now).await?;
    store.tell(told);
    Ok(batch.finish())
}

/// Accepts tasks that have neither key nor window, parent nor origin, within a transaction that has
/// begun. The caller commits, and tells afterwards.
pub(super) async fn submit_within(
    store: &PostgresStore,
    tx: &Tx,
    tasks: &[NewTask],
) -> Result<(Vec<Answer>, Told), StoreError> {
    let plain = |task: &NewTask| {
        task.key.is_none()
            && task.dedupe_window.is_none()
            && task.parent.is_none()
            && task.fork.is_none()
            && task.undo.is_none()
    };
    debug_assert!(tasks.iter().all(plain));
    if tasks.is_empty() {
        return Ok((Vec::new(), Told::default()));
    }
    let mut batch = Batch::new(tasks);
    let mut unregistered = batch.handlers_to_look_up(store);
    look_up(store, tx, &mut unregistered).await?;
    // Alone at once: there is no beginning again in someone else's transaction.
    let (rooms, now) = batch.lock_queues(store, tx, true).await?;
    batch.refuse(&unregistered, &rooms, true);
    let hooks = Hooks::read(tx, tasks).await?;
    batch.refuse_hooked(store, tx, &hooks).await?;
    batch.refuse_late(tx, store.late.get().flatten().as_ref()).await?;
    let order: Vec<usize> = batch.open().collect();
    let mut told = Told::default();
    if !order.is_empty() {
        let insert = tx.prepare(include_str!("sql/submit_insert.sql")).await?;
        let columns = Columns::new(&batch, &order, &rooms, now);
        let accepted = columns.insert(tx, &insert, now, store.depth_shard(true)).await?;
        hooks.hook(tx, tasks.iter().filter(|task| accepted.contains(&task.id.0)), now).await?;
        told = batch.accept(&order, &accepted, now);
    }
    Ok((batch.finish(), told))
}

/// Leaves those handlers that no worker ever registered.
async fn look_up(store: &PostgresStore, tx: &Tx, handlers: &mut HashSet<String>) -> Result<(), StoreError> {
    // A name with a NUL was refused already and cannot be asked for.
    let names: Vec<&str> = handlers.iter().map(String::as_str).filter(|name| !name.contains('\0')).collect();
    if names.is_empty() {
        return Ok(());
    }
    for row in tx.rows("SELECT name FROM handlers WHERE name = ANY ($1::text[])", &[&names]).await? {
        let name: String = row.try_get(0)?;
        handlers.remove(&name);
        lock(&store.handlers).insert(name);
    }
    Ok(())
}

/// A transaction that has begun: the queues' locks, the digests' locks, and what the queues allow.
struct Entered {
    tx: Tx,
    rooms: Rooms,
    hooks: Hooks,
    now: i64,
    /// The queues are locked for this transaction alone.
    alone: bool,
    /// Some subscriber may be too far behind.
    suspects: bool,
}

async fn enter(store: &PostgresStore, batch: &Batch<'_>) -> Result<Entered, StoreError> {
    let same: BTreeSet<i64> = batch.windowed().map(|n| batch.digest_lock(n, &store.channel)).collect();
    let same: Vec<i64> = same.into_iter().collect();
    let mut alone = false;
    loop {
        let tx = store.tx().await?;
        let (begun, locked, hooks, suspects) = join4(
            tx.begin(),
            batch.lock_queues(store, &tx, alone),
            Hooks::read(&tx, batch.tasks),
            store.has_suspects(&tx),
        )
        .await;
        begun?;
        let (hooks, suspects) = (hooks?, suspects?);
        let (rooms, now) = locked?;
        if !alone && rooms.values().any(Room::is_tight) {
            // The shared lock cannot become an exclusive one without a deadlock: begin again.
            tx.rollback().await?;
            alone = true;
            continue;
        }
        if !same.is_empty() && !faults::is(Mutant::IdempotencyReadThenWrite) {
            tx.rows(include_str!("sql/submit_same.sql"), &[&same]).await?;
        }
        return Ok(Entered { tx, rooms, hooks, now, alone, suspects });
    }
}

fn read_room(row: &Row, wanted: i64) -> Result<Room, StoreError> {
    let defaults = QueueSettings::default();
    let ageing: Option<i64> = row.try_get(2)?;
    Ok(Room {
        max: row.try_get::<_, Option<i64>>(1)?.unwrap_or_else(|| to_i64(defaults.max_pending)),
        pending: row.try_get(3)?,
        ageing: ageing.map_or(defaults.ageing, |ageing| Duration::from_micros(ageing.unsigned_abs())),
        wanted,
    })
}

fn queue_lock(channel: &str, queue: &str) -> i32 {
    crc32fast::hash(format!("{channel}/{queue}").as_bytes()).cast_signed()
}

impl<'a> Batch<'a> {
    fn new(tasks: &'a [NewTask]) -> Self {
        let digest = |task: &NewTask| (task.key.is_some() || task.dedupe_window.is_some()).then(|| task.digest());
        let invalid = |task: &NewTask| task.validate().err().map(|invalid| Err(invalid.into()));
        let (mut first, mut behind) = (HashMap::with_capacity(tasks.len()), HashMap::new());
        for (n, task) in tasks.iter().enumerate() {
            let leader = *first.entry(task.id).or_insert(n);
            if leader != n {
                behind.insert(n, leader);
            }
        }
        Self {
            tasks,
            digests: tasks.iter().map(digest).collect(),
            answers: tasks.iter().map(invalid).collect(),
            behind,
        }
    }

    /// The entries that have no answer yet and wait for no other entry's.
    fn open(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.tasks.len()).filter(|&n| self.answers[n].is_none() && !self.behind.contains_key(&n))
    }

    /// Those to be compared with equal ones. A key says more than a window.
    fn windowed(&self) -> impl Iterator<Item = usize> + '_ {
        self.open().filter(|&n| self.tasks[n].key.is_none() && self.tasks[n].dedupe_window.is_some())
    }

    fn digest_lock(&self, n: usize, channel: &str) -> i64 {
        let digest = self.digests[n].unwrap_or_default();
        let place = crc32fast::hash(format!("{channel}/{}", self.tasks[n].tenant).as_bytes());
        // The first 8 of 32 bytes.
        i64::from_be_bytes(digest[..8].try_into().unwrap_or_default()) ^ i64::from(place)
    }

    /// Handlers named here that are not known to be registered.
    fn handlers_to_look_up(&self, store: &PostgresStore) -> HashSet<String> {
        let mut unknown: HashSet<String> = HashSet::new();
        let known = lock(&store.handlers);
        for task in self.tasks {
            if !known.contains(&task.handler) && !unknown.contains(&task.handler) {
                unknown.insert(task.handler.clone());
            }
        }
        unknown
    }

    /// Locks the queues and gives what they allow, and the time. What it sends goes out together,
    /// and together with a BEGIN that is polled before it.
    async fn lock_queues(&self, store: &PostgresStore, tx: &Tx, alone: bool) -> Result<(Rooms, i64), StoreError> {
        let mut wanted: BTreeMap<&str, i64> = BTreeMap::new();
        for n in self.open() {
            *wanted.entry(&self.tasks[n].queue).or_default() += 1;
        }
        let queues: Vec<&str> = wanted.keys().copied().collect();
        let keys: BTreeSet<i32> = queues.iter().map(|queue| queue_lock(&store.channel, queue)).collect();
        let keys: Vec<i32> = keys.into_iter().collect();
        let locks =
            if alone { include_str!("sql/submit_exclude.sql") } else { include_str!("sql/submit_share.sql") };
        let locks = tx.prepare(locks).await?;
        let room = tx.prepare(include_str!("sql/submit_room.sql")).await?;
        let offset = store.clock.offset();
        let (locked, counted) =
            join(tx.query(&locks, &[&QUEUE_LOCKS, &keys]), tx.query(&room, &[&queues, &offset])).await;
        locked?;
        let (mut rooms, mut now) = (Rooms::new(), 0);
        for row in counted? {
            let queue: String = row.try_get(0)?;
            now = row.try_get(4)?;
            let room = read_room(&row, wanted.get(queue.as_str()).copied().unwrap_or(0))?;
            rooms.insert(queue, room);
        }
        Ok((rooms, now))
    }

    /// Answers those that have an equal within their window, in the store or in this batch.
    async fn find_equal(&mut self, tx: &Tx, now: i64) -> Result<(), StoreError> {
        let windowed: Vec<usize> = self.windowed().collect();
        if windowed.is_empty() {
            return Ok(());
        }
        let tenants: Vec<&str> = windowed.iter().map(|&n| self.tasks[n].tenant.as_str()).collect();
        let digests: Vec<&[u8]> =
            windowed.iter().filter_map(|&n| self.digests[n].as_ref().map(|d| &d[..])).collect();
        let since: Vec<i64> =
            windowed.iter().map(|&n| now - micros(self.tasks[n].dedupe_window.unwrap_or_default())).collect();
        let found = tx.rows(include_str!("sql/submit_by_digest.sql"), &[&tenants, &digests, &since]).await?;
        for row in found {
            let n = windowed[place(&row)?];
            let id = get_id(&row, 1)?;
            self.answers[n] = Some(Ok(Accepted { id, new: false, created_at: row.try_get(2)? }));
        }
        let mut first = HashMap::new();
        for &n in windowed.iter().filter(|&&n| self.answers[n].is_none()) {
            let leader = *first.entry((&self.tasks[n].tenant, self.digests[n])).or_insert(n);
            if leader != n {
                self.behind.insert(n, leader);
            }
        }
        Ok(())
    }

    /// Answers those of `entries` whose id or key is known.
    async fn find_known(&mut self, tx: &Tx, entries: &[usize]) -> Result<(), StoreError> {
        if entries.is_empty() {
            return Ok(());
        }
        let ids: Vec<Uuid> = entries.iter().map(|&n| self.tasks[n].id.0).collect();
        let tenants: Vec<&str> = entries.iter().map(|&n| self.tasks[n].tenant.as_str()).collect();
        let keys: Vec<Option<&str>> = entries.iter().map(|&n| self.tasks[n].key.as_deref()).collect();
        for row in tx.rows(include_str!("sql/submit_known.sql"), &[&ids, &tenants, &keys]).await? {
            let n = entries[place(&row)?];
            self.answers[n] = Some(self.known(n, &row)?);
        }
        Ok(())
    }

    /// What a known task means for entry `n`.
    fn known(&self, n: usize, row: &Row) -> Result<Answer, StoreError> {
        let (task, id, tenant) = (&self.tasks[n], get_id(row, 1)?, row.try_get::<_, &str>(2)?);
        if tenant != task.tenant {
            return Ok(Err(Invalid::new("id", "belongs to another task; use a new one").into()));
        }
        let equal = row.try_get::<_, Option<&[u8]>>(3)? == self.digests[n].as_ref().map(|digest| &digest[..]);
        Ok(match &task.key {
            Some(key) if id != task.id && !equal => {
                Err(SubmitRefused::KeyConflict { key: key.clone(), existing: id })
            }
            _ => Ok(Accepted { id, new: false, created_at: row.try_get(4)? }),
        })
    }

    /// Refuses what nobody can run, and, when the queues are locked, what is past their bounds.
    fn refuse(&mut self, unregistered: &HashSet<String>, rooms: &Rooms, alone: bool) {
        let mut taken: HashMap<&str, i64> = HashMap::new();
        let mut keys: HashSet<(&str, &str)> = HashSet::new();
        let open: Vec<usize> = self.open().collect();
        for n in open {
            let task = &self.tasks[n];
            if unregistered.contains(&task.handler) {
                self.answers[n] = Some(Err(SubmitRefused::UnknownHandler { handler: task.handler.clone() }));
                continue;
            }
            // A child, and an undo, is part of a task that was accepted.
            let bounded = alone && task.parent.is_none() && task.undo.is_none();
            let Some(room) = rooms.get(&task.queue).filter(|_| bounded) else { continue };
            if task.key.as_deref().is_some_and(|key| keys.contains(&(task.tenant.as_str(), key))) {
                continue;
            }
            let taken = taken.entry(&task.queue).or_default();
            if room.pending + *taken >= room.max {
                self.answers[n] = Some(Err(SubmitRefused::QueueFull {
                    queue: task.queue.clone(),
                    max: u64::try_from(room.max).unwrap_or(0),
                    retry_after: Duration::from_secs(1),
                }));
                continue;
            }
            *taken += 1;
            keys.extend(task.key.as_deref().map(|key| (task.tenant.as_str(), key)));
        }
    }

    /// Refuses children of tasks that have ended or were cancelled, unless they were accepted before.
    async fn refuse_orphans(&mut self, tx: &Tx) -> Result<(), StoreError> {
        let children: Vec<usize> = self.open().filter(|&n| self.tasks[n].parent.is_some()).collect();
        if children.is_empty() {
            return Ok(());
        }
        let parents: Vec<Uuid> = children.iter().filter_map(|&n| self.tasks[n].parent).map(|id| id.0).collect();
        let alive = tx.rows(include_str!("sql/submit_parents.sql"), &[&parents]).await?;
        let alive: HashSet<Uuid> = alive.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
        let orphan = |n: &usize| self.tasks[*n].parent.is_some_and(|parent| !alive.contains(&parent.0));
        let orphans: Vec<usize> = children.into_iter().filter(orphan).collect();
        self.find_known(tx, &orphans).await?;
        for n in orphans {
            if let Some(parent) = self.tasks[n].parent.filter(|_| self.answers[n].is_none()) {
                self.answers[n] = Some(Err(SubmitRefused::ParentEnded { parent }));
            }
        }
        Ok(())
    }

    /// Refuses those that would add to a full outbox, unless they were accepted before. A child is part
    /// of a task that was accepted.
    async fn refuse_hooked(&mut self, store: &PostgresStore, tx: &Tx, hooks: &Hooks) -> Result<(), StoreError> {
        let adds = |task: &NewTask| task.parent.is_none() && hooks.any(task);
        let hooked: Vec<usize> = self.open().filter(|&n| adds(&self.tasks[n])).collect();
        if hooked.is_empty() {
            return Ok(());
        }
        let Some(max) = outbox::full(store, tx).await? else { return Ok(()) };
        self.find_known(tx, &hooked).await?;
        for n in hooked {
            let full = || Err(SubmitRefused::OutboxFull { max, retry_after: RETRY_SUBMIT });
            self.answers[n].get_or_insert_with(full);
        }
        Ok(())
    }

    /// Refuses what adds to the events that are kept, while a subscriber is too far behind, unless it was
    /// accepted before. A child, and an undo, is part of a task that was accepted.
    async fn refuse_late(&mut self, tx: &Tx, late: Option<&Late>) -> Result<(), StoreError> {
        let Some(late) = late else { return Ok(()) };
        let adds = |task: &NewTask| task.parent.is_none() && task.undo.is_none();
        let refused: Vec<usize> = self.open().filter(|&n| adds(&self.tasks[n])).collect();
        self.find_known(tx, &refused).await?;
        for n in refused {
            self.answers[n].get_or_insert_with(|| Err(late.refused()));
        }
        Ok(())
    }

    /// Notes at each task that is to be undone who does it, and refuses where that cannot be any more.
    async fn note_undos(&mut self, tx: &Tx) -> Result<(), StoreError> {
        let mut undos: Vec<usize> = self.open().filter(|&n| self.tasks[n].undo.is_some()).collect();
        undos.sort_by_key(|&n| self.tasks[n].undo.as_ref().map(|undo| undo.task));
        for n in undos {
            let task = &self.tasks[n];
            let Some(undo) = &task.undo else { continue };
            let before = undo.before.map(|before| before.0);
            let noted = tx
                .execute(
                    include_str!("sql/submit_undo.sql"),
                    &[&task.id.0, &undo.task.0, &task.tenant, &undo.finished_at, &before],
                )
                .await?;
            if noted == 0 {
                self.answers[n] = Some(Err(undo_refused().into()));
            }
        }
        Ok(())
    }

    /// Writes what is left, commits, and answers it.
    async fn insert(
        &mut self,
        store: &PostgresStore,
        tx: Tx,
        rooms: &Rooms,
        hooks: &Hooks,
        now: i64,
    ) -> Result<Told, StoreError> {
        let mut order: Vec<usize> = self.open().collect();
        if order.is_empty() {
            tx.commit().await?;
            return Ok(Told::default());
        }
        // Keys in order, so that two batches with the same keys cannot wait for each other.
        order.sort_by_key(|&n| (&self.tasks[n].tenant, &self.tasks[n].key, self.tasks[n].id));
        // Whether something depends on what was accepted, before the commit.
        let keyed = order.iter().any(|&n| self.tasks[n].key.is_some() || hooks.any(&self.tasks[n]));
        super::state::begin(&tx, order.iter().map(|&n| &self.tasks[n])).await?;
        let columns = Columns::new(self, &order, rooms, now);
        let insert = tx.prepare(include_str!("sql/submit_insert.sql")).await?;
        let shard = store.depth_shard(true);
        let accepted = if keyed {
            let accepted = columns.insert(&tx, &insert, now, shard).await?;
            let new = order.iter().map(|&n| &self.tasks[n]).filter(|task| accepted.contains(&task.id.0));
            hooks.hook(&tx, new, now).await?;
            accepted
        } else {
            let (accepted, committed) = join(columns.insert(&tx, &insert, now, shard), tx.send_commit()).await;
            let accepted = accepted?;
            committed?;
            accepted
        };
        let told = self.accept(&order, &accepted, now);
        let known: Vec<usize> = order.iter().copied().filter(|&n| self.answers[n].is_none()).collect();
        self.find_known(&tx, &known).await?;
        if let Some(&n) = known.iter().find(|&&n| self.answers[n].is_none()) {
            return Err(StoreError::Unavailable(format!(
                "the task that had the key or id of {} was removed at this moment",
                self.tasks[n].id
            )));
        }
        if !keyed {
            tx.end();
            return Ok(told);
        }
        if !known.is_empty() {
            let orphans: Vec<Uuid> = known.iter().map(|&n| self.tasks[n].id.0).collect();
            tx.execute(include_str!("sql/submit_orphans.sql"), &[&orphans]).await?;
        }
        tx.commit().await?;
        Ok(told)
    }

    /// Answers those of `order` that were accepted.
    fn accept(&mut self, order: &[usize], accepted: &HashSet<Uuid>, now: i64) -> Told {
        let mut told = Told::default();
        for &n in order.iter().filter(|&&n| accepted.contains(&self.tasks[n].id.0)) {
            told.ready |= self.tasks[n].run_at.is_none_or(|at| at.as_microsecond() <= now);
            self.answers[n] = Some(Ok(Accepted { id: self.tasks[n].id, new: true, created_at: now }));
        }
        told
    }

    /// Answers those that stand behind an equal one, and gives all answers.
    fn finish(mut self) -> Vec<Answer> {
        // A leader may stand behind another itself, when an id and an equal content repeat.
        let mut behind: Vec<(usize, usize)> = self.behind.iter().map(|(&n, &leader)| (n, leader)).collect();
        behind.sort_unstable();
        for (n, leader) in behind {
            let answer = self.answers[leader].clone();
            self.answers[n] = answer.map(|answer| answer.map(|accepted| Accepted { new: false, ..accepted }));
        }
        let lost = || Err(Invalid::new("id", "was not answered").into());
        self.answers.into_iter().map(|answer| answer.unwrap_or_else(lost)).collect()
    }
}

/// The entry a row is about: its ordinality, from 1.
fn place(row: &Row) -> Result<usize, StoreError> {
    Ok(usize::try_from(row.try_get::<_, i64>(0)? - 1).unwrap_or(0))
}

/// The entries as columns.
#[derive(Default)]
struct Columns<'a> {
    ids: Vec<Uuid>,
    tenants: Vec<&'a str>,
    handlers: Vec<&'a str>,
    queues: Vec<&'a str>,
    concurrency_keys: Vec<Option<&'a str>>,
    keys: Vec<Option<&'a str>>,
    digests: Vec<Option<&'a [u8]>>,
    tags: Vec<Option<String>>,
    max_attempts: Vec<i32>,
    deadlines: Vec<Option<i64>>,
    priorities: Vec<i16>,
    ranks: Vec<i64>,
    run_ats: Vec<Option<i64>>,
    events: Vec<String>,
    records: Vec<Option<String>>,
    parents: Vec<Option<Uuid>>,
    forks: Vec<Option<Uuid>>,
    traces: Vec<Option<&'a str>>,
    undos: Vec<Option<Uuid>>,
}

impl<'a> Columns<'a> {
    fn new(batch: &'a Batch<'_>, order: &[usize], rooms: &Rooms, now: i64) -> Self {
        let mut columns = Self::default();
        for &n in order {
            let task = &batch.tasks[n];
            let ageing = rooms.get(&task.queue).map_or(QueueSettings::default().ageing, |room| room.ageing);
            let priority = Priority::new(task.priority).unwrap_or_default();
            let entry = task.first_entry();
            columns.ids.push(task.id.0);
            columns.tenants.push(&task.tenant);
            columns.handlers.push(&task.handler);
            columns.queues.push(&task.queue);
            columns.concurrency_keys.push(task.concurrency_key.as_deref());
            columns.keys.push(task.key.as_deref());
            columns.digests.push(batch.digests[n].as_ref().map(|digest| &digest[..]));
            columns.tags.push(to_json((!task.tags.is_empty()).then_some(&task.tags)));
            columns.max_attempts.push(to_i32(task.max_attempts));
            columns.deadlines.push(task.deadline.map(|deadline| match deadline {
                Deadline::At(at) => at.as_microsecond(),
                Deadline::After(time) => now + micros(time),
            }));
            columns.priorities.push(priority.get().into());
            columns.ranks.push(priority.rank(now, ageing));
            columns.run_ats.push(task.run_at.map(|at| at.as_microsecond()).filter(|&at| at > now));
            columns.events.push(entry.events);
            columns.records.push(entry.records);
            columns.parents.push(task.parent.map(|parent| parent.0));
            columns.forks.push(task.fork.as_ref().map(|(of, _)| of.0));
            columns.traces.push(task.traceparent.as_deref());
            columns.undos.push(task.undo.as_ref().map(|undo| undo.task.0));
        }
        columns
    }

    /// Gives the ids that were new.
    async fn insert(
        &self,
        tx: &Tx,
        statement: &tokio_postgres::Statement,
        now: i64,
        shard: i32,
    ) -> Result<HashSet<Uuid>, StoreError> {
        let accepted = tx
            .query(
                statement,
                &[
                    &now,
                    &shard,
                    &self.ids,
                    &self.tenants,
                    &self.handlers,
                    &self.queues,
                    &self.concurrency_keys,
                    &self.keys,
                    &self.digests,
                    &self.tags,
                    &self.max_attempts,
                    &self.deadlines,
                    &self.priorities,
                    &self.ranks,
                    &self.run_ats,
                    &self.events,
                    &self.records,
                    &self.parents,
                    &self.forks,
                    &self.traces,
                    &self.undos,
                ],
            )
            .await?;
        accepted.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }
}
