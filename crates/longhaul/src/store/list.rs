//! Lists: which tasks, and a page of them.

use crate::task::{Invalid, State, Task, TaskId};

/// How many tasks a search looks at for one page.
pub(crate) const SEARCHED_PER_PAGE: usize = 10_000;

/// The longest text that can be searched for, bytes.
const MAX_SEARCH: usize = 256;

/// Which tasks to list.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only this state.
    pub state: Option<State>,
    /// Only this handler.
    pub handler: Option<String>,
    /// Only this queue.
    pub queue: Option<String>,
    /// Only tasks that carry this label.
    pub tag: Option<(String, String)>,
    /// Only the children of this task.
    pub parent: Option<TaskId>,
    /// Only tasks with this text in their input, as it was written. `a` to `z` are found in either
    /// case, everything else as it is.
    pub q: Option<String>,
    /// Oldest first instead of newest first.
    pub oldest_first: bool,
    /// Go on after this task.
    pub after: Option<TaskId>,
    /// At most so many; 0 means 100.
    pub limit: usize,
}

/// Some tasks of a list.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The tasks, in the order asked for.
    pub tasks: Vec<Task>,
    /// Where to go on ([`Filter::after`]), when there may be more. A page can be short and have a next one.
    pub next: Option<TaskId>,
}

impl Filter {
    /// The number of tasks to give: 100 unless asked otherwise, at most 1,000.
    pub(crate) fn page(&self) -> usize {
        if self.limit == 0 { 100 } else { self.limit.min(1_000) }
    }

    /// What no store could search for.
    pub(crate) fn validate(&self) -> Result<(), Invalid> {
        match &self.q {
            Some(q) if q.len() > MAX_SEARCH => {
                Err(Invalid::new("q", format!("has {} bytes; at most {MAX_SEARCH} are accepted", q.len())))
            }
            _ => Ok(()),
        }
    }

    /// The text to look for as it stands in JSON: quotes and control characters are escaped there.
    fn needle(&self) -> Option<String> {
        let q = self.q.as_deref().filter(|q| !q.is_empty())?;
        let quoted = serde_json::Value::from(q).to_string();
        Some(quoted[1..quoted.len() - 1].to_owned())
    }

    /// The same as a pattern for LIKE, with `\` as the escape character.
    pub(crate) fn pattern(&self) -> Option<String> {
        let mut pattern = "%".to_owned();
        for letter in self.needle()?.chars() {
            if matches!(letter, '%' | '_' | '\\') {
                pattern.push('\\');
            }
            pattern.push(letter.to_ascii_lowercase());
        }
        pattern.push('%');
        Some(pattern)
    }

    /// A page of what the store found, `looked` being the last task it looked at if there may be more.
    /// The store searches a little more than the input (what a fork took over, for one).
    pub(crate) fn page_of(&self, mut tasks: Vec<Task>, looked: Option<TaskId>) -> Page {
        let full = tasks.len() >= self.page();
        let next = if full { tasks.last().map(|task| task.id) } else { looked };
        if let Some(needle) = self.needle() {
            let needle = needle.to_ascii_lowercase();
            tasks.retain(|task| task.input.get().to_ascii_lowercase().contains(&needle));
        }
        Page { tasks, next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_and_quotes_are_searched_for_as_they_are() {
        let filter = |q: &str| Filter { q: Some(q.to_owned()), ..Filter::default() };
        assert_eq!(filter("50%_A").pattern().as_deref(), Some(r"%50\%\_a%"));
        assert_eq!(filter("say \"hi\"").pattern().as_deref(), Some(r#"%say \\"hi\\"%"#));
        assert_eq!(filter("").pattern(), None);
        assert_eq!(filter(&"x".repeat(MAX_SEARCH + 1)).validate().expect_err("too long").field, "q");
    }
}
