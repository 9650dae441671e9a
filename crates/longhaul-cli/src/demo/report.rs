//! The table at the end, and what it means for the exit code.

use std::path::PathBuf;

use console::Style;
use serde_json::json;

use super::judge::Judgement;
use crate::args::DemoArgs;
use crate::exit::Failure;
use crate::out;
use crate::table::Table;

/// Of what is wrong, so much is told.
const MOST_FAULTS: usize = 12;

/// What is still there afterwards.
#[derive(Debug, serde::Serialize)]
pub(super) struct Kept {
    pub(super) dashboard: String,
    pub(super) folder: PathBuf,
}

pub(super) fn print(
    args: &DemoArgs,
    judgement: &Judgement,
    seconds: f64,
    kept: Option<Kept>,
) -> Result<(), Failure> {
    if args.json {
        let seconds = (seconds * 10.0).round() / 10.0;
        let answer = json!({"ok": judgement.is_ok(), "fast": args.fast, "seconds": seconds, "rows": judgement.rows,
                            "faults": judgement.faults, "kept": kept});
        return out::line(answer.to_string());
    }
    let mut table = Table::new(&["", "WHAT", "EXPECTED", "ACTUAL"]).paint(0, paint);
    for row in &judgement.rows {
        let mark = if row.ok { "ok" } else { "FAULT" };
        table.row([mark, row.what, &row.expected, &row.actual]);
    }
    out::note(format!("\nafter {seconds:.0} s, judged from the ledger of the effects and the sandbox:"));
    table.print()
}

fn paint(mark: &str) -> Style {
    if mark == "ok" { Style::new().green() } else { Style::new().red().bold() }
}

/// What is wrong, in words.
pub(super) fn verdict(judgement: &Judgement) -> Result<(), Failure> {
    if judgement.is_ok() {
        return Ok(());
    }
    let faults = &judgement.faults;
    let mut said: Vec<String> =
        faults.iter().take(MOST_FAULTS).map(|fault| format!("  {}", out::clean(fault))).collect();
    if faults.len() > MOST_FAULTS {
        said.push(format!("  and {} more", faults.len() - MOST_FAULTS));
    }
    Err(Failure::found(format!("the demo found a fault\n{}", said.join("\n"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_exit_code_1_and_told_in_words() {
        assert_eq!(verdict(&Judgement::default()), Ok(()));
        let faults: Vec<String> = (0..20).map(|number| format!("task {number} is lost")).collect();
        let failure = verdict(&Judgement { rows: Vec::new(), faults }).expect_err("faults");
        assert_eq!(failure.code(), 1);
        let said = failure.to_string();
        assert!(said.contains("task 0 is lost") && said.ends_with("and 8 more"), "{said}");
    }
}
