//! A command: argv, never a shell; JSON on stdin; the result on stdout.
//!
//! It runs in the manifest's folder, in a clean environment, in a process group of its own that
//! ends with the call, however that ends (see `group.rs`). A program that is meant to live on
//! must leave the group (`setsid`, a service manager, a container).

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use futures_util::FutureExt;
use longhaul::TaskError;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::ChildStdin;

use super::group::Group;
use super::{Call, MAX_COMPLAINT_BYTES, answer};
use crate::template::Template;

/// The most a command may write to stdout.
pub const MAX_OUTPUT_BYTES: usize = 1024 * 1024;
/// What every command sees of the worker's environment.
const PASSED_ON: [&str; 3] = ["PATH", "HOME", "LANG"];
/// How long output may still come once the command has ended and its group with it: only from a
/// program that left the group and kept the pipe.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often and how long to wait for a program file that is being written.
const BUSY_TRIES: u32 = 10;
const BUSY_WAIT: Duration = Duration::from_millis(20);

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

    pub(super) async fn run(&self, call: &Call) -> Result<Value, TaskError> {
        let mut group = self.start(call).await?;
        let (stdin, stdout, stderr) = group.pipes();
        let body = call.body.to_string().into_bytes();
        let mut output = Vec::new();
        let mut complaint = Tail::default();
        let too_large = {
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
        match too_large {
            Err(TooLarge) => Err(self.too_large()),
            Ok(()) => self.judge(status, &output, &complaint),
        }
    }

    async fn start(&self, call: &Call) -> Result<Group, TaskError> {
        let argv = self.argv(&call.values)?;
        let mut busy = 0;
        loop {
            match Group::start(self.prepare(&argv, call)) {
                Ok(group) => return Ok(group),
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && busy < BUSY_TRIES => {
                    busy += 1;
                    tokio::time::sleep(BUSY_WAIT).await;
                }
                Err(error) => return Err(self.not_startable(&error)),
            }
        }
    }

    fn prepare(&self, argv: &[String], call: &Call) -> tokio::process::Command {
        let context = &call.context;
        let mut command = tokio::process::Command::new(Self::program_path(&self.program, &self.folder));
        command.args(&argv[1..]).current_dir(&self.folder).env_clear();
        for name in PASSED_ON.into_iter().chain(self.env.iter().map(String::as_str)) {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
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

    fn judge(&self, status: ExitStatus, output: &[u8], complaint: &Tail) -> Result<Value, TaskError> {
        if status.success() {
            return Ok(answer(output));
        }
        let program = &self.program;
        let said = complaint.text();
        let Some(code) = status.code() else {
            let signal = std::os::unix::process::ExitStatusExt::signal(&status);
            let name = signal.map_or("a signal".to_owned(), |signal| format!("signal {signal}"));
            let message = sentence(format!("{program} was killed by {name}"), &said);
            return Err(TaskError::in_doubt("killed", message).detail("signal", signal));
        };
        Err(TaskError::retryable("exit_status", sentence(format!("{program} ended with exit code {code}"), &said))
            .detail("exit_code", code))
    }

    /// It was ended in the middle, so what it did is not known; trying again gives the same.
    fn too_large(&self) -> TaskError {
        let mut error = TaskError::in_doubt(
            "output_too_large",
            format!(
                "{} wrote more than {MAX_OUTPUT_BYTES} bytes to stdout and was stopped; let it write a file and \
                 print where that is",
                self.program
            ),
        );
        error.retryable = false;
        error.detail("limit", MAX_OUTPUT_BYTES)
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

struct TooLarge;

/// Gives the command its input. One that does not read it, or not to its end, is fine.
async fn feed(stdin: Option<ChildStdin>, body: Vec<u8>) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(&body).await;
    }
}

/// Reads stdout up to the limit. What cannot be read is not there.
async fn fill(pipe: Option<impl AsyncRead + Unpin>, output: &mut Vec<u8>) -> Result<(), TooLarge> {
    let Some(pipe) = pipe else { return Ok(()) };
    let _ = pipe.take(MAX_OUTPUT_BYTES as u64 + 1).read_to_end(output).await;
    if output.len() > MAX_OUTPUT_BYTES { Err(TooLarge) } else { Ok(()) }
}

/// The end of what was written to stderr.
#[derive(Default)]
struct Tail {
    bytes: Vec<u8>,
    cut: bool,
}

impl Tail {
    async fn follow(&mut self, pipe: Option<impl AsyncRead + Unpin>) {
        let Some(mut pipe) = pipe else { return };
        let mut buffer = [0; MAX_COMPLAINT_BYTES];
        while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
            self.bytes.extend_from_slice(&buffer[..count]);
            let surplus = self.bytes.len().saturating_sub(MAX_COMPLAINT_BYTES);
            if surplus > 0 {
                self.bytes.drain(..surplus);
                self.cut = true;
            }
        }
    }

    fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.bytes);
        // A line that lost its beginning is left out, unless it is all there is.
        let whole = match text.trim_end().split_once('\n') {
            Some((_, rest)) if self.cut => format!("… {rest}"),
            None if self.cut => format!("…{text}"),
            _ => text.into_owned(),
        };
        whole.trim().to_owned()
    }
}
