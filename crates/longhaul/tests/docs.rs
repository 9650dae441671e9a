//! What the documents name must exist: paths, links, tests, tables, error codes. Documents that
//! name what is gone are worse than none.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The longest ARCHITECTURE.md that people still read.
const ARCHITECTURE_LINES: usize = 200;
/// Its longest line, but for rows of tables, in characters.
const ARCHITECTURE_WIDTH: usize = 145;

fn root() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in a folder");
    crates.parent().expect("the folder is in the repository").to_owned()
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below `folder` whose names end so.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder that can be read") {
        let path = entry.expect("an entry that can be read").path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The documents that name parts of the repository.
fn documents() -> Vec<PathBuf> {
    let mut documents = files(&root().join("docs"), ".md");
    documents.extend(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| root().join(name)));
    documents
}

/// The text without its fenced blocks.
fn prose(text: &str) -> String {
    text.split("\n```").step_by(2).collect()
}

/// Everything between single backticks.
fn code(text: &str) -> Vec<String> {
    prose(text).split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Words like `store/rules.rs`, `crates/longhaul` or `README.md`; not `1/2`, `a/b c` or `x::y`.
fn looks_like_a_path(word: &str) -> bool {
    let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
    let source =
        [".rs", ".sql", ".md", ".toml"].iter().any(|ending| word.len() > ending.len() && word.ends_with(ending));
    plain && !word.starts_with('/') && (source || word.contains('/'))
}

#[test]
fn every_path_in_a_document_exists() {
    // Documents may leave out the part that is the same everywhere.
    let bases = ["", "crates/longhaul/src", "crates/longhaul/src/store/suite"].map(|base| root().join(base));
    let mut named = 0;
    for document in documents() {
        let text = read(&document);
        // Files that users write are not ours.
        let ours = |word: &&String| looks_like_a_path(word) && *word != "longhaul.toml";
        for word in code(&text).iter().filter(ours) {
            let exists = bases.iter().any(|base| base.join(word).exists());
            assert!(exists, "{} names `{word}`, which does not exist", document.display());
            named += 1;
        }
    }
    assert!(named > 50, "only {named} paths were found: are they still looked for where they are?");
}

#[test]
fn every_link_within_the_repository_leads_somewhere() {
    for document in documents().into_iter().chain([root().join("CHANGELOG.md")]) {
        let text = prose(&read(&document));
        let folder = document.parent().expect("a file is in a folder");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap_or_default();
            if !link.contains("://") && !path.is_empty() {
                assert!(folder.join(path).exists(), "{} links to {link}", document.display());
            }
        }
    }
}

#[test]
fn the_architecture_stays_readable() {
    let text = read("ARCHITECTURE.md");
    let wide: Vec<_> =
        text.lines().filter(|line| !line.starts_with('|') && line.chars().count() > ARCHITECTURE_WIDTH).collect();
    assert!(wide.is_empty(), "lines of ARCHITECTURE.md that nobody reads to their end: {wide:#?}");
    let lines = text.lines().count();
    assert!(lines <= ARCHITECTURE_LINES, "ARCHITECTURE.md has {lines} lines, {ARCHITECTURE_LINES} are allowed");
}

#[test]
fn every_test_that_proves_a_promise_exists() {
    let sources: String = files(&root().join("crates"), ".rs").iter().map(read).collect();
    let promises = read("docs/guarantees.md");
    for promise in promises.split("\n## ").skip(1) {
        let title = promise.lines().next().unwrap_or_default();
        if title == "What is not promised" {
            continue;
        }
        // The names of tests are sentences; other names in backticks are shorter.
        let tests: Vec<_> = code(promise)
            .into_iter()
            .filter(|word| word.matches('_').count() >= 2 && !word.contains(' '))
            .collect();
        assert!(!tests.is_empty(), "'{title}' names no test");
        for test in tests {
            assert!(sources.contains(&format!("fn {test}(")), "'{title}' names `{test}`, which is no test");
        }
    }
}

#[test]
fn the_example_of_the_readme_is_the_one_that_is_compiled() {
    let readme = read("README.md");
    let shown = readme.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    let library = read("crates/longhaul/src/lib.rs");
    let compiled: String = library
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .skip_while(|line| *line != "```")
        .skip(1)
        .take_while(|line| *line != "```")
        .filter(|line| !line.starts_with("# "))
        .map(|line| format!("{line}\n"))
        .collect();
    assert_eq!(shown, compiled);
}

#[test]
fn every_table_of_the_schema_is_in_the_architecture() {
    let architecture: BTreeSet<String> = code(&read("ARCHITECTURE.md")).into_iter().collect();
    for migration in files(&root().join("crates/longhaul/migrations"), ".sql") {
        let text = read(&migration);
        for table in text.split("CREATE TABLE ").skip(1).filter_map(|rest| rest.split_whitespace().next()) {
            assert!(architecture.contains(table), "ARCHITECTURE.md does not tell what `{table}` holds");
        }
    }
}

#[test]
fn every_error_code_is_explained_and_every_explained_one_exists() {
    let mut raised = BTreeSet::new();
    let sources = ["crates/longhaul/src", "crates/longhaul-agent/src"].map(|folder| root().join(folder));
    for file in sources.iter().flat_map(|folder| files(folder, ".rs")) {
        if file.components().any(|part| part.as_os_str() == "suite") {
            continue;
        }
        let text = read(&file);
        let program = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        let lines: String = program.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        for call in ["::fatal(", "::retryable(", "::in_doubt("] {
            let arguments = lines.split(call).skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"'));
            raised.extend(arguments.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
        }
    }
    // Models name theirs where their kinds are.
    let kinds = read("crates/longhaul-agent/src/model/error.rs");
    let codes = kinds.split("pub fn code(").nth(1).and_then(|rest| rest.split("\n    }\n").next());
    let codes = codes.expect("the codes of models").split("=> \"").skip(1);
    raised.extend(codes.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
    let explained: BTreeSet<String> = read("docs/errors.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next().map(str::to_owned))
        .collect();
    assert_eq!(raised, explained, "left: raised in the sources; right: explained in docs/errors.md");
}
