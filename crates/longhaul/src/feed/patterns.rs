//! Which types of events someone asks for.

use crate::task::Invalid;

/// The most patterns of one reader, and the longest.
const MAX_PATTERNS: usize = 64;
const MAX_PATTERN: usize = 128;

/// Exact types (`task.completed`), or all that begin so (`task.*`, `*`). None ask for all.
#[derive(Clone, Debug, Default)]
pub(crate) struct Patterns(Vec<String>);

impl Patterns {
    pub(crate) fn new<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> Result<Self, Invalid> {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        let plain = |pattern: &String| {
            let name = pattern.strip_suffix('*').unwrap_or(pattern);
            let whole = pattern == "*" || !pattern.ends_with('*') || name.ends_with('.');
            !pattern.is_empty() && pattern.len() <= MAX_PATTERN && whole && !name.contains('*')
        };
        if patterns.len() > MAX_PATTERNS || !patterns.iter().all(plain) {
            let problem = format!("must be at most {MAX_PATTERNS} of the form 'task.completed', 'task.*' or '*'");
            return Err(Invalid::new("types", problem));
        }
        Ok(Self(patterns))
    }

    /// Whether an event of this type is asked for.
    pub(crate) fn want(&self, kind: &str) -> bool {
        self.0.is_empty()
            || self.0.iter().any(|pattern| match pattern.strip_suffix('*') {
                Some(prefix) => kind.starts_with(prefix),
                None => pattern == kind,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_exact_or_begin_so() {
        let patterns = Patterns::new(["task.*", "progress"]).expect("patterns");
        assert!(patterns.want("task.completed") && patterns.want("progress"));
        assert!(!patterns.want("tasks") && !patterns.want("progress.more") && !patterns.want("step.started"));
        assert!(Patterns::default().want("anything"));
        assert!(Patterns::new(["*"]).expect("a pattern").want("anything"));
    }
}
