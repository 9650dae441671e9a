//! Confines the commands of agents with bubblewrap, where that is installed and works.
//!
//! Inside, the whole file system is read-only, except the manifest's folder, the folders that the
//! tool names as `write`, and a `/tmp` of its own that ends with the call. Processes of others
//! cannot be seen; `/dev` has only the harmless devices. The network is the worker's, unless the tool says
//! `network = false`. Everything in the sandbox ends with the call, also what left the
//! process group: nothing lives on.
//!
//! Whether it works is tried out once in the life of a worker: in many containers it does not. Then
//! commands run as they do for sagas, and a warning says so once. A tool opts out with `sandbox = false`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::OnceCell;

/// How long the trial may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a command in a sandbox may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    /// Folders it may change besides its own.
    pub write: Vec<PathBuf>,
    /// Whether it has a network.
    pub network: bool,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self { write: Vec::new(), network: true }
    }
}

impl Sandbox {
    pub(super) fn definition(&self) -> Value {
        let write: Vec<_> = self.write.iter().map(|folder| folder.to_string_lossy()).collect();
        json!({"write": write, "network": self.network})
    }

    /// Runs `program` inside; its arguments are still to be added.
    pub(super) fn command(&self, bwrap: &Path, program: &Path, folder: &Path) -> Command {
        let mut command = Command::new(bwrap);
        // A session of its own has no terminal to type into.
        command.args(["--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]);
        if !self.network {
            command.arg("--unshare-net");
        }
        command.args(["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]);
        // After /tmp, because they may lie in it.
        for writable in [folder].into_iter().chain(self.write.iter().map(PathBuf::as_path)) {
            command.args([OsStr::new("--bind"), writable.as_os_str(), writable.as_os_str()]);
        }
        command.args([OsStr::new("--chdir"), folder.as_os_str(), OsStr::new("--"), program.as_os_str()]);
        command
    }
}

/// Where bubblewrap is, if it works here.
pub(super) async fn bwrap() -> Option<&'static Path> {
    static FOUND: OnceCell<Option<PathBuf>> = OnceCell::const_new();
    FOUND.get_or_init(find).await.as_deref()
}

async fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let bwrap = std::env::split_paths(&path).map(|folder| folder.join("bwrap")).find(|file| file.is_file())?;
    let mut trial =
        Sandbox { network: false, ..Sandbox::default() }.command(&bwrap, Path::new("true"), Path::new("/tmp"));
    trial.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let why = match tokio::time::timeout(PATIENCE, trial.output()).await {
        Ok(Ok(tried)) if tried.status.success() => return Some(bwrap),
        Ok(Ok(tried)) => String::from_utf8_lossy(&tried.stderr).trim().to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it did not end".to_owned(),
    };
    tracing::warn!(%why, "bubblewrap does not work here: the commands of agents run without a sandbox");
    None
}
