//! Ends the commands of a worker that was killed itself.
//!
//! A worker that is killed with SIGKILL cannot end its children, and a parent-death signal cannot
//! be set without unsafe code (and would follow the death of a thread, and spare grandchildren).
//! So one small shell process per worker holds the other end of a pipe and a list of process
//! groups: when the pipe closes, the worker is gone, and so are they. Between the start of a
//! command and its entry in the list lie a few microseconds that this does not cover.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::process::Pid;

/// Reads `+ ID` and `- ID`. Deaf to the signals that ask a whole service to stop, because the
/// worker may still be draining then.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
groups=' '
while read -r change id; do
    case $change in
        +) groups="$groups$id " ;;
        -) case $groups in *" $id "*) groups="${groups%% "$id" *} ${groups#* "$id" }" ;; esac ;;
    esac
done
for id in $groups; do kill -s KILL -- "-$id"; done
"#;

static WATCHDOG: Mutex<Watchdog> = Mutex::new(Watchdog { child: None, groups: BTreeSet::new() });

struct Watchdog {
    child: Option<Child>,
    /// What it has to know, should it have to be started again.
    groups: BTreeSet<i32>,
}

/// From now on this group ends with the worker.
pub(super) fn watch(group: Pid) {
    let mut watchdog = WATCHDOG.lock().unwrap_or_else(PoisonError::into_inner);
    watchdog.groups.insert(group.as_raw_pid());
    watchdog.tell('+', group.as_raw_pid());
}

/// This group is over.
pub(super) fn forget(group: Pid) {
    let mut watchdog = WATCHDOG.lock().unwrap_or_else(PoisonError::into_inner);
    watchdog.groups.remove(&group.as_raw_pid());
    watchdog.tell('-', group.as_raw_pid());
}

impl Watchdog {
    fn tell(&mut self, change: char, group: i32) {
        let told = match self.child.as_mut().and_then(|child| child.stdin.as_mut()) {
            // One write, so that it is told whole or not at all.
            Some(pipe) => pipe.write_all(format!("{change} {group}\n").as_bytes()).is_ok(),
            None => false,
        };
        if told {
            return;
        }
        if let Err(error) = self.start() {
            tracing::warn!(%error, "no watchdog: commands would outlive this worker if it were killed");
        }
    }

    /// Starts it, or another one when the first is gone, with all it has to know.
    fn start(&mut self) -> io::Result<()> {
        if let Some(mut gone) = self.child.take() {
            let _ = gone.kill();
            let _ = gone.wait();
        }
        let child = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "longhaul-watchdog"])
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // Kept before anything is written: dropped here, it would take its pipe's end for the worker's.
        let pipe = self.child.insert(child).stdin.as_mut();
        if let Some(pipe) = pipe {
            // A watchdog that hangs must not hang the worker: a full pipe is an error.
            rustix::io::ioctl_fionbio(&*pipe, true)?;
            let all: String = self.groups.iter().map(|group| format!("+ {group}\n")).collect();
            pipe.write_all(all.as_bytes())?;
        }
        Ok(())
    }
}
