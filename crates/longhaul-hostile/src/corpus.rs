//! The files of one parser, `tests/hostile/PARSER/…`.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// The inputs that are kept for one parser, good and bad ones, by file name.
#[derive(Clone, Debug)]
pub struct Corpus {
    files: Vec<(String, Vec<u8>)>,
}

impl Corpus {
    /// Where all of them are.
    pub fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/hostile")
    }

    /// Reads those of a parser. There must be some.
    pub fn of(parser: &str) -> io::Result<Self> {
        let folder = Self::folder().join(parser);
        let here = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", folder.display()));
        let mut files = Vec::new();
        for entry in fs::read_dir(&folder).map_err(here)? {
            let path = entry.map_err(here)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.push((name, fs::read(&path).map_err(here)?));
        }
        if files.is_empty() {
            return Err(here(io::Error::new(io::ErrorKind::NotFound, "there are no files")));
        }
        files.sort();
        Ok(Self { files })
    }

    /// A corpus of these inputs.
    pub fn made(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        Self { files: files.into_iter().collect() }
    }

    /// Name and content of each.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// How many there are, at least one.
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// The content of one.
    pub(crate) fn bytes(&self, number: usize) -> &[u8] {
        &self.files[number].1
    }
}
