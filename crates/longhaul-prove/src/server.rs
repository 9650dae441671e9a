//! A PostgreSQL server of the suite's own, which can be stopped and started.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::Anyhow;
use crate::disk::Disk;

/// A running server; stopped with this value.
#[derive(Debug)]
pub struct Server {
    bin: PathBuf,
    folder: tempfile::TempDir,
    port: u16,
    /// The disk under its data, if it can fail.
    pub disk: Option<Disk>,
}

impl Server {
    /// A new server; `None` where PostgreSQL's programs are not known (`LONGHAUL_TEST_PG_BIN`). `bad_disk`: its disk can
    /// be made to fail.
    pub fn start(bad_disk: bool) -> Result<Option<Self>, Anyhow> {
        let Some(bin) = std::env::var_os("LONGHAUL_TEST_PG_BIN").map(PathBuf::from) else { return Ok(None) };
        let folder = tempfile::tempdir_in("/tmp")?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut server = Self { bin, folder, port, disk: None };
        server.give_to_postgres()?;
        server.call("initdb", &["-U", "postgres", "-A", "trust", "--no-sync", "-D", "DATA"], &[])?;
        if bad_disk {
            let path = server.folder.path();
            server.disk = Some(Disk::make(&path.join("data"), &path.join("disk"), false)?);
            server.give_to_postgres()?;
        }
        server.up()?;
        Ok(Some(server))
    }

    /// Where this is root, the server is not.
    fn give_to_postgres(&self) -> Result<(), Anyhow> {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let owned = Command::new("chown").args(["-R", "postgres"]).arg(self.folder.path()).status()?;
        if !owned.success() {
            return Err("the server's folder cannot be given to the user postgres".into());
        }
        Ok(())
    }

    /// Starts it again.
    pub fn up(&self) -> Result<(), Anyhow> {
        let options = format!(
            "-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories={}",
            self.port,
            self.folder.path().display()
        );
        let variables = self.disk.as_ref().map(Disk::variables).unwrap_or_default();
        self.call("pg_ctl", &["-D", "DATA", "-l", "LOG", "-s", "-w", "-o", &options, "start"], &variables)
    }

    /// Stops it: `immediate` as in a crash, `fast` with a checkpoint.
    pub fn down(&self, mode: &str) -> Result<(), Anyhow> {
        self.call("pg_ctl", &["-D", "DATA", "-s", "-w", "-m", mode, "stop"], &[])
    }

    /// Whether it runs, or tries to.
    pub fn is_up(&self) -> Result<bool, Anyhow> {
        let status =
            self.command("pg_ctl", &["-D", "DATA", "-s", "status"], &[]).stderr(Stdio::null()).status()?;
        Ok(status.success())
    }

    /// How often it gave up and began anew by itself.
    pub fn panics(&self) -> Result<u64, Anyhow> {
        let log = std::fs::read(self.folder.path().join("log"))?;
        Ok(String::from_utf8_lossy(&log).lines().filter(|line| line.contains("PANIC:")).count() as u64)
    }

    /// Its address.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// Its address, by another port.
    pub fn url_at(&self, port: u16) -> String {
        Self::url_of(port, "postgres")
    }

    /// The address of one of its databases, by any port.
    pub fn url_of(port: u16, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/{database}")
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Runs one of PostgreSQL's programs.
    fn call(&self, program: &str, words: &[&str], variables: &[(String, String)]) -> Result<(), Anyhow> {
        let ran = self.command(program, words, variables).status()?;
        if !ran.success() {
            return Err(format!("{program} failed").into());
        }
        Ok(())
    }

    /// One of PostgreSQL's programs, as the user postgres when this is root, with variables that only it has.
    fn command(&self, program: &str, words: &[&str], variables: &[(String, String)]) -> Command {
        let place = |name: &str| self.folder.path().join(name).display().to_string();
        let words = words.iter().map(|word| match *word {
            "DATA" => place("data"),
            "LOG" => place("log"),
            word => word.to_owned(),
        });
        let mut command = if rustix::process::geteuid().is_root() {
            let mut command = Command::new("runuser");
            command.args(["-u", "postgres", "--", "env"]);
            command
        } else {
            Command::new("env")
        };
        command.args(variables.iter().map(|(name, value)| format!("{name}={value}")));
        command.arg(self.bin.join(program)).args(words);
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
        command
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
