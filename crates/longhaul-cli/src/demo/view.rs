//! What a person sees of the demo: a live view on a terminal, plain lines otherwise. All of it is on stderr: stdout is
//! for the table.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use console::{Style, Term};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::board::Counts;
use crate::out;

/// Between two lines about how far it is, where nothing can be drawn.
const EVERY: Duration = Duration::from_secs(3);

/// What is going on at a moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Picture {
    /// Deployments that are over, and how many there are.
    pub(super) done: usize,
    pub(super) total: usize,
    pub(super) counts: Counts,
    pub(super) workers: Vec<WorkerPicture>,
}

/// What a worker process does.
#[derive(Clone, Debug)]
pub(super) struct WorkerPicture {
    pub(super) name: String,
    pub(super) process: u32,
    pub(super) doing: Doing,
}

#[derive(Clone, Debug)]
pub(super) enum Doing {
    Working(Vec<String>),
    Killed,
    Paused,
}

/// How a line of the story is painted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Good,
    Bad,
    Loud,
}

/// See the module.
pub(super) struct View {
    begun: Instant,
    live: Option<Live>,
    /// When a line about how far it is was written.
    told: Option<Instant>,
}

struct Live {
    all: MultiProgress,
    bar: ProgressBar,
    counts: ProgressBar,
    workers: Vec<ProgressBar>,
    question: ProgressBar,
}

impl View {
    pub(super) fn new(workers: usize) -> Self {
        let live = std::io::stderr().is_terminal().then(|| Live::new(workers));
        Self { begun: Instant::now(), live, told: None }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// A line of the story.
    pub(super) fn say(&self, tone: Tone, text: impl AsRef<str>) {
        let style = match tone {
            Tone::Plain => Style::new(),
            Tone::Good => Style::new().green(),
            Tone::Bad => Style::new().red(),
            Tone::Loud => Style::new().yellow().bold(),
        };
        let text = style.for_stderr().apply_to(out::clean(text.as_ref()));
        let line = format!("{:5.1} s  {text}", self.begun.elapsed().as_secs_f64());
        match &self.live {
            // What cannot be drawn is not worth ending for.
            Some(live) => drop(live.all.println(line)),
            None => out::note(line),
        }
    }

    /// A question that stays until it is answered; none takes it away.
    pub(super) fn ask(&self, question: Option<&str>) {
        if let Some(live) = &self.live {
            live.question.set_message(question.map(out::clean).unwrap_or_default());
        }
    }

    pub(super) fn draw(&mut self, picture: &Picture) {
        if let Some(live) = &self.live {
            live.draw(picture);
        } else if self.told.is_none_or(|told| told.elapsed() >= EVERY) {
            self.told = Some(Instant::now());
            let Picture { done, total, .. } = picture;
            self.say(Tone::Plain, format!("{done} of {total} deployments are over · {}", counts(picture.counts)));
        }
    }

    /// Takes away what was drawn.
    pub(super) fn end(&mut self) {
        if let Some(live) = self.live.take() {
            live.end();
        }
    }
}

fn counts(counts: Counts) -> String {
    let Counts { pending, running, waiting, ended } = counts;
    format!("{pending} in line, {running} running, {waiting} waiting, {ended} ended")
}

impl Live {
    fn new(workers: usize) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::term(Term::stderr(), 10));
        let line = |template: &str| {
            let bar = all.add(ProgressBar::new(0));
            // The templates are constants that parse; a bar without style is better than no view.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar
        };
        let bar = line("{elapsed:>4} {bar:40.green/dim} {pos}/{len} deployments over");
        let counts = line("     {wide_msg}");
        let workers = (0..workers).map(|_| line("{prefix} {wide_msg}")).collect();
        let question = line("{wide_msg:.yellow.bold}");
        Self { bar, counts, workers, question, all }
    }

    fn draw(&self, picture: &Picture) {
        self.bar.set_length(picture.total as u64);
        self.bar.set_position(picture.done as u64);
        self.counts.set_message(counts(picture.counts));
        for (line, worker) in self.workers.iter().zip(&picture.workers) {
            let (style, doing) = match &worker.doing {
                Doing::Working(tasks) if tasks.is_empty() => (Style::new().dim(), "waits for work".to_owned()),
                Doing::Working(tasks) => (Style::new().cyan(), tasks.join(" · ")),
                Doing::Killed => (Style::new().red().bold(), "killed (SIGKILL)".to_owned()),
                Doing::Paused => {
                    (Style::new().yellow().bold(), "stopped (SIGSTOP): does not know that time passes".to_owned())
                }
            };
            let prefix = style.for_stderr().apply_to(format!("{} {:>7}", worker.name, worker.process));
            line.set_prefix(prefix.to_string());
            line.set_message(doing);
        }
    }

    fn end(self) {
        self.question.finish_and_clear();
        for line in &self.workers {
            line.finish_and_clear();
        }
        self.counts.finish_and_clear();
        self.bar.finish_and_clear();
    }
}
