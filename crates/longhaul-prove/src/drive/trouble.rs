//! What goes wrong at some moment of a run with the disk, the network or the server, beside kills and failpoints: which,
//! in which order, and for how long. Each trouble must show: one that nobody noticed did not happen, and the run fails.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::{Clients, Driver, Faults, Post};
use crate::Anyhow;
use crate::chance::Chance;
use crate::disk::{Counted, Disk, Room, Syncs};
use crate::proxy::Wrong;

/// How long something has to show.
const TO_SHOW: Duration = Duration::from_secs(10);

/// Something that goes wrong once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Everything stops, and what was not synced is gone.
    PowerLoss,
    /// The store's disk is full for a while.
    DiskFull,
    /// Fsync fails for a while.
    SyncsFail,
    /// Fsync fails once.
    SyncFailsOnce,
    /// Something between the processes and the server.
    Network(Wrong),
    /// Nobody hears of others any more, until it connects anew.
    Deaf,
    /// The server's connections are all in use.
    Exhausted,
    /// Someone locks the tasks, and whoever needs them waits with its connection.
    Locked,
    /// The server's disk is full for a while.
    ServerFull,
    /// The broker is killed, and away for a while.
    BrokerDown,
}

impl Trouble {
    fn name(self) -> &'static str {
        match self {
            Self::PowerLoss => "a power loss",
            Self::DiskFull => "a full disk",
            Self::SyncsFail | Self::SyncFailsOnce => "a failing fsync",
            Self::Network(Wrong::Cut) => "a connection cut",
            Self::Network(Wrong::Hold) => "bytes held back",
            Self::Network(Wrong::LostAnswer) => "a commit's answer lost",
            Self::Deaf => "a lost LISTEN",
            Self::Exhausted => "exhausted connections",
            Self::Locked => "locked tasks",
            Self::ServerFull => "a full disk of the server",
            Self::BrokerDown => "a broker that is down",
        }
    }

    /// As it is counted.
    pub(super) fn counted(self) -> &'static str {
        match self {
            Self::PowerLoss => "power losses",
            Self::DiskFull => "full disks",
            Self::SyncsFail | Self::SyncFailsOnce => "times of failing fsyncs",
            Self::Network(Wrong::Cut) => "connections cut",
            Self::Network(Wrong::Hold) => "times bytes were held back",
            Self::Network(Wrong::LostAnswer) => "answers of commits lost",
            Self::Deaf => "times LISTEN was lost",
            Self::Exhausted => "times connections were exhausted",
            Self::Locked => "times the tasks were locked",
            Self::ServerFull => "times the server's disk was full",
            Self::BrokerDown => "kills of the broker",
        }
    }
}

/// Trouble that lasts.
pub(super) struct Window {
    trouble: Trouble,
    until: Instant,
    give_up: Instant,
    /// How much of it was counted when it began, by the shim or by the processes.
    before: u64,
    /// The connections that are held meanwhile.
    pub(super) held: Vec<tokio_postgres::Client>,
}

impl Window {
    pub(super) fn new(trouble: Trouble, time: Duration, before: u64) -> Self {
        let now = Instant::now();
        Self { trouble, until: now + time, give_up: now + time + TO_SHOW, before, held: Vec::new() }
    }
}

/// The troubles of a run.
#[derive(Default)]
pub(super) struct Storm {
    left: VecDeque<Trouble>,
    total: usize,
    window: Option<Window>,
    /// When the proxy was last told something.
    armed_at: Option<Instant>,
}

impl Storm {
    /// All troubles, in an order by chance.
    pub(super) fn plan(faults: &Faults, chance: &mut Chance) -> Self {
        let (disk, network) = (&faults.disk, &faults.network);
        let syncs =
            |number: u32| if number.is_multiple_of(2) { Trouble::SyncFailsOnce } else { Trouble::SyncsFail };
        let mut left: Vec<Trouble> = (0..disk.failed_syncs).map(syncs).collect();
        for (trouble, times) in [
            (Trouble::PowerLoss, disk.power_losses),
            (Trouble::DiskFull, disk.disk_full),
            (Trouble::Network(Wrong::Cut), network.cuts),
            (Trouble::Network(Wrong::Hold), network.holds),
            (Trouble::Network(Wrong::LostAnswer), network.lost_answers),
            (Trouble::Deaf, network.deaf),
            (Trouble::Exhausted, network.exhausted),
            (Trouble::Locked, network.locked),
            (Trouble::ServerFull, network.server_full),
            (Trouble::BrokerDown, faults.broker),
        ] {
            left.extend((0..times).map(|_| trouble));
        }
        for place in (1..left.len()).rev() {
            left.swap(place, chance.between(0, place as u64) as usize);
        }
        Self { total: left.len(), left: left.into(), ..Self::default() }
    }

    /// Whether something is still to come, or under way.
    pub(super) fn goes_on(&self) -> bool {
        !self.left.is_empty() || self.window.is_some() || self.armed_at.is_some()
    }

    /// Whether the next may begin: `share` of everything else is done.
    pub(super) fn is_next(&self, share: f64) -> bool {
        let done = (self.total - self.left.len()) as f64 / self.total.max(1) as f64;
        self.window.is_none() && !self.left.is_empty() && done <= share
    }
}

impl Driver<'_> {
    /// The disk that can be made to fail: the store's, or its server's.
    pub(super) fn disk(&self) -> Result<&Disk, Anyhow> {
        let server = self.bed.server.as_ref().and_then(|server| server.disk.as_ref());
        Ok(self.bed.disk.as_ref().or(server).ok_or("this run has no disk of its own")?)
    }

    /// Begins the next trouble.
    pub(super) async fn befall(
        &mut self,
        storm: &mut Storm,
        posts: &mut [Post],
        clients: &mut Clients,
    ) -> Result<(), Anyhow> {
        let Some(trouble) = storm.left.pop_front() else { return Ok(()) };
        let time = Duration::from_millis(self.chance.between(300, 1_000));
        match trouble {
            Trouble::PowerLoss => self.lose_power(posts, clients)?,
            Trouble::DiskFull | Trouble::ServerFull => {
                // Each in turn, so that a run with two has both.
                let before = self.counts.get(trouble.counted()).copied().unwrap_or(0);
                let room = if before.is_multiple_of(2) { Room::None } else { Room::NoMore };
                let disk = self.disk()?;
                storm.window = Some(Window::new(trouble, time, disk.counted(Counted::NoSpace)?));
                disk.room(room)?;
            }
            Trouble::SyncsFail | Trouble::SyncFailsOnce => {
                let disk = self.disk()?;
                storm.window = Some(Window::new(trouble, time, disk.counted(Counted::FailedSyncs)?));
                disk.syncs(if trouble == Trouble::SyncsFail { Syncs::Fail } else { Syncs::FailOnce })?;
            }
            Trouble::Network(wrong) => {
                self.bed.proxy()?.arm(wrong);
                storm.armed_at = Some(Instant::now());
            }
            Trouble::BrokerDown => {
                self.bed.broker.as_ref().ok_or("this run has no broker")?.kill();
                storm.window = Some(Window::new(trouble, time, 0));
            }
            Trouble::Deaf => self.deafen().await?,
            Trouble::Exhausted => storm.window = Some(self.exhaust().await?),
            Trouble::Locked => storm.window = Some(self.lock_tasks().await?),
        }
        Ok(())
    }

    /// Ends the trouble whose time is over, when it showed.
    pub(super) async fn watch(&mut self, storm: &mut Storm) -> Result<(), Anyhow> {
        if let Some(since) = storm.armed_at {
            let proxy = self.bed.proxy()?;
            if !proxy.waits() {
                storm.armed_at = None;
            } else if since.elapsed() > TO_SHOW {
                proxy.disarm();
                storm.armed_at = None;
            }
        }
        let Some(window) = &storm.window else { return Ok(()) };
        let now = Instant::now();
        if now < window.until {
            return Ok(());
        }
        let showed = match window.trouble {
            Trouble::DiskFull | Trouble::ServerFull => self.disk()?.counted(Counted::NoSpace)? > window.before,
            Trouble::SyncsFail | Trouble::SyncFailsOnce => {
                self.disk()?.counted(Counted::FailedSyncs)? > window.before
            }
            Trouble::Locked => self.bed.empty_pools() > window.before,
            _ => true,
        };
        if !showed && now < window.give_up {
            return Ok(());
        }
        let trouble = window.trouble;
        // With the connections that it held.
        storm.window = None;
        if matches!(trouble, Trouble::DiskFull | Trouble::ServerFull) {
            self.disk()?.room(Room::Enough)?;
        }
        if matches!(trouble, Trouble::SyncsFail | Trouble::SyncFailsOnce) {
            self.disk()?.syncs(Syncs::Work)?;
        }
        if trouble == Trouble::BrokerDown {
            self.bed.broker.as_ref().ok_or("this run has no broker")?.up().await?;
        }
        if trouble == Trouble::ServerFull {
            self.server_is_back().await?;
        }
        if showed {
            self.count(trouble.counted(), 1);
        } else {
            self.not_fired.push(trouble.name().to_owned());
        }
        Ok(())
    }

    /// Counts what showed only in the end.
    pub(super) fn tell_of(&mut self, faults: &Faults) -> Result<(), Anyhow> {
        if let Ok(proxy) = self.bed.proxy() {
            let network = &faults.network;
            for (wrong, planned) in [
                (Wrong::Cut, network.cuts),
                (Wrong::Hold, network.holds),
                (Wrong::LostAnswer, network.lost_answers),
            ] {
                let (trouble, times) = (Trouble::Network(wrong), proxy.happened(wrong));
                *self.counts.entry(trouble.counted()).or_default() += times;
                for _ in times..planned.into() {
                    self.not_fired.push(trouble.name().to_owned());
                }
            }
        }
        let Ok(disk) = self.disk() else { return Ok(()) };
        let told = [
            ("answers that there is no space", Counted::NoSpace),
            ("writes cut short", Counted::Short),
            ("failed fsyncs", Counted::FailedSyncs),
        ];
        let told = told.map(|(name, counted)| disk.counted(counted).map(|times| (name, times)));
        for told in told {
            let (name, times) = told?;
            self.count(name, times);
        }
        if faults.disk.power_losses > 0
            && self.counts.get("unsynced writes dropped").is_none_or(|times| *times == 0)
        {
            self.not_fired.push("an unsynced write dropped by a power loss".to_owned());
        }
        Ok(())
    }
}
