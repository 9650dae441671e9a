//! A PostgreSQL server of the suite's own, which can be stopped and started.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Anyhow;

/// A running server; stopped with this value.
#[derive(Debug)]
pub struct Server {
    bin: PathBuf,
    folder: tempfile::TempDir,
    port: u16,
}

impl Server {
    /// A new server; `None` where PostgreSQL's programs are not known (`LONGHAUL_TEST_PG_BIN`).
    pub fn start() -> Result<Option<Self>, Anyhow> {
        let Some(bin) = std::env::var_os("LONGHAUL_TEST_PG_BIN").map(PathBuf::from) else { return Ok(None) };
        let folder = tempfile::tempdir_in("/tmp")?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let server = Self { bin, folder, port };
        if rustix::process::geteuid().is_root() {
            let owned = Command::new("chown").arg("postgres").arg(server.folder.path()).status()?;
            if !owned.success() {
                return Err("the server's folder cannot be given to the user postgres".into());
            }
        }
        server.call("initdb", &["-U", "postgres", "-A", "trust", "--no-sync", "-D", "DATA"])?;
        server.up()?;
        Ok(Some(server))
    }

    /// Starts it again.
    pub fn up(&self) -> Result<(), Anyhow> {
        let options = format!(
            "-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories={}",
            self.port,
            self.folder.path().display()
        );
        self.call("pg_ctl", &["-D", "DATA", "-l", "LOG", "-s", "-w", "-o", &options, "start"])
    }

    /// Stops it: `immediate` as in a crash, `fast` with a checkpoint.
    pub fn down(&self, mode: &str) -> Result<(), Anyhow> {
        self.call("pg_ctl", &["-D", "DATA", "-s", "-w", "-m", mode, "stop"])
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Runs one of PostgreSQL's programs, as the user postgres when this is root.
    fn call(&self, program: &str, words: &[&str]) -> Result<(), Anyhow> {
        let place = |name: &str| self.folder.path().join(name).display().to_string();
        let words = words.iter().map(|word| match *word {
            "DATA" => place("data"),
            "LOG" => place("log"),
            word => word.to_owned(),
        });
        let program: &Path = &self.bin.join(program);
        let mut command = if rustix::process::geteuid().is_root() {
            let mut command = Command::new("runuser");
            command.args(["-u", "postgres", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        let ran = command.args(words).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        if !ran.success() {
            return Err(format!("{} failed", program.display()).into());
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.folder.path().join("data/postmaster.pid").exists() {
            // It ends with its folder all the same.
            let _ = self.down("immediate");
        }
    }
}
