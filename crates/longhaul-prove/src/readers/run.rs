//! A run with many readers: each reads the events of a task to its end and comes back again and again, while servers are killed, frozen
//! and stopped under them. Afterwards some ask and never read: they must be cut off, the server must not keep for them what
//! they do not take, and they must be able to go on.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use longhaul::{NewTask, TaskId};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::{Frames, Manner, Met, Reader};
use crate::Anyhow;
use crate::bed::{Bed, Kind};
use crate::chance::Chance;
use crate::check::{Violation, check};
use crate::drive::Outcome;
use crate::history::{History, Setup, list};
use crate::ledger::digest;
use crate::process::Process;
use crate::program::{Ends, HANDLER, Op, Program, TENANTS, marker};
use crate::records::{Answer, Ask, Records, Stream};
use crate::serve::{CUT_OFF, Wires};
use crate::soak::resident;
use crate::web::{Asking, Web};

/// What is done.
#[derive(Clone, Debug)]
pub struct Reading {
    /// On which store.
    pub kind: Kind,
    /// The seed.
    pub seed: u64,
    /// How many readers there are.
    pub readers: u64,
    /// How often each comes back.
    pub reconnects: u32,
    /// How many ask and never read.
    pub silent: u64,
    /// So many times a server is killed, frozen or stopped.
    pub faults: u32,
    /// How long it may take.
    pub bound: Duration,
}

/// How many readers one task has.
const PER_TASK: u64 = 10;
/// The time between two events of a task, and between two faults.
const EVENT_EVERY: Duration = Duration::from_millis(120);
const FAULT_EVERY: Duration = Duration::from_millis(300);
/// What those who never read ask for: so many events of so many bytes, more than all buffers on the way hold.
const MUCH: (u64, usize) = (240, 64 * 1024);
/// How much a server may grow while they do not read, and for each of them, bytes.
const MAY_GROW: (u64, u64) = (24 << 20, 1 << 20);

/// A server that is always there again.
struct Post {
    words: Vec<String>,
    process: Process,
}

/// Runs it. `None`: the store cannot be had here.
pub async fn read_all(plan: &Reading, program: &Path) -> Result<Option<Outcome>, Anyhow> {
    let Some(mut bed) = Bed::make(plan.kind, program).await? else { return Ok(None) };
    let begun = Instant::now();
    let mut outcome = Run::new(plan, &bed).await?.run().await?;
    outcome.seconds = begun.elapsed().as_secs_f64();
    if !outcome.is_clean() {
        eprintln!("prove: seed {}: what was recorded is kept in {}", plan.seed, bed.keep().display());
    }
    Ok(Some(outcome))
}

struct Run<'a> {
    plan: &'a Reading,
    bed: &'a Bed,
    records: Arc<Records>,
    web: Arc<Web>,
    servers: Vec<Post>,
    chance: Chance,
    outcome: Outcome,
}

impl<'a> Run<'a> {
    async fn new(plan: &'a Reading, bed: &'a Bed) -> Result<Self, Anyhow> {
        let records = Arc::new(Records::open(bed.folder(), "readers")?);
        let wires = Wires::lay(bed.client().await?, bed.folder(), 2).await?;
        let start = |server: &std::net::SocketAddr| {
            let words = vec!["--listen".to_owned(), server.to_string()];
            let process = bed.start("server", &words, &[])?;
            Ok::<_, Anyhow>(Post { words, process })
        };
        let servers = wires.servers.iter().map(start).collect::<Result<_, _>>()?;
        let web = Arc::new(Web::new(wires, Arc::clone(&records))?);
        let (chance, outcome) = (Chance::of(plan.seed, u64::MAX), Outcome::default());
        Ok(Self { plan, bed, records, web, servers, chance, outcome })
    }

    async fn run(mut self) -> Result<Outcome, Anyhow> {
        let words = ["--slots", "32", "--lease-ms", "5000"].map(str::to_owned);
        let _workers = [self.bed.start("worker", &words, &[])?, self.bed.start("worker", &words, &[])?];
        let met = self.many().await?;
        self.count("connections of readers", met.connections);
        self.count("frames cut", met.cut);
        self.count("streams lost", met.lost);
        self.count("ends told", met.over);
        self.silent().await?;
        let settled = self.settle().await?;
        let setup = Setup { lease: 5_000_000, calm_at: self.bed.now(), settled, ..Setup::default() };
        let history = History::gather(self.bed.client().await?, self.bed.folder(), setup).await?;
        self.count("tasks", history.tasks.len() as u64);
        self.count("events", history.tasks.values().map(|task| task.last_seq).sum());
        self.outcome.violations.extend(check(&history));
        Ok(self.outcome)
    }

    fn count(&mut self, what: &'static str, by: u64) {
        *self.outcome.counts.entry(what).or_default() += by;
        if by == 0 {
            self.outcome.not_fired.push(format!("{what}: none"));
        }
    }

    /// Submits a task that tells so much.
    async fn submit(&self, number: u64, op: Op) -> Result<(&'static str, TaskId), Anyhow> {
        let tenant = TENANTS[usize::from(number % 5 == 4)];
        let program = Program { number, marker: marker(tenant), ops: vec![op], ends: Ends::Well };
        let task = NewTask::new(HANDLER, &program).tenant(tenant);
        let (id, owner) = (task.id, tenant.to_owned());
        let open = self.records.ask(Ask::Submit { id, tenant: owner, key: None, equal: None })?;
        let accepted = self.bed.client().await?.for_tenant(tenant).submit(task).await?;
        self.records.answer(open, Answer::Done { task: accepted.id, state: None })?;
        Ok((tenant, id))
    }

    /// All readers to their end, while servers come and go.
    async fn many(&mut self) -> Result<Met, Anyhow> {
        let count = 3 * u64::from(self.plan.reconnects).max(10);
        let until = Instant::now() + self.plan.bound;
        let mut reading = JoinSet::new();
        let mut told = None;
        for number in 0..self.plan.readers {
            let bytes = self.chance.between(10, 3_000);
            if number % PER_TASK == 0 {
                let every_ms = u64::try_from(EVENT_EVERY.as_millis())?;
                told = Some(self.submit(number, Op::Tell { count, bytes: bytes as usize, every_ms }).await?);
            }
            // The first of them has just made one.
            let Some((tenant, task)) = told else { continue };
            let manner = match number % PER_TASK {
                0 | 5 => Manner::Socket,
                1 | 6 => Manner::Slow,
                _ => Manner::Quick,
            };
            let reader = Reader {
                tenant,
                task,
                number: number + 1,
                after: 0,
                reconnects: self.plan.reconnects,
                // So that it is read to its end with as many reconnects, more or less.
                bytes: count * (bytes + 250) / u64::from(self.plan.reconnects + 1),
                manner,
                insists: true,
                until,
            };
            let (web, records) = (Arc::clone(&self.web), Arc::clone(&self.records));
            reading.spawn(async move { reader.read(&web, &records).await });
        }
        let (mut met, mut faults, mut next) = (Met::default(), 0, Instant::now() + FAULT_EVERY);
        while !reading.is_empty() {
            tokio::select! {
                Some(done) = reading.join_next() => {
                    let Met { connections, cut, lost, over } = done??;
                    met.connections += connections;
                    met.cut += cut;
                    met.lost += lost;
                    met.over += over;
                }
                () = tokio::time::sleep_until(next), if faults < self.plan.faults => {
                    self.disturb(faults).await?;
                    faults += 1;
                    next = Instant::now() + FAULT_EVERY;
                }
            }
        }
        for (what, faulty) in [("servers killed", 0), ("servers frozen", 1), ("servers stopped", 2)] {
            let times = (0..faults).filter(|number| number % 3 == faulty).count() as u64;
            self.count(what, times);
        }
        if faults < self.plan.faults {
            self.outcome.not_fired.push(format!("{} of {} faults: readers were done", faults, self.plan.faults));
        }
        let least = self.plan.readers * u64::from(self.plan.reconnects);
        if met.connections < least {
            self.outcome.not_fired.push(format!("{} connections of {least}", met.connections));
        }
        Ok(met)
    }

    /// Kills, freezes or stops one of the servers; it is there again afterwards.
    async fn disturb(&mut self, number: u32) -> Result<(), Anyhow> {
        let turn = self.chance.between(0, self.servers.len() as u64 - 1) as usize;
        let post = &mut self.servers[turn];
        match number % 3 {
            0 => post.process.kill()?,
            1 => {
                post.process.freeze()?;
                sleep(Duration::from_millis(1_200)).await;
                return Ok(post.process.thaw()?);
            }
            _ => {
                post.process.terminate()?;
                let until = Instant::now() + Duration::from_secs(3);
                while post.process.ended()?.is_none() && Instant::now() < until {
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
        // The old one is killed, if it still ends its streams.
        post.process.kill()?;
        post.process = self.bed.start("server", &post.words, &[])?;
        Ok(())
    }

    /// How many streams a server has, by its own count.
    async fn streams_of(&self, server: usize) -> Option<u64> {
        let url = format!("http://{}/metrics", self.web.wires().servers[server]);
        let token = self.web.token(TENANTS[0]);
        let answer = reqwest::Client::builder().no_proxy().build().ok()?.get(url).bearer_auth(token).send().await;
        let text = answer.ok()?.text().await.ok()?;
        text.lines().find_map(|line| line.strip_prefix("longhaul_sse_clients ")?.trim().parse().ok())
    }

    /// Those who ask and never read.
    async fn silent(&mut self) -> Result<(), Anyhow> {
        let (count, bytes) = MUCH;
        let (tenant, task) = self.submit(self.plan.readers, Op::Tell { count, bytes, every_ms: 0 }).await?;
        self.bed.client().await?.for_tenant(tenant).wait(task, self.plan.bound).await?;
        let path = format!("/v1/tasks/{task}/events");
        let sizes = |servers: &[Post]| -> Vec<u64> {
            servers.iter().map(|post| resident(post.process.id()).unwrap_or(0)).collect()
        };
        let (before, mut most) = (sizes(&self.servers), vec![0; self.servers.len()]);
        let mut silent = Vec::new();
        let until = Instant::now() + self.plan.bound;
        while (silent.len() as u64) < self.plan.silent && Instant::now() < until {
            match self.web.request(tenant, &Asking::get(&path)).send().await {
                Ok(response) if response.status() == 200 => silent.push(response),
                _ => sleep(Duration::from_millis(100)).await,
            }
        }
        let until = Instant::now() + CUT_OFF * 8;
        let mut open = true;
        while open && Instant::now() < until {
            sleep(Duration::from_millis(200)).await;
            most = most.into_iter().zip(sizes(&self.servers)).map(|(most, now)| most.max(now)).collect();
            open = false;
            for server in 0..self.servers.len() {
                open |= self.streams_of(server).await != Some(0);
            }
        }
        let may_grow = MAY_GROW.0 + MAY_GROW.1 * self.plan.silent;
        let grew = most.iter().zip(&before).map(|(most, before)| most.saturating_sub(*before)).max().unwrap_or(0);
        self.outcome.counts.insert("KiB a server grew under silent readers", grew / 1024);
        if (silent.len() as u64) < self.plan.silent {
            self.outcome.not_fired.push(format!("{} of {} silent readers", silent.len(), self.plan.silent));
        }
        if open {
            self.broken(task, "readers that never read were not cut off".to_owned());
        }
        if grew > may_grow {
            self.broken(task, format!("a server grew by {grew} bytes for readers that never read"));
        }
        for (number, response) in silent.into_iter().enumerate() {
            self.go_on(tenant, task, number as u64, response).await?;
        }
        Ok(())
    }

    /// Reads what had come before the cut, and then the rest.
    async fn go_on(
        &mut self,
        tenant: &'static str,
        task: TaskId,
        number: u64,
        mut response: reqwest::Response,
    ) -> Result<(), Anyhow> {
        let number = self.plan.readers + 1 + number;
        let mut stream = Stream { task, after: 0, events: Vec::new(), ended: false, reader: Some(number) };
        let mut frames = Frames::default();
        while let Ok(Some(chunk)) = response.chunk().await {
            stream.events.extend(frames.take(&chunk).into_iter().map(|(seq, data)| (seq, digest(&data))));
        }
        let after = stream.events.last().map_or(0, |(seq, _)| *seq);
        if after >= MUCH.0 {
            self.broken(task, "a reader that never read was given everything".to_owned());
        }
        self.records.read_events(stream)?;
        self.count("silent readers cut off", 1);
        let until = Instant::now() + self.plan.bound;
        let (manner, reconnects) = (Manner::Quick, 0);
        let reader = Reader { tenant, task, number, after, reconnects, bytes: 0, manner, insists: false, until };
        reader.read(&self.web, &self.records).await?;
        Ok(())
    }

    fn broken(&mut self, task: TaskId, what: String) {
        self.outcome.violations.push(Violation { invariant: 6, task: Some(task), what });
    }

    /// Whether all tasks have ended within the bound.
    async fn settle(&self) -> Result<bool, Anyhow> {
        let until = Instant::now() + self.plan.bound;
        loop {
            let mut open = 0;
            let client = self.bed.client().await?;
            for client in TENANTS.map(|tenant| client.for_tenant(tenant)) {
                open += list(&client, None).await?.iter().filter(|task| !task.state.is_final()).count();
            }
            if open == 0 || Instant::now() > until {
                return Ok(open == 0);
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}
