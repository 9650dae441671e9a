//! A child in a process group of its own, so that it ends with everything it started.
//!
//! The group is killed when the call ends and when its future is dropped. When the worker itself
//! is killed, its watchdog kills the group (see `watchdog.rs`).

use std::io;
use std::process::ExitStatus;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{SignalKind, signal};

use super::watchdog;

/// A running child and its group.
pub(super) struct Group {
    child: Child,
    /// The group's id, which is its leader's; `None` once the group was killed. It is killed
    /// before its leader is reaped wherever possible, because the number can be another's after.
    id: Option<Pid>,
}

impl Group {
    pub(super) fn start(mut command: Command) -> io::Result<Self> {
        let child = command.process_group(0).kill_on_drop(true).spawn()?;
        let id = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(id) = id {
            watchdog::watch(id);
        }
        Ok(Self { child, id })
    }

    pub(super) fn pipes(&mut self) -> (Option<ChildStdin>, Option<ChildStdout>, Option<ChildStderr>) {
        (self.child.stdin.take(), self.child.stdout.take(), self.child.stderr.take())
    }

    /// Returns when the child has ended, without reaping it where the system can tell.
    pub(super) async fn leader_exited(&mut self) {
        if let Some(id) = self.id
            && let Ok(mut deaths) = signal(SignalKind::child())
        {
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
            while let Ok(None) = waitid(WaitId::Pid(id), look) {
                if deaths.recv().await.is_none() {
                    break;
                }
            }
            if let Ok(Some(_)) = waitid(WaitId::Pid(id), look) {
                return;
            }
        }
        // Should this fail, `reap` fails too and says so.
        let _ = self.child.wait().await;
    }

    /// Ends everything that is still in the group.
    pub(super) fn kill(&mut self) {
        if let Some(id) = self.id.take() {
            // It fails when nothing is left.
            let _ = kill_process_group(id, Signal::KILL);
            watchdog::forget(id);
        }
    }

    pub(super) async fn reap(&mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}
