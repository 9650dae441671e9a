//! A bad disk: the shim (`tests/shim/disk.c`) that is loaded into processes which use a store, what it is told, and what is
//! left on the disk after a power loss.
//!
//! Until its file is synced, a write may be on the disk or not, and so may every 512 bytes of it, whatever came before or
//! after. What was written when an fsync failed is never there, even if a later one succeeds. A new or a removed name is
//! sure when its folder is synced.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Anyhow;
use crate::chance::Chance;

const SHIM: &str = include_str!("../tests/shim/disk.c");
/// How many numbers the control file has.
const NUMBERS: usize = 16;
/// What a disk writes as one.
const SECTOR: usize = 512;

/// How full the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// There is room.
    Enough = 0,
    /// No file can become longer.
    NoMore = 1,
    /// Nothing can be written, as where each write takes new space.
    None = 2,
}

/// How fsync fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syncs {
    /// It does not.
    Work = 0,
    /// Each time.
    Fail = 1,
    /// Once.
    FailOnce = 2,
}

/// What the shim counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Answers that there is no space.
    NoSpace = 8,
    /// Writes of which a part was taken.
    Short = 9,
    /// Failed fsyncs.
    FailedSyncs = 10,
    /// Writes.
    Writes = 11,
    /// Fsyncs.
    Syncs = 12,
}

/// See the module.
#[derive(Debug)]
pub struct Disk {
    /// What is on it.
    folder: PathBuf,
    /// Where the shim and what it notes are.
    state: PathBuf,
    control: File,
    undo: bool,
}

/// What a power loss did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Changes that were not on the disk.
    pub dropped: u64,
    /// Writes of which a part was.
    pub torn: u64,
    /// Changes that were, although nobody had asked for it.
    pub kept: u64,
    /// Of those that were not, or in part: how many were of another file than the log, which is where checkpoints write.
    pub of_checkpoints: u64,
}

impl Disk {
    /// A disk for what is in `folder`. The shim is built into `state`, which is a folder of its own. `undo`: changes are noted,
    /// so that the power can be lost.
    pub fn make(folder: &Path, state: &Path, undo: bool) -> Result<Self, Anyhow> {
        fs::create_dir_all(state)?;
        // As the processes will see it.
        let (folder, state) = (folder.canonicalize()?, state.canonicalize()?);
        let source = state.join("disk.c");
        fs::write(&source, SHIM)?;
        let mut build = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        build.args(["-shared", "-fPIC", "-O2", "-o"]).arg(state.join("disk.so")).arg(&source).arg("-ldl");
        let built = build.output().map_err(|error| format!("no C compiler for the shim of the disk: {error}"))?;
        if !built.status.success() {
            return Err(format!("the shim cannot be built: {}", String::from_utf8_lossy(&built.stderr)).into());
        }
        let path = state.join("control");
        fs::write(&path, [0; NUMBERS * 8])?;
        let control = File::options().read(true).write(true).open(path)?;
        Ok(Self { folder, state, control, undo })
    }

    /// What a process needs in its environment to have this disk.
    pub fn variables(&self) -> Vec<(String, String)> {
        let path = |path: &Path| path.display().to_string();
        let mut variables = vec![
            ("LD_PRELOAD".to_owned(), path(&self.state.join("disk.so"))),
            ("LONGHAUL_DISK_FOLDER".to_owned(), path(&self.folder)),
            ("LONGHAUL_DISK_STATE".to_owned(), path(&self.state)),
        ];
        if self.undo {
            variables.push(("LONGHAUL_DISK_UNDO".to_owned(), "1".to_owned()));
        }
        variables
    }

    fn set(&self, place: u64, number: u64) -> Result<(), Anyhow> {
        Ok(self.control.write_all_at(&number.to_le_bytes(), place * 8)?)
    }

    /// From now on the disk is as full as this.
    pub fn room(&self, room: Room) -> Result<(), Anyhow> {
        self.set(0, room as u64)
    }

    /// From now on fsync works like this.
    pub fn syncs(&self, syncs: Syncs) -> Result<(), Anyhow> {
        self.set(1, syncs as u64)
    }

    /// Whoever does the write of this number from now on is killed in the middle of it.
    pub fn die_at(&self, write: u64) -> Result<(), Anyhow> {
        self.set(Counted::Writes as u64, 0)?;
        self.set(2, write)
    }

    /// What was counted so far.
    pub fn counted(&self, what: Counted) -> Result<u64, Anyhow> {
        let mut number = [0; 8];
        self.control.read_exact_at(&mut number, what as u64 * 8)?;
        Ok(u64::from_le_bytes(number))
    }

    /// The power is lost: of what nobody was promised to find again, any part is gone. Nobody may have the files open.
    pub fn lose_power(&self, chance: &mut Chance) -> Result<Loss, Anyhow> {
        let mut loss = Loss::default();
        for entry in fs::read_dir(&self.state)? {
            let notes = entry?.path();
            if notes.extension().is_none_or(|extension| extension != "undo") {
                continue;
            }
            let name = notes.file_stem().ok_or("notes without a name")?;
            let path = self.folder.join(name);
            let content = match fs::read(&path) {
                Ok(content) => Some(content),
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => return Err(error.into()),
            };
            let changes = read_notes(&fs::read(&notes)?)?;
            let (left, lost) = after_power_loss(content.clone(), &changes, chance);
            loss.dropped += lost.dropped;
            loss.torn += lost.torn;
            loss.kept += lost.kept;
            if !name.to_string_lossy().ends_with("-wal") {
                loss.of_checkpoints += lost.dropped + lost.torn;
            }
            if left != content {
                match left {
                    Some(left) => fs::write(&path, left)?,
                    None => fs::remove_file(&path)?,
                }
            }
            fs::remove_file(&notes)?;
        }
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.to_string_lossy().ends_with("-shm") {
                fs::remove_file(path)?;
            }
        }
        Ok(loss)
    }
}

/// What becomes of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Nobody asked for it to be on the disk.
    Pending,
    /// It is on the disk.
    Durable,
    /// It is not, and never will be: an fsync failed.
    Lost,
}

/// A change of a file: what was there before it, and what comes of it.
#[derive(Clone, Debug)]
struct Change {
    what: What,
    fate: Fate,
    /// The bytes that it replaced or removed.
    before: Vec<u8>,
    /// The size of the file before it.
    size: usize,
}

#[derive(Clone, Debug)]
enum What {
    Write { at: usize, bytes: Vec<u8> },
    Truncate { to: usize },
    Create,
    Unlink,
}

/// Reads what the shim noted of a file: five numbers, of which the second is where the notes end, and then for each change six
/// numbers and the bytes before and after it.
fn read_notes(notes: &[u8]) -> Result<Vec<Change>, Anyhow> {
    const HEAD: usize = 5 * 8;
    let number = |at: usize| -> Result<usize, Anyhow> {
        let bytes = notes.get(at..at + 8).ok_or("the notes of the disk end too early")?;
        Ok(usize::try_from(u64::from_le_bytes(bytes.try_into()?))?)
    };
    let mut changes = Vec::new();
    if notes.len() < HEAD {
        return Ok(changes);
    }
    let (mut at, end) = (HEAD, number(8)?);
    while at < end {
        let [kind, fate, offset, old, new, size] =
            [number(at)?, number(at + 8)?, number(at + 16)?, number(at + 24)?, number(at + 32)?, number(at + 40)?];
        at += 48;
        let taken = |from: usize, length: usize| -> Result<Vec<u8>, Anyhow> {
            Ok(notes.get(from..from + length).ok_or("the notes of the disk end too early")?.to_vec())
        };
        let (before, bytes) = (taken(at, old)?, taken(at + old, new)?);
        at += old + new;
        let what = match kind {
            1 => What::Write { at: offset, bytes },
            2 => What::Truncate { to: offset },
            3 => What::Create,
            4 => What::Unlink,
            other => return Err(format!("a change of the kind {other}").into()),
        };
        let fate = match fate {
            0 => Fate::Pending,
            1 => Fate::Durable,
            _ => Fate::Lost,
        };
        changes.push(Change { what, fate, before, size });
    }
    Ok(changes)
}

/// Puts bytes somewhere; what is between the end and there is zeros.
fn put(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if content.len() < at + bytes.len() {
        content.resize(at + bytes.len(), 0);
    }
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

/// How a disk chose what it wrote by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// Nothing.
    Nothing,
    /// Some changes, each as a whole.
    Changes,
    /// Some sectors.
    Sectors,
}

/// What is left of a file whose content can be read as `now` after these changes.
fn after_power_loss(now: Option<Vec<u8>>, changes: &[Change], chance: &mut Chance) -> (Option<Vec<u8>>, Loss) {
    let mut content = now;
    for change in changes.iter().rev() {
        match &change.what {
            What::Write { at, .. } | What::Truncate { to: at } => {
                if let Some(content) = &mut content {
                    put(content, *at, &change.before);
                    content.resize(change.size, 0);
                }
            }
            What::Create => content = None,
            What::Unlink => content = Some(change.before.clone()),
        }
    }
    let manner = *chance.one_of(&[Manner::Nothing, Manner::Changes, Manner::Sectors]);
    let mut loss = Loss::default();
    for change in changes {
        let is_name = matches!(change.what, What::Create | What::Unlink);
        let whole = match change.fate {
            Fate::Durable => true,
            Fate::Lost => false,
            Fate::Pending if is_name || manner == Manner::Changes => {
                manner != Manner::Nothing && chance.percent(50)
            }
            Fate::Pending => false,
        };
        if let (What::Write { at, bytes }, Fate::Pending, Manner::Sectors, Some(content)) =
            (&change.what, change.fate, manner, &mut content)
        {
            let (mut from, mut there, mut gone) = (0, 0, 0);
            while from < bytes.len() {
                // Up to the end of the sector of the disk.
                let to = bytes.len().min(from + SECTOR - (at + from) % SECTOR);
                if chance.percent(50) {
                    put(content, at + from, &bytes[from..to]);
                    there += 1;
                } else {
                    gone += 1;
                }
                from = to;
            }
            match (there, gone) {
                (0, _) => loss.dropped += 1,
                (_, 0) => loss.kept += 1,
                _ => loss.torn += 1,
            }
            continue;
        }
        if !whole {
            loss.dropped += 1;
            continue;
        }
        loss.kept += u64::from(change.fate == Fate::Pending);
        match (&change.what, &mut content) {
            (What::Write { at, bytes }, Some(content)) => put(content, *at, bytes),
            (What::Truncate { to }, Some(content)) => content.resize(*to, 0),
            (What::Create, _) => content = Some(Vec::new()),
            (What::Unlink, _) => content = None,
            // Its name was never there.
            (_, None) => {}
        }
    }
    (content, loss)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(at: usize, bytes: &[u8], before: &[u8], size: usize, fate: Fate) -> Change {
        Change { what: What::Write { at, bytes: bytes.to_vec() }, fate, before: before.to_vec(), size }
    }

    /// Every outcome that some seed has.
    fn outcomes(now: Option<&[u8]>, changes: &[Change]) -> std::collections::BTreeSet<Option<Vec<u8>>> {
        let now = now.map(<[u8]>::to_vec);
        (0..300).map(|seed| after_power_loss(now.clone(), changes, &mut Chance::new(seed)).0).collect()
    }

    fn all(of: &[&str]) -> std::collections::BTreeSet<Option<Vec<u8>>> {
        of.iter().map(|text| Some(text.as_bytes().to_vec())).collect()
    }

    #[test]
    fn what_was_synced_stays_and_of_the_rest_any_part_does() {
        let changes = [
            write(0, b"AA", b"aa", 4, Fate::Durable),
            write(2, b"BB", b"bb", 4, Fate::Pending),
            write(4, b"CC", b"", 4, Fate::Pending),
        ];
        let found = outcomes(Some(b"AABBCC"), &changes);
        assert_eq!(found, all(&["AAbb", "AABB", "AAbbCC", "AABBCC"]));
    }

    #[test]
    fn what_was_written_before_a_failed_fsync_is_gone_also_when_a_later_one_succeeds() {
        let changes = [write(0, b"AA", b"aa", 4, Fate::Lost), write(2, b"BB", b"bb", 4, Fate::Durable)];
        assert_eq!(outcomes(Some(b"AABB"), &changes), all(&["aaBB"]));
        // Unless it is written again.
        let again = [write(0, b"AA", b"aa", 2, Fate::Lost), write(0, b"AA", b"AA", 2, Fate::Durable)];
        assert_eq!(outcomes(Some(b"AA"), &again), all(&["AA"]));
    }

    #[test]
    fn a_large_write_is_torn_at_the_disks_sectors() {
        let (old, new) = (vec![b'o'; 1_024], vec![b'n'; 1_024]);
        let mut now = vec![b'x'; 100];
        now.extend_from_slice(&new);
        let changes = [write(100, &new, &old, 1_124, Fate::Pending)];
        let found = outcomes(Some(&now), &changes);
        // Three sectors: the rest of the first, the second, the beginning of the third.
        assert_eq!(found.len(), 8);
        let torn = found.iter().flatten().find(|content| content[100] == b'o' && content[600] == b'n');
        let torn = torn.expect("the second sector alone");
        assert_eq!((torn[511], torn[512], torn[1_023]), (b'o', b'n', b'n'));
    }

    #[test]
    fn a_name_that_was_not_synced_may_be_gone_with_all_that_was_in_it_and_a_removed_one_back() {
        let made = Change { what: What::Create, fate: Fate::Pending, before: Vec::new(), size: 0 };
        let found = outcomes(Some(b"AA"), &[made.clone(), write(0, b"AA", b"", 0, Fate::Durable)]);
        assert_eq!(found, [None, Some(b"AA".to_vec())].into_iter().collect());
        let removed = Change { what: What::Unlink, fate: Fate::Pending, before: b"old".to_vec(), size: 3 };
        assert_eq!(
            outcomes(None, std::slice::from_ref(&removed)),
            [None, Some(b"old".to_vec())].into_iter().collect()
        );
        let sure = [
            Change { fate: Fate::Durable, ..removed },
            Change { fate: Fate::Durable, ..made },
            write(0, b"new", b"", 0, Fate::Durable),
        ];
        assert_eq!(outcomes(Some(b"new"), &sure), all(&["new"]));
    }

    #[test]
    fn a_file_that_was_cut_off_has_its_end_back() {
        let cut = |fate| Change { what: What::Truncate { to: 1 }, fate, before: b"bc".to_vec(), size: 3 };
        assert_eq!(outcomes(Some(b"a"), &[cut(Fate::Durable)]), all(&["a"]));
        assert_eq!(outcomes(Some(b"a"), &[cut(Fate::Pending)]), all(&["a", "abc"]));
    }

    /// What `dd` leaves behind that writes 16 KiB to `store/a`, with the shim in it.
    fn left_by(conv: &str, room: Room, syncs: Syncs) -> (Disk, tempfile::TempDir, std::process::Output) {
        let folder = tempfile::tempdir().expect("a folder");
        let store = folder.path().join("store");
        fs::create_dir(&store).expect("made");
        let disk = Disk::make(&store, &folder.path().join("disk"), true).expect("the shim is built");
        disk.room(room).expect("said");
        disk.syncs(syncs).expect("said");
        let mut dd = Command::new("dd");
        dd.args(["if=/dev/zero", "bs=4096", "count=4", "status=none"]);
        dd.arg(format!("conv=notrunc{conv}")).arg(format!("of={}", store.join("a").display()));
        let output = dd.env("LC_ALL", "C").envs(disk.variables()).output().expect("dd runs");
        (disk, folder, output)
    }

    #[test]
    fn the_shim_notes_what_is_written_and_forgets_what_is_synced() {
        let (disk, folder, output) = left_by("", Room::Enough, Syncs::Work);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(disk.counted(Counted::Writes).expect("counted"), 4);
        let path = folder.path().join("store/a");
        assert_eq!(fs::read(&path).expect("there").len(), 4 * 4096);
        let notes =
            read_notes(&fs::read(folder.path().join("disk/a.undo")).expect("notes")).expect("they are whole");
        assert_eq!(notes.len(), 5, "its name and what is in it");
        assert!(notes.iter().all(|change| change.fate == Fate::Pending), "{notes:?}");
        let loss = disk.lose_power(&mut Chance::new(1)).expect("lost");
        assert_eq!(loss.dropped + loss.torn + loss.kept, 5, "{loss:?}");
        let (_, folder, _) = left_by(",fsync", Room::Enough, Syncs::Work);
        let notes =
            read_notes(&fs::read(folder.path().join("disk/a.undo")).expect("notes")).expect("they are whole");
        let pending: Vec<_> = notes.iter().filter(|change| change.fate == Fate::Pending).collect();
        assert!(
            matches!(pending[..], [Change { what: What::Create, .. }]),
            "the folder was not synced: {pending:?}"
        );
    }

    #[test]
    fn the_shim_says_that_the_disk_is_full_and_that_it_cannot_sync() {
        let (disk, folder, output) = left_by(",fsync", Room::NoMore, Syncs::Work);
        assert!(String::from_utf8_lossy(&output.stderr).contains("No space left"), "{output:?}");
        assert_eq!(fs::read(folder.path().join("store/a")).expect("made").len(), 0);
        assert!(disk.counted(Counted::NoSpace).expect("counted") >= 1);
        let (disk, folder, output) = left_by(",fsync", Room::Enough, Syncs::FailOnce);
        assert!(String::from_utf8_lossy(&output.stderr).contains("Input/output error"), "{output:?}");
        let lost = disk.lose_power(&mut Chance::new(1)).expect("lost");
        assert!(lost.dropped >= 4 && lost.torn == 0, "{lost:?}");
        // Its name may be there.
        assert_eq!(fs::read(folder.path().join("store/a")).unwrap_or_default().len(), 0);
    }
}
