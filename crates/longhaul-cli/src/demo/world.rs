//! The demo's folder: the store, the manifests, the configuration of its processes, the sandbox that deployments change,
//! and the ledger.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::ledger;
use crate::exit::Failure;

/// What a deployment makes in the sandbox, each a folder with a file for every app, and the step that does.
pub(super) const PLACES: [(&str, &str); 4] =
    [("create_dns", "dns"), ("create_cert", "cert"), ("start_container", "container"), ("go_live", "live")];
/// Where restarts are noted.
pub(super) const RESTARTS: &str = "restarts";
/// A version that never becomes healthy.
pub(super) const BROKEN: &str = "v2-broken";

const MANIFESTS: [(&str, &str); 2] = [
    ("deploy.toml", include_str!("manifests/deploy.toml")),
    ("oncall.toml", include_str!("manifests/oncall.toml")),
];

/// What is in a file of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Thing {
    pub(super) app: String,
    pub(super) version: String,
    /// Whose it is: the task that made it.
    pub(super) task: String,
    pub(super) healthy: bool,
}

/// The files of the sandbox, by place and app.
pub(super) type Sandbox = BTreeMap<(String, String), Thing>;

/// See the module. Removed when dropped, unless it is to be kept.
pub(super) struct World {
    folder: TempDir,
}

impl World {
    pub(super) fn make(slots: usize, lease: &str) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::internal(format!("cannot make the folder of the demo: {error}"));
        let folder = tempfile::Builder::new().prefix("longhaul-demo-").tempdir().map_err(failed)?;
        let world = Self { folder };
        world.fill(slots, lease).map_err(failed)?;
        Ok(world)
    }

    fn fill(&self, slots: usize, lease: &str) -> io::Result<()> {
        for place in PLACES.iter().map(|(_, place)| *place).chain([RESTARTS]) {
            fs::create_dir_all(self.sandbox().join(place))?;
        }
        fs::create_dir(self.path("logs"))?;
        let manifests = self.path("manifests");
        fs::create_dir(&manifests)?;
        for (name, text) in MANIFESTS {
            fs::write(manifests.join(name), text)?;
        }
        // The steps need no other program than this one.
        std::os::unix::fs::symlink(std::env::current_exe()?, manifests.join("longhaul"))?;
        let config = format!(
            "# The processes of the demo; 'longhaul up' in this folder takes it up again.\n\n\
             [store]\nurl = \"sqlite:longhaul.db\"\n\n\
             [worker]\nmanifests = \"manifests\"\nslots = {slots}\nlease = \"{lease}\"\ndrain = \"1s\"\n\n\
             [telemetry]\nlog = \"json\"\nlevel = \"info\"\n"
        );
        fs::write(self.config(), config)
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn config(&self) -> PathBuf {
        self.path("longhaul.toml")
    }

    pub(super) fn ledger(&self) -> PathBuf {
        self.path(ledger::FILE)
    }

    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.path("logs").join(format!("{name}.log"))
    }

    fn sandbox(&self) -> PathBuf {
        self.path("sandbox")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What there is in the sandbox now.
    pub(super) fn read_sandbox(&self) -> io::Result<Sandbox> {
        let mut found = Sandbox::new();
        for place in PLACES.iter().map(|(_, place)| *place).chain([RESTARTS]) {
            for entry in fs::read_dir(self.sandbox().join(place))? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                // A file that a kill left half-written, before it was given its name.
                if name.starts_with('.') {
                    continue;
                }
                let thing = serde_json::from_slice(&fs::read(entry.path())?)?;
                found.insert((place.to_owned(), name), thing);
            }
        }
        Ok(found)
    }

    /// Leaves the folder where it is.
    pub(super) fn keep(self) -> PathBuf {
        self.folder.keep()
    }

    /// Removes the folder. What a process that was killed a moment ago still writes is waited out.
    pub(super) async fn remove(self) {
        let path = self.folder.keep();
        for pause_ms in [0, 20, 100, 300, 1_000] {
            tokio::time::sleep(std::time::Duration::from_millis(pause_ms)).await;
            match fs::remove_dir_all(&path) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return,
                Err(_) => {}
            }
        }
        crate::out::note(format!("longhaul: the folder {} is left over; remove it", path.display()));
    }
}
