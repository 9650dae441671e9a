//! `longhaul init`: a folder with an agent and a saga that work at once, to be changed by its owner.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::args::InitArgs;
use crate::exit::Failure;

/// What is written, and whether it is a program.
const FILES: [(&str, &str, bool); 7] = [
    ("devops.toml", include_str!("init/devops.toml"), false),
    ("release.toml", include_str!("init/release.toml"), false),
    ("tools/check_disk", include_str!("init/check_disk"), true),
    ("tools/clean_logs", include_str!("init/clean_logs"), true),
    ("tools/restore_logs", include_str!("init/restore_logs"), true),
    ("tools/logs_cleaned", include_str!("init/logs_cleaned"), true),
    ("tools/release", include_str!("init/release"), true),
];
/// The logs of the sandbox: name, age in days, size in KB.
const LOGS: [(&str, u64, usize); 4] =
    [("app-1.log", 30, 800), ("app-2.log", 14, 600), ("web.log", 9, 400), ("today.log", 0, 120)];
const DAY: Duration = Duration::from_secs(86_400);

pub(crate) fn run(args: &InitArgs) -> Result<(), Failure> {
    let folder = &args.folder;
    if let Some((name, ..)) = FILES.iter().find(|(name, ..)| folder.join(name).exists()) {
        let path = folder.join(name);
        return Err(Failure::usage(format!("{} is there already; name another folder", path.display())));
    }
    write(folder).map_err(|error| Failure::internal(format!("cannot write to {}: {error}", folder.display())))?;
    let shown = folder.display();
    eprintln!("Made an agent and a saga in {shown}. Next:");
    eprintln!("  export OPENAI_API_KEY=…            (or OPENAI_BASE_URL=http://… for a model of your own)");
    eprintln!("  longhaul up --manifests {shown}");
    eprintln!("  longhaul submit devops \"I'm out of disk space. Fix it.\" --follow     (another terminal)");
    eprintln!("It asks before it deletes anything: longhaul approvals, longhaul approve ID");
    Ok(())
}

fn write(folder: &Path) -> std::io::Result<()> {
    for part in ["tools", "sandbox/logs"] {
        fs::create_dir_all(folder.join(part))?;
    }
    for (name, text, program) in FILES {
        let mode = if program { 0o755 } else { 0o644 };
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(folder.join(name))?;
        file.write_all(text.as_bytes())?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
    }
    for (name, days, kilobytes) in LOGS {
        let file = File::create(folder.join("sandbox/logs").join(name))?;
        fill(&file, kilobytes)?;
        file.set_modified(SystemTime::now() - DAY * u32::try_from(days).unwrap_or(0))?;
    }
    Ok(())
}

fn fill(mut file: &File, kilobytes: usize) -> std::io::Result<()> {
    let line = "2026-01-01T00:00:00Z INFO request served in 12 ms\n";
    let text = line.repeat(kilobytes * 1024 / line.len() + 1);
    file.write_all(&text.as_bytes()[..kilobytes * 1024])
}
