//! A bad disk under SQLite: full, unable to sync, and without power.

use super::{Clients, Driver, Post};
use crate::Anyhow;

/// What goes wrong with the disk of a SQLite store.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DiskFaults {
    /// Power losses: everything is killed, and of what was not synced any part is gone
    #[arg(long, default_value_t = 0)]
    pub power_losses: u32,
    /// Times that the store's disk is full
    #[arg(long, default_value_t = 0)]
    pub disk_full: u32,
    /// Times that fsync fails: once, or for a while
    #[arg(long, default_value_t = 0)]
    pub failed_syncs: u32,
}

impl DiskFaults {
    /// Whether there are any.
    pub fn is_any(&self) -> bool {
        self.power_losses + self.disk_full + self.failed_syncs > 0
    }
}

impl Driver<'_> {
    /// Ends every process at once, takes away what a disk without power might not have, and starts them again.
    pub(super) fn lose_power(&mut self, posts: &mut [Post], clients: &mut Clients) -> Result<(), Anyhow> {
        let of_clients = clients.running.iter_mut().map(|(process, _)| process);
        let mut all: Vec<_> =
            posts.iter_mut().map(|post| &mut post.process).chain(of_clients).chain(self.people.as_mut()).collect();
        // One moment for all: nobody goes on after another's last write.
        for process in &all {
            // One that has just ended is not there any more.
            let _ = process.freeze();
        }
        for process in &mut all {
            process.kill()?;
        }
        let loss = self.bed.disk.as_ref().ok_or("a power loss needs a disk")?.lose_power(&mut self.chance)?;
        self.count("power losses", 1);
        self.count("unsynced writes dropped", loss.dropped);
        self.count("unsynced writes torn", loss.torn);
        self.count("unsynced writes kept", loss.kept);
        self.count("unsynced writes of checkpoints", loss.of_checkpoints);
        for post in posts {
            post.replace(self.bed, None)?;
        }
        // Clients ask for everything again, once: what has a key, or is equal, is still the same task.
        clients.running.retain(|(process, _)| process.starts() == 1);
        for process in clients.running.iter_mut().map(|(process, _)| process).chain(self.people.as_mut()) {
            process.again()?;
        }
        Ok(())
    }
}
