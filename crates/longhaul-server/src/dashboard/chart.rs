//! Charts of the last minutes, as shapes for SVG. Pure.

use super::pulse::Minute;
use super::show;

/// The size of the picture, in units of its own.
const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 100.0;

/// A part of a column.
pub(super) struct Block {
    pub(super) x: String,
    pub(super) y: String,
    pub(super) width: String,
    pub(super) height: String,
    pub(super) class: &'static str,
}

/// How many tasks ended in each minute.
pub(super) struct Throughput {
    pub(super) blocks: Vec<Block>,
    pub(super) top: String,
    /// The same in words.
    pub(super) told: String,
}

impl Throughput {
    pub(super) fn of(minutes: &[Minute]) -> Self {
        let most = minutes.iter().map(Minute::ended).max().unwrap_or(0);
        let top = nice(most as f64).max(1.0);
        let column = WIDTH / minutes.len().max(1) as f64;
        let mut blocks = Vec::new();
        for (place, minute) in minutes.iter().enumerate() {
            let mut floor = HEIGHT;
            let parts =
                [(minute.completed, "completed"), (minute.failed, "failed"), (minute.cancelled, "cancelled")];
            for (count, class) in parts {
                if count == 0 {
                    continue;
                }
                let height = (count as f64 / top * HEIGHT).max(1.0);
                floor -= height;
                blocks.push(Block {
                    x: format!("{:.1}", place as f64 * column + column * 0.15),
                    y: format!("{floor:.1}"),
                    width: format!("{:.1}", column * 0.7),
                    height: format!("{height:.1}"),
                    class,
                });
            }
        }
        let sum = |part: fn(&Minute) -> u64| show::number(minutes.iter().map(part).sum());
        let told = format!(
            "In the last hour {} tasks completed, {} failed and {} were cancelled; at most {} ended in one minute.",
            sum(|minute| minute.completed),
            sum(|minute| minute.failed),
            sum(|minute| minute.cancelled),
            show::number(most)
        );
        Self { blocks, top: show::number(top as u64), told }
    }
}

/// How long tasks took that ended in each minute.
pub(super) struct Latency {
    pub(super) median: String,
    pub(super) slow: String,
    /// Each minute's values, so that one alone is seen, too.
    pub(super) dots: Vec<(String, String, &'static str)>,
    pub(super) top: String,
    pub(super) told: String,
}

impl Latency {
    pub(super) fn of(minutes: &[Minute]) -> Self {
        let of = |part: f64| minutes.iter().map(|minute| minute.quantile(part)).collect::<Vec<_>>();
        let (medians, slows) = (of(0.5), of(0.95));
        let most = slows.iter().flatten().copied().fold(0.0, f64::max);
        let top = nice(most).max(0.001);
        let column = WIDTH / minutes.len().max(1) as f64;
        let point = |place: usize, value: f64| {
            let (x, y) = (place as f64 * column + column / 2.0, HEIGHT - value / top * (HEIGHT - 4.0) - 2.0);
            (format!("{x:.1}"), format!("{y:.1}"))
        };
        let path = |values: &[Option<f64>]| {
            let mut path = String::new();
            let known = values.iter().enumerate().filter_map(|(place, value)| value.map(|value| (place, value)));
            for (number, (place, value)) in known.enumerate() {
                let (x, y) = point(place, value);
                path.push_str(&format!("{}{x} {y}", if number == 0 { "M" } else { " L" }));
            }
            path
        };
        let dots = |values: &[Option<f64>], class: &'static str| {
            let known = values.iter().enumerate().filter_map(|(place, value)| value.map(|value| (place, value)));
            known.map(|(place, value)| point(place, value)).map(|(x, y)| (x, y, class)).collect::<Vec<_>>()
        };
        let seconds = |seconds: f64| show::exact(jiff::SignedDuration::from_secs_f64(seconds));
        let last = |values: &[Option<f64>]| values.iter().rev().flatten().next().copied();
        let told = match (last(&medians), last(&slows)) {
            (Some(median), Some(slow)) => format!(
                "Of the tasks that ended last, half took less than {}, and 95 of 100 less than {}.",
                seconds(median),
                seconds(slow)
            ),
            _ => "No task has ended in the last hour.".to_owned(),
        };
        let mut all = dots(&medians, "median");
        all.extend(dots(&slows, "slow"));
        Self { median: path(&medians), slow: path(&slows), dots: all, top: seconds(top), told }
    }
}

/// The next round number.
fn nice(most: f64) -> f64 {
    if most <= 0.0 {
        return 0.0;
    }
    let power = 10f64.powf(most.log10().floor());
    let part = most / power;
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|step| part <= *step).unwrap_or(10.0);
    step * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_of_a_chart_is_a_round_number_above_everything() {
        for (most, top) in [(0.0, 0.0), (1.0, 1.0), (3.0, 5.0), (17.0, 20.0), (101.0, 200.0), (0.24, 0.25)] {
            assert!((nice(most) - top).abs() < 1e-9, "{most}: {}", nice(most));
        }
    }

    #[test]
    fn a_chart_of_nothing_is_empty_and_says_so() {
        let nothing = vec![Minute::default(); 60];
        assert!(Throughput::of(&nothing).blocks.is_empty());
        let latency = Latency::of(&nothing);
        assert!(latency.median.is_empty() && latency.told.contains("No task"));
    }
}
