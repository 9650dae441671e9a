//! A soak: mixed load for an hour, while processes are killed, frozen and the database server is restarted. Some processes are
//! left alone all the time: their memory and their open files must not grow, nor the store, from which old tasks are removed.
//!
//! How growth is judged: the first third is a warm-up and does not count. Through the samples of the rest a line is laid whose slope
//! is the median of the slopes between any two of them (Theil and Sen), so that peaks and single odd samples do not matter: up to a
//! quarter of all samples may be anything. What the line rises in that time is the growth, and it may be a tenth of the median
//! level, or a small amount that is noise at any level.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use longhaul::{Settings, State};
use tokio::time::{Instant, sleep};

use crate::Anyhow;
use crate::bed::{Bed, Kind};
use crate::chance::Chance;
use crate::history::list;
use crate::ledger::boot_micros;
use crate::process::Process;
use crate::program::TENANTS;
use crate::records::Records;
use crate::serve::Wires;
use crate::ticks;

/// What is done.
#[derive(Clone, Debug)]
pub struct Soak {
    /// On which store.
    pub kind: Kind,
    /// The seed.
    pub seed: u64,
    /// For how long.
    pub time: Duration,
    /// The time between tasks.
    pub every: Duration,
    /// The time between faults.
    pub fault_every: Duration,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Soaked {
    /// What happened, by name.
    pub counts: BTreeMap<&'static str, u64>,
    /// What was measured, in a sentence each.
    pub measured: Vec<String>,
    /// What did not hold.
    pub wrong: Vec<String>,
}

/// Something that is measured again and again.
#[derive(Clone, Debug)]
struct Series {
    what: String,
    unit: &'static str,
    /// So much growth is noise at any level.
    noise: f64,
    /// Seconds and value.
    samples: Vec<(f64, f64)>,
}

/// The share of the level that growth may be.
const SHARE: f64 = 0.10;
/// The time between samples.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// Tasks of one client process.
const SLICE: u64 = 400;
/// How long everything may take to settle in the end.
const BOUND: Duration = Duration::from_secs(180);
const MIB: f64 = 1_048_576.0;

/// How much a series grew by the line through it, and its median level; `None` of fewer than ten samples.
fn growth(samples: &[(f64, f64)]) -> Option<(f64, f64)> {
    if samples.len() < 10 {
        return None;
    }
    let mut slopes = Vec::new();
    for (place, (from, low)) in samples.iter().enumerate() {
        let later = samples[place + 1..].iter().filter(|(to, _)| to > from);
        slopes.extend(later.map(|(to, high)| (high - low) / (to - from)));
    }
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let span = samples.last()?.0 - samples.first()?.0;
    let level = median(samples.iter().map(|(_, value)| *value).collect())?;
    Some((median(slopes)? * span, level))
}

impl Series {
    fn new(what: String, unit: &'static str, noise: f64) -> Self {
        Self { what, unit, noise, samples: Vec::new() }
    }

    /// What was measured after the warm-up, in a sentence; an error where it grew.
    fn judge(&self, warm: f64) -> Result<String, String> {
        let kept: Vec<(f64, f64)> = self.samples.iter().copied().filter(|(at, _)| *at >= warm).collect();
        let Some((grew, level)) = growth(&kept) else {
            return Err(format!("{}: only {} samples", self.what, kept.len()));
        };
        let (what, unit, may) = (&self.what, self.unit, (SHARE * level).max(self.noise));
        let text =
            format!("{what}: {level:.1} {unit}, grew by {grew:.1} (allowed {may:.1}) in {} samples", kept.len());
        if grew > may { Err(text) } else { Ok(text) }
    }
}

/// The resident memory of a process, bytes.
pub fn resident(process: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// How many files a process has open.
fn open_files(process: u32) -> Option<u64> {
    Some(std::fs::read_dir(format!("/proc/{process}/fd")).ok()?.count() as u64)
}

/// The size of the store, bytes.
async fn size(bed: &Bed) -> Option<u64> {
    if let Some(server) = &bed.server {
        let (client, connection) = tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.ok()?;
        let connection = tokio::spawn(connection);
        let row = client.query_one("SELECT pg_database_size(current_database())", &[]).await;
        connection.abort();
        return u64::try_from(row.ok()?.try_get::<_, i64>(0).ok()?).ok();
    }
    let sizes = ["prove.db", "prove.db-wal"].map(|name| std::fs::metadata(bed.folder().join("store").join(name)));
    Some(sizes.into_iter().flatten().map(|file| file.len()).sum())
}

/// A process that is there again when it was killed.
struct Post {
    role: &'static str,
    words: Vec<String>,
    process: Process,
    frozen: Option<Instant>,
}

impl Post {
    fn start(bed: &Bed, role: &'static str, words: &[&str]) -> Result<Self, Anyhow> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let process = bed.start(role, &words, &[])?;
        Ok(Self { role, words, process, frozen: None })
    }
}

/// Runs it. `None`: the store cannot be had here.
pub async fn soak(plan: &Soak, program: &Path) -> Result<Option<Soaked>, Anyhow> {
    let Some(bed) = Bed::make(plan.kind, program).await? else { return Ok(None) };
    let retention = Some(plan.time / 6);
    let client = bed.client().await?;
    client.configure(&Settings { retention, ..Settings::default() }).await?;
    let wires = Wires::lay(client, bed.folder(), 2).await?;
    let [first, second] = [wires.servers[0], wires.servers[1]].map(|address| address.to_string());
    let mut people = bed.start("people", &[], &[])?;
    let mut receiver = bed.start("receiver", &[], &[])?;
    ticks::begin(client).await?;
    let worker = ["--slots", "16", "--lease-ms", "3000"];
    let listener = ["--lease-ms", "1000"];
    let mut steady = [
        Post::start(&bed, "worker", &worker)?,
        Post::start(&bed, "server", &["--listen", &first])?,
        Post::start(&bed, "listener", &listener)?,
    ];
    let mut posts = vec![
        Post::start(&bed, "worker", &worker)?,
        Post::start(&bed, "worker", &worker)?,
        Post::start(&bed, "server", &["--listen", &second])?,
        Post::start(&bed, "listener", &listener)?,
    ];
    let mut run = Run { plan, bed: &bed, chance: Chance::of(plan.seed, u64::MAX), soaked: Soaked::default() };
    let mut series: Vec<Series> = steady
        .iter()
        .flat_map(|post| {
            let memory = Series::new(format!("memory of the {}", post.role), "MiB", 8.0);
            // Connections of clients come and go.
            [memory, Series::new(format!("open files of the {}", post.role), "files", 16.0)]
        })
        .collect();
    series.push(Series::new("size of the store".to_owned(), "MiB", 8.0));
    run.go(&mut posts, &steady, &mut series).await?;
    ticks::end(client).await?;
    run.settle(&mut posts).await?;
    for post in &mut steady {
        if let Some(status) = post.process.ended()? {
            run.soaked.wrong.push(format!("the {} that was left alone ended with {status}", post.role));
        }
    }
    for (name, process) in [("people", &mut people), ("the receiver", &mut receiver)] {
        if let Some(status) = process.ended()? {
            run.soaked.wrong.push(format!("{name} ended with {status}"));
        }
    }
    let warm = plan.time.as_secs_f64() / 3.0;
    for series in &series {
        match series.judge(warm) {
            Ok(said) => run.soaked.measured.push(said),
            Err(said) => run.soaked.wrong.push(said),
        }
    }
    for sight in Records::sights(bed.folder())? {
        if sight.carries.iter().any(|other| *other != sight.tenant) {
            run.soaked.wrong.push(format!("{} was shown another tenant's: {}", sight.tenant, sight.what));
        }
    }
    for what in ["kills", "freezes"] {
        if run.soaked.counts.get(what).is_none_or(|count| *count == 0) {
            run.soaked.wrong.push(format!("{what}: none"));
        }
    }
    Ok(Some(run.soaked))
}

struct Run<'a> {
    plan: &'a Soak,
    bed: &'a Bed,
    chance: Chance,
    soaked: Soaked,
}

impl Run<'_> {
    fn count(&mut self, what: &'static str, by: u64) {
        *self.soaked.counts.entry(what).or_default() += by;
    }

    /// Load, faults and samples, for as long as the plan says.
    async fn go(&mut self, posts: &mut [Post], steady: &[Post], series: &mut [Series]) -> Result<(), Anyhow> {
        let begin = Instant::now();
        let (mut sample_at, mut fault_at) = (begin + SAMPLE_EVERY, begin + self.plan.fault_every);
        let (mut slices, mut faults): (u64, u64) = (0, 0);
        let mut clients: Vec<Process> = Vec::new();
        while begin.elapsed() < self.plan.time {
            if begin.elapsed() >= self.plan.every * u32::try_from(slices * SLICE)? {
                for number in 0..2 {
                    clients.push(self.client(slices, number)?);
                }
                slices += 1;
                self.count("tasks submitted", SLICE);
            }
            let mut going_on = Vec::new();
            for mut client in clients {
                match client.ended()? {
                    None => going_on.push(client),
                    Some(status) if status.success() => {}
                    Some(status) => return Err(format!("a client ended with {status}").into()),
                }
            }
            clients = going_on;
            let now = Instant::now();
            if now >= fault_at {
                fault_at = now + self.plan.fault_every;
                faults += 1;
                self.fault(faults, posts).await?;
            }
            self.look_after(posts)?;
            if now >= sample_at {
                sample_at = now + SAMPLE_EVERY;
                let at = begin.elapsed().as_secs_f64();
                let mut values = Vec::new();
                for post in steady {
                    let process = post.process.id();
                    values.push(resident(process).map(|bytes| bytes as f64 / MIB));
                    values.push(open_files(process).map(|files| files as f64));
                }
                values.push(size(self.bed).await.map(|bytes| bytes as f64 / MIB));
                for (series, value) in series.iter_mut().zip(values) {
                    series.samples.extend(value.map(|value| (at, value)));
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
        let until = Instant::now() + BOUND;
        while !clients.is_empty() && Instant::now() < until {
            self.look_after(posts)?;
            clients.retain_mut(|client| matches!(client.ended(), Ok(None)));
            sleep(Duration::from_millis(100)).await;
        }
        if !clients.is_empty() {
            self.soaked.wrong.push(format!("{} clients did not come to an end", clients.len()));
        }
        Ok(())
    }

    fn client(&self, slice: u64, number: u64) -> Result<Process, Anyhow> {
        let words = [
            ("--seed", self.plan.seed.to_string()),
            ("--client", number.to_string()),
            ("--clients", "2".to_owned()),
            ("--from", (slice * SLICE).to_string()),
            ("--tasks", ((slice + 1) * SLICE).to_string()),
            ("--limited", "8".to_owned()),
            ("--every-us", self.plan.every.as_micros().to_string()),
            ("--begin-at", boot_micros().to_string()),
        ];
        let mut words: Vec<String> =
            words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
        if number == 1 {
            words.push("--http".to_owned());
        }
        self.bed.start("client", &words, &[])
    }

    /// Something goes wrong.
    async fn fault(&mut self, number: u64, posts: &mut [Post]) -> Result<(), Anyhow> {
        if let Some(server) = self.bed.server.as_ref().filter(|_| number.is_multiple_of(20)) {
            server.down("fast")?;
            sleep(Duration::from_millis(200)).await;
            server.up()?;
            self.count("server restarts", 1);
            return Ok(());
        }
        let turn = self.chance.between(0, posts.len() as u64 - 1) as usize;
        let post = &mut posts[turn];
        if post.frozen.is_some() {
            return Ok(());
        }
        if number.is_multiple_of(4) {
            post.process.freeze()?;
            post.frozen = Some(Instant::now() + Duration::from_secs(5));
            self.count("freezes", 1);
        } else {
            post.process.kill()?;
            self.count("kills", 1);
        }
        Ok(())
    }

    /// Thaws what was frozen, and starts again what ended.
    fn look_after(&mut self, posts: &mut [Post]) -> Result<(), Anyhow> {
        for post in posts {
            if post.frozen.is_some_and(|until| until <= Instant::now()) {
                post.frozen = None;
                post.process.thaw()?;
            }
            if post.process.ended()?.is_some() {
                post.process = self.bed.start(post.role, &post.words, &[])?;
            }
        }
        Ok(())
    }

    /// Waits until everything has ended.
    async fn settle(&mut self, posts: &mut [Post]) -> Result<(), Anyhow> {
        let until = Instant::now() + BOUND;
        loop {
            self.look_after(posts)?;
            let mut open = 0;
            let client = self.bed.client().await?;
            for client in TENANTS.map(|tenant| client.for_tenant(tenant)) {
                for state in State::ALL.into_iter().filter(|state| !state.is_final()) {
                    open += list(&client, Some(state)).await?.len();
                }
            }
            if open == 0 {
                return Ok(());
            }
            if Instant::now() > until {
                self.soaked.wrong.push(format!("{open} tasks have not ended"));
                return Ok(());
            }
            sleep(Duration::from_millis(200)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples of ten minutes with noise, one in five of them a peak.
    fn series(value: impl Fn(f64) -> f64) -> Series {
        let mut chance = Chance::new(5);
        let mut series = Series::new("memory".into(), "MiB", 8.0);
        for sample in 0..120 {
            let at = f64::from(sample) * 5.0;
            let noise = chance.between(0, 400) as f64 / 100.0;
            let peak = if chance.percent(20) { 60.0 } else { 0.0 };
            series.samples.push((at, value(at) + noise + peak));
        }
        series
    }

    #[test]
    fn noise_peaks_and_a_warm_up_are_no_growth() {
        assert!(series(|_| 100.0).judge(200.0).is_ok());
        let warms_up = series(|at| if at < 180.0 { at } else { 180.0 });
        assert!(warms_up.judge(200.0).is_ok());
        assert!(series(|at| 200.0 - at / 10.0).judge(200.0).is_ok(), "it may shrink");
    }

    #[test]
    fn a_leak_is_growth_also_a_slow_one_and_one_by_steps() {
        assert!(series(|at| 100.0 + at / 10.0).judge(200.0).is_err());
        assert!(series(|at| 100.0 + 15.0 * (at / 400.0)).judge(200.0).is_err(), "15 MiB of 100");
        assert!(series(|at| 100.0 + 12.0 * (at / 100.0).floor()).judge(200.0).is_err());
        assert!(series(|_| 100.0).judge(590.0).is_err(), "too few samples say nothing");
    }

    #[test]
    fn this_process_has_memory_and_files() {
        let own = std::process::id();
        assert!(resident(own).is_some_and(|bytes| bytes > 1 << 20));
        assert!(open_files(own).is_some_and(|files| files > 2));
        assert_eq!(resident(u32::MAX), None);
    }
}
