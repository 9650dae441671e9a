//! Tables for people: columns as wide as what is in them, the last one as wide as the terminal lets it.

use console::{Style, Term};
use unicode_width::UnicodeWidthStr;

use crate::exit::Failure;
use crate::out;

/// What a column's cells are drawn with; plain without a terminal or with `NO_COLOR`.
pub(crate) type Paint = fn(&str) -> Style;

/// See the module.
pub(crate) struct Table {
    heads: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    /// The column that is painted, and how.
    paint: Option<(usize, Paint)>,
}

impl Table {
    pub(crate) fn new(heads: &[&'static str]) -> Self {
        Self { heads: heads.to_vec(), rows: Vec::new(), paint: None }
    }

    /// Paints the cells of a column by what they say.
    pub(crate) fn paint(mut self, column: usize, paint: Paint) -> Self {
        self.paint = Some((column, paint));
        self
    }

    /// Adds a row; text of others is made harmless.
    pub(crate) fn row<T: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(|cell| out::clean(cell.as_ref())).collect());
    }

    pub(crate) fn print(&self) -> Result<(), Failure> {
        let term = Term::stdout();
        // Whoever reads a pipe wants all of it.
        let width = term.features().is_attended().then(|| usize::from(term.size().1));
        out::raw(self.render(width).as_bytes())
    }

    fn render(&self, terminal: Option<usize>) -> String {
        let columns = self.heads.len();
        let width = |index: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(index)).map(|cell| cell.width());
            cells.chain([self.heads[index].width()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let before: usize = widths.iter().take(columns.saturating_sub(1)).map(|width| width + 2).sum();
        let last = terminal.map(|terminal| terminal.saturating_sub(before).max(10));
        let mut text = String::new();
        let heads: Vec<String> = self.heads.iter().map(|&head| head.to_owned()).collect();
        for (number, row) in [&heads].into_iter().chain(&self.rows).enumerate() {
            let mut line = String::new();
            for (index, cell) in row.iter().enumerate().take(columns) {
                let end = index + 1 == columns;
                let cell = match last {
                    Some(most) if end && cell.width() > most => cut(cell, most),
                    _ => cell.clone(),
                };
                let gap = if end { 0 } else { widths[index] + 2 - cell.width() };
                let painted = match self.paint {
                    Some((column, paint)) if column == index && number > 0 => {
                        paint(&cell).apply_to(&cell).to_string()
                    }
                    _ => cell,
                };
                line.push_str(&painted);
                line.push_str(&" ".repeat(gap));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

fn cut(cell: &str, most: usize) -> String {
    let (mut kept, mut used) = (String::new(), 0);
    for c in cell.chars() {
        let width = c.to_string().width();
        if used + width + 1 > most {
            break;
        }
        used += width;
        kept.push(c);
    }
    kept.push('…');
    kept
}

/// How the state of a task is painted.
pub(crate) fn state_style(state: &str) -> Style {
    match state {
        "completed" | "ok" => Style::new().green(),
        "failed" | "fault" | "dead" => Style::new().red(),
        "cancelled" | "warning" => Style::new().yellow(),
        "running" => Style::new().cyan(),
        "waiting" => Style::new().magenta(),
        _ => Style::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_cells_and_the_last_one_fits_the_terminal() {
        let mut table = Table::new(&["ID", "NAME", "INPUT"]);
        table.row(["1", "größe", "short"]);
        table.row(["22", "日本", "a text that is much longer than that"]);
        assert_eq!(
            table.render(None),
            "ID  NAME   INPUT\n1   größe  short\n22  日本   a text that is much longer than that\n"
        );
        let lines = table.render(Some(25));
        assert!(lines.ends_with("22  日本   a text that i…\n"), "{lines}");
    }
}
