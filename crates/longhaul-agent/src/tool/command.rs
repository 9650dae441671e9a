//! A command: argv, never a shell; JSON on stdin; the result on stdout.
//!
//! It runs in the manifest's folder, in a clean environment, in a process group of its own that
//! ends with the call, however that ends (see `group.rs`). A program that is meant to live on
//! must leave the group (`setsid`, a service manager, a container). An agent's command runs in a
//! sandbox besides, where there is one (see `sandbox.rs`).

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use futures_util::FutureExt;
use longhaul::TaskError;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::ChildStdin;

use super::collect::{Collector, Keep, Refused};
use super::group::Group;
use super::sandbox::{self, Sandbox};
use super::{Call, MAX_COMPLAINT_BYTES, Output};
use crate::mask::{Mask, Masking};
use crate::template::Template;

/// What every command sees of the worker's environment.
const PASSED_ON: [&str; 3] = ["PATH", "HOME", "LANG"];
/// How long output may still come once the command has ended and its group with it: only from a
/// program that left the group and kept the pipe.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often and how long to wait for a program file that is being written.
const BUSY_TRIES: u32 = 10;
const BUSY_WAIT: Duration = Duration::from_millis(20);
/// How much of stdout is read at once.
const PIECE_BYTES: usize = 64 * 1024;

/// A program and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The program as the manifest has it: with a slash a path from the folder, else a name to be
    /// found in `PATH`.
    pub program: String,
    /// Each one exactly one argument, whatever its placeholders stand for.
    pub arguments: Vec<Template>,
    /// What it sees of the worker's environment besides `PATH`, `HOME` and `LANG`.
    pub env: Vec<String>,
    /// The manifest's folder, where it runs.
    pub folder: PathBuf,
    /// What it may change, where commands can be confined; without it, all that the worker can.
    pub sandbox: Option<Sandbox>,
}

impl Command {
    /// The program and its arguments with the placeholders filled.
    pub fn argv(&self, values: &Value) -> Result<Vec<String>, TaskError> {
        let mut argv = vec![self.program.clone()];
        for argument in &self.arguments {
            argv.push(argument.render(values)?);
        }
        Ok(argv)
    }

    /// Where the program is, as far as that can be said without looking in `PATH`.
    pub(crate) fn program_path(program: &str, folder: &Path) -> PathBuf {
        if program.contains('/') { folder.join(program).components().collect() } else { PathBuf::from(program) }
    }

    /// What it is, for a digest.
    pub(super) fn definition(&self) -> Value {
        let arguments: Vec<String> = self.arguments.iter().map(Template::to_string).collect();
        let mut definition = json!({"program": self.program, "arguments": arguments, "env": self.env, "folder": self.folder.to_string_lossy()});
        if let Some(sandbox) = &self.sandbox {
            definition["sandbox"] = sandbox.definition();
        }
        definition
    }

    pub(super) async fn run(&self, call: &Call, keep: Keep<'_>) -> Result<Output, TaskError> {
        let bwrap = match self.sandbox {
            Some(_) => sandbox::bwrap().await,
            None => None,
        };
        let mut group = self.start(call, bwrap).await?;
        let (stdin, stdout, stderr) = group.pipes();
        let body = call.body.to_string().into_bytes();
        let mask = Mask::of_env(&self.env);
        let mut output = Collector::new(keep, &mask);
        let mut complaint = Tail::new(&mask);
        let taken = {
            let pumps = async {
                let feed = feed(stdin, body).map(Ok);
                let read = fill(stdout, &mut output);
                let listen = complaint.follow(stderr).map(Ok);
                tokio::try_join!(feed, read, listen).map(drop)
            };
            let mut pumps = pin!(pumps);
            let pumped = tokio::select! {
                pumped = &mut pumps => Some(pumped),
                () = group.leader_exited() => None,
            };
            if let Some(Ok(())) = pumped {
                group.leader_exited().await;
            }
            // Whatever is left of the group ends here; output that is in the pipes already is read.
            group.kill();
            match pumped {
                Some(pumped) => pumped,
                None => tokio::time::timeout(LAST_WORDS, pumps).await.unwrap_or(Ok(())),
            }
        };
        let status = group.reap().await.map_err(|error| {
            TaskError::in_doubt("exit_unknown", format!("how {} ended is not known: {error}", self.program))
        })?;
        let what = format!("{} wrote", self.program);
        taken.map_err(|refused| refused.told(&what))?;
        self.judge(status, bwrap.is_some(), &complaint)?;
        output.finish(&what).await
    }

    async fn start(&self, call: &Call, bwrap: Option<&Path>) -> Result<Group, TaskError> {
        let argv = self.argv(&call.values)?;
        let mut busy = 0;
        loop {
            match Group::start(self.prepare(&argv, call, bwrap)) {
                Ok(group) => return Ok(group),
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && busy < BUSY_TRIES => {
                    busy += 1;
                    tokio::time::sleep(BUSY_WAIT).await;
                }
                Err(error) => return Err(self.not_startable(&error)),
            }
        }
    }

    fn prepare(&self, argv: &[String], call: &Call, bwrap: Option<&Path>) -> tokio::process::Command {
        let context = &call.context;
        let program = Self::program_path(&self.program, &self.folder);
        let mut command = match (bwrap, &self.sandbox) {
            (Some(bwrap), Some(sandbox)) => sandbox.command(bwrap, &program, &self.folder),
            _ => tokio::process::Command::new(program),
        };
        command.args(&argv[1..]).current_dir(&self.folder);
        clean_environment(&mut command, &self.env);
        if let Some(traceparent) = &context.traceparent {
            command.env("TRACEPARENT", traceparent);
        }
        command
            .env("LONGHAUL_TASK_ID", context.task.to_string())
            .env("LONGHAUL_STEP", &context.step)
            .env("LONGHAUL_IDEMPOTENCY_KEY", &context.idempotency_key)
            .env("LONGHAUL_FENCE", context.fence.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// `confined`: the exit code is that of the sandbox, which says 128 and the signal's number of a
    /// program that was killed; one that ends so by itself cannot be told from it.
    fn judge(&self, status: ExitStatus, confined: bool, complaint: &Tail) -> Result<(), TaskError> {
        if status.success() {
            return Ok(());
        }
        let program = &self.program;
        let said = complaint.text();
        let signal = match status.code() {
            Some(code @ 129..=192) if confined => Some(code - 128),
            Some(code) => {
                let message = sentence(format!("{program} ended with exit code {code}"), &said);
                return Err(TaskError::retryable("exit_status", message).detail("exit_code", code));
            }
            None => std::os::unix::process::ExitStatusExt::signal(&status),
        };
        let name = signal.map_or("a signal".to_owned(), |signal| format!("signal {signal}"));
        let message = sentence(format!("{program} was killed by {name}"), &said);
        Err(TaskError::in_doubt("killed", message).detail("signal", signal))
    }

    fn not_startable(&self, error: &io::Error) -> TaskError {
        use io::ErrorKind::{ArgumentListTooLong, InvalidInput, NotFound, PermissionDenied};
        let program = &self.program;
        let not_executable = rustix::io::Errno::NOEXEC.raw_os_error();
        let advice = match error.kind() {
            NotFound if program.contains('/') => {
                "check that the file, the program its first line names (#!) and the manifest's folder are there"
            }
            NotFound => "install it, or write its path in the manifest; it was looked for in the worker's PATH",
            PermissionDenied => "make it executable (chmod +x) for the worker's user",
            ArgumentListTooLong => "the arguments are too long; let it read the input from stdin",
            InvalidInput => "an argument contains a NUL character, which no argument can",
            _ if error.raw_os_error() == Some(not_executable) => {
                "it is not a program for this machine; a script must begin with a line like #!/bin/sh"
            }
            // Too many processes, no memory: may pass.
            _ => return TaskError::retryable("not_startable", format!("cannot start {program}: {error}")),
        };
        TaskError::fatal("not_startable", format!("cannot start {program}: {error}; {advice}"))
    }
}

fn sentence(what: String, said: &str) -> String {
    if said.is_empty() { what } else { format!("{what}: {said}") }
}

/// Gives the command its input. One that does not read it, or not to its end, is fine.
async fn feed(stdin: Option<ChildStdin>, body: Vec<u8>) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(&body).await;
    }
}

/// Reads stdout. What cannot be read is not there.
async fn fill(pipe: Option<impl AsyncRead + Unpin>, output: &mut Collector<'_>) -> Result<(), Refused> {
    let Some(mut pipe) = pipe else { return Ok(()) };
    let mut buffer = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
        output.take(&buffer[..count]).await?;
    }
    Ok(())
}

/// Leaves nothing of the worker's environment but what every child sees and what is named.
pub(super) fn clean_environment(command: &mut tokio::process::Command, named: &[String]) {
    command.env_clear();
    for name in PASSED_ON.into_iter().chain(named.iter().map(String::as_str)) {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
}

/// The end of what was written to stderr, without secrets.
#[derive(Debug, Default)]
pub(super) struct Tail {
    masking: Masking,
    bytes: Vec<u8>,
    cut: bool,
}

impl Tail {
    pub(super) fn new(mask: &Mask) -> Self {
        Self { masking: mask.stream(), ..Self::default() }
    }

    async fn follow(&mut self, pipe: Option<impl AsyncRead + Unpin>) {
        let Some(mut pipe) = pipe else { return };
        let mut buffer = [0; MAX_COMPLAINT_BYTES];
        while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
            self.add(&buffer[..count]);
        }
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(&self.masking.take(bytes));
        let surplus = self.bytes.len().saturating_sub(MAX_COMPLAINT_BYTES);
        if surplus > 0 {
            self.bytes.drain(..surplus);
            self.cut = true;
        }
    }

    pub(super) fn text(&self) -> String {
        let bytes = [self.bytes.as_slice(), &self.masking.rest()].concat();
        let text = String::from_utf8_lossy(&bytes);
        // A line that lost its beginning is left out, unless it is all there is.
        let whole = match text.trim_end().split_once('\n') {
            Some((_, rest)) if self.cut => format!("… {rest}"),
            None if self.cut => format!("…{text}"),
            _ => text.into_owned(),
        };
        whole.trim().to_owned()
    }
}
