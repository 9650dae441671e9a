//! Hostile input: every parser that meets the outside is given what nobody should send, drawn from a seed and the corpus in `tests/hostile`.
//! No panic, no answer that says that the server failed, nothing stored by what was refused, and nothing stored that was not accepted.
//!
//! Each parser has a process of its own, two at a time. One that dies leaves the input that killed it in a file. The rooms: `trial` (an
//! input's way), `bed` and `witness` (a server, and what its store really has), and one for each kind of parser.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::stream::iter;
use longhaul_hostile::{Corpus, shown};

use crate::Anyhow;
use crate::server::Server;

mod agents;
mod bed;
mod bus;
mod damage;
mod http;
mod manifests;
mod mcp;
mod model;
mod trial;
mod values;
mod wire;
mod witness;

pub use trial::Tally;
use trial::{Broke, Trial};

/// A parser, or several that read the same.
#[derive(Clone, Copy, Debug)]
pub struct Parser {
    /// Its name, which is also that of its folder in the corpus, unless it shares another's.
    pub name: &'static str,
    /// The folder in the corpus.
    pub corpus: &'static str,
    /// What it reads, for people.
    pub reads: &'static str,
    /// How many of a thousand inputs are for it.
    pub share: u64,
}

/// All of them; the slow ones first, so that nothing is left to wait for at the end.
pub const PARSERS: [Parser; 17] = [
    parser("http", "http", "requests to every route, on SQLite", 300),
    parser("postgres", "http", "requests to every route, on PostgreSQL", 8),
    parser("mcp", "mcp", "messages of MCP", 70),
    parser("agent", "agent", "runs of agents whose model says anything", 2),
    parser("damage", "damage", "rows of the store that are damaged", 5),
    parser("servers", "servers", "answers of MCP servers", 1),
    parser("raw", "raw", "bytes on connections", 50),
    parser("ws", "ws", "frames of WebSockets", 60),
    parser("model", "model", "answers of models", 80),
    parser("endpoints", "endpoints", "answers of endpoints that are tools", 20),
    parser("bus", "bus", "messages of a broker", 70),
    parser("artifacts", "artifacts", "outputs that are kept, and questions about them", 34),
    parser("manifest", "manifest", "manifests", 80),
    parser("schema", "schema", "schemas and arguments of tools", 40),
    parser("template", "template", "placeholders", 60),
    parser("hints", "hints", "hints of other processes", 30),
    parser("values", "values", "times, addresses, cursors, schedules, submits", 90),
];

/// Parsers that break, to see that it is found: one panics in a task that nobody looks after, one takes the process with it.
pub const BROKEN: [Parser; 2] =
    [parser("panics", "template", "nothing with a NUL", 0), parser("dies", "template", "nothing with a NUL", 0)];

const fn parser(name: &'static str, corpus: &'static str, reads: &'static str, share: u64) -> Parser {
    Parser { name, corpus, reads, share }
}

/// Processes at once.
const AT_ONCE: usize = 2;

/// How the hostile input is given.
#[derive(Clone, Debug)]
pub struct Hostile {
    /// The seed.
    pub seed: u64,
    /// Inputs in all.
    pub inputs: u64,
    /// Only this parser, with all the inputs.
    pub only: Option<String>,
}

/// What came of one parser's share.
#[derive(Clone, Debug)]
pub struct Tried {
    /// The parser.
    pub parser: Parser,
    /// The counts; `None` where what it needs cannot be had.
    pub tally: Option<Tally>,
    /// How long it took, seconds.
    pub seconds: f64,
    /// The input that broke it, and where it is.
    pub input: Option<(Vec<u8>, PathBuf)>,
}

impl Tried {
    /// Whether nothing broke.
    pub fn held(&self) -> bool {
        self.tally.as_ref().is_none_or(|tally| tally.broke.is_none())
    }

    /// In one line.
    pub fn line(&self) -> String {
        let Parser { name, reads, .. } = self.parser;
        match &self.tally {
            None => format!(
                "hostile {name} ({reads}): skipped, PostgreSQL cannot be had; set LONGHAUL_TEST_PG_BIN or use ./dev prove"
            ),
            Some(Tally { inputs, accepted, refused, broke, memory }) => {
                let verdict = if broke.is_some() { "BROKE" } else { "held" };
                let (mib, seconds) = (memory / 1024 / 1024, self.seconds);
                format!(
                    "hostile {name} ({reads}): {verdict} ({inputs} inputs, {accepted} accepted, {refused} refused; {mib} MiB, {seconds:.0} s)"
                )
            }
        }
    }
}

/// What is there, by name.
fn named(name: &str) -> Result<Parser, Anyhow> {
    let names: Vec<&str> = PARSERS.iter().map(|parser| parser.name).collect();
    let known = PARSERS.into_iter().chain(BROKEN).find(|parser| parser.name == name);
    known.ok_or_else(|| format!("there is no parser '{name}'; there are {}", names.join(", ")).into())
}

/// Gives everyone their share, each in a process of `program`, and says what came of each as soon as it is known.
pub async fn hostile(plan: &Hostile, program: &Path) -> Result<Vec<Tried>, Anyhow> {
    let shares: Vec<(Parser, u64)> = match &plan.only {
        Some(name) => vec![(named(name)?, plan.inputs)],
        None => PARSERS.iter().map(|parser| (*parser, (plan.inputs * parser.share).div_ceil(1_000))).collect(),
    };
    let folder = Corpus::folder().join("../../target/hostile");
    std::fs::create_dir_all(&folder)?;
    let folder = folder.canonicalize()?;
    let mut tried =
        iter(shares.into_iter().map(|(parser, inputs)| one(parser, inputs, plan.seed, &folder, program)))
            .buffer_unordered(AT_ONCE);
    let mut all = Vec::new();
    while let Some(one) = tried.next().await {
        let one = one?;
        println!("{}", one.line());
        if let Some(why) = one.tally.as_ref().and_then(|tally| tally.broke.as_ref()) {
            println!("    seed {}: {why}", plan.seed);
        }
        if let Some((input, path)) = &one.input {
            println!("    the input is in {}: {}", path.display(), shown(input));
        }
        all.push(one);
    }
    Ok(all)
}

/// One parser's share, in a process.
async fn one(parser: Parser, inputs: u64, seed: u64, folder: &Path, program: &Path) -> Result<Tried, Anyhow> {
    let begun = Instant::now();
    // Started here, so that it is stopped also when the process dies.
    let server = if parser.name == "postgres" { Server::start(false)? } else { None };
    if parser.name == "postgres" && server.is_none() {
        return Ok(Tried { parser, tally: None, seconds: 0.0, input: None });
    }
    let current = folder.join(format!("current-{}-{seed}", parser.name));
    let process = tokio::process::Command::new(program)
        .arg("hostile-part")
        .args(["--parser", parser.name, "--inputs", &inputs.to_string(), "--seed", &seed.to_string(), "--current"])
        .arg(&current)
        .args(server.iter().flat_map(|server| ["--store".to_owned(), server.url()]))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let ran = process.wait_with_output().await?;
    let mut tally: Tally = serde_json::from_slice(&ran.stdout).unwrap_or_default();
    if tally.broke.is_none() && (!ran.status.success() || tally.inputs < inputs) {
        tally.broke = Some(format!("its process ended: {}", ran.status));
    }
    let input = match &tally.broke {
        // A name of its own, so that the next run does not write over it.
        Some(_) => {
            let kept = folder.join(format!("{}-{seed}-{}", parser.name, tally.inputs));
            std::fs::rename(&current, &kept)?;
            Some((std::fs::read(&kept)?, kept))
        }
        None => {
            std::fs::remove_file(&current)?;
            None
        }
    };
    Ok(Tried { parser, tally: Some(tally), seconds: begun.elapsed().as_secs_f64(), input })
}

/// One parser's share, in this process; what is being read stands in `current`. `store` is a server for the one that needs it.
pub async fn part(
    name: &str,
    inputs: u64,
    seed: u64,
    current: &Path,
    store: Option<&str>,
) -> Result<Tally, Anyhow> {
    let parser = named(name)?;
    let corpus = Corpus::of(parser.corpus)?;
    let mut trial = Trial::new(&corpus, parser.name, seed, inputs, current)?;
    let ended: Result<(), Broke> = match parser.name {
        "http" => http::memory(&mut trial).await,
        "postgres" => http::postgres(&mut trial, store.ok_or("this needs a server: --store")?).await,
        "mcp" => mcp::messages(&mut trial).await,
        "agent" => agents::runs(&mut trial).await,
        "damage" => damage::rows(&mut trial).await,
        "servers" => model::servers(&mut trial).await,
        "raw" => wire::requests(&mut trial).await,
        "ws" => wire::frames(&mut trial).await,
        "model" => model::answers(&mut trial).await,
        "endpoints" => model::endpoints(&mut trial).await,
        "bus" => bus::messages(&mut trial).await,
        "artifacts" => manifests::artifacts(&mut trial).await,
        "manifest" => manifests::manifests(&mut trial).await,
        "schema" => manifests::schemas(&mut trial).await,
        "template" => manifests::templates(&mut trial).await,
        "hints" => bus::hints(&mut trial).await,
        "values" => values::values(&mut trial).await,
        name => broken(&mut trial, name).await,
    };
    Ok(trial.finish(ended))
}

/// See [`BROKEN`].
async fn broken(trial: &mut Trial<'_>, name: &str) -> Result<(), Broke> {
    while let Some(input) = trial.draw()? {
        if input.contains(&0) && name == "dies" {
            std::process::abort();
        }
        // What comes of it is not looked at, as a server does with a connection.
        let _ = tokio::spawn(async move { assert!(!input.contains(&0), "there is a NUL") }).await;
        trial.judged(longhaul_hostile::Judged::Refused)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parser_has_a_share_and_a_corpus() {
        assert_eq!(PARSERS.iter().map(|parser| parser.share).sum::<u64>(), 1_000);
        for parser in PARSERS {
            let corpus = Corpus::of(parser.corpus).expect(parser.name);
            assert!(corpus.count() >= 3, "{} has {} files", parser.name, corpus.count());
        }
    }
}
