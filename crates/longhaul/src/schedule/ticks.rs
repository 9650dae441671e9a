//! When the ticks of a schedule are: pure functions over microseconds.
//!
//! Cron times are read on the clocks of a time zone, which now and then leave an hour out or show
//! one twice. Two kinds of expressions want two kinds of answers:
//!
//! - **Every hour** (`*` for hours): it fires whenever the clocks show a time that matches. An hour
//!   that is left out has no ticks, one that comes twice has them twice, so `*/5 * * * *` is always
//!   five minutes apart.
//! - **Named hours** (`30 2 * * *`): every date and time that matches fires exactly once. One that
//!   the clocks leave out fires as soon as they go on; one that comes twice fires the first time.

use std::time::Duration;

use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, TimeZone};

use super::When;
use crate::store::clock::micros;
use crate::task::{Invalid, timestamp};

const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(10 * 366 * 86_400);
/// Longer expressions and names are refused unread.
const MAX_EXPRESSION: usize = 255;
const MAX_ZONE: usize = 64;

/// The ticks of one schedule, in order and without end (or until the year 5000).
#[derive(Debug)]
pub(super) enum Ticks {
    Every { anchor: i64, every: i64 },
    EveryHour { cron: Box<Cron>, zone: TimeZone },
    NamedHours { cron: Box<Cron>, zone: TimeZone },
}

impl Ticks {
    /// `anchor`: the moment from which intervals are counted.
    pub(super) fn of(when: &When, anchor: i64) -> Result<Self, Invalid> {
        let (expression, zone) = match when {
            When::Every(every) => return interval(*every, anchor),
            When::Cron { expr, time_zone } => (expr, zone(time_zone)?),
        };
        let cron = Box::new(cron(expression)?);
        let ticks = if (0..24).all(|hour| cron.pattern.hour_match(hour).unwrap_or(false)) {
            Self::EveryHour { cron, zone }
        } else {
            Self::NamedHours { cron, zone }
        };
        // Without years, what ever matches does so within a few decades of any moment.
        if ticks.after(0).is_none() {
            let problem = format!("'{expression}' never happens; check its day and month");
            return Err(Invalid::new("cron", problem));
        }
        Ok(ticks)
    }

    /// The first tick after `moment`.
    pub(super) fn after(&self, moment: i64) -> Option<i64> {
        match self {
            Self::Every { anchor, every } => {
                let passed = moment.checked_sub(*anchor)?.max(0) / every;
                passed.checked_add(1)?.checked_mul(*every)?.checked_add(*anchor)
            }
            Self::EveryHour { cron, zone } => {
                let start = timestamp(moment).to_zoned(zone.clone());
                let next = cron.find_next_occurrence(&start, false).ok()?;
                Some(next.timestamp().as_microsecond()).filter(|&next| next > moment)
            }
            Self::NamedHours { cron, zone } => {
                // Dates and times in order have moments in order, so the search starts at what the
                // clocks show now and ends with the first one whose moment has not passed.
                let mut shown: DateTime = timestamp(moment).to_zoned(zone.clone()).datetime();
                loop {
                    shown = cron.find_next_occurrence(&shown, false).ok()?;
                    let next = moment_of(shown, zone)?.as_microsecond();
                    if next > moment {
                        return Some(next);
                    }
                }
            }
        }
    }

    /// The newest tick up to `now`, found in few steps however many there are since `known`, which
    /// is one of them.
    pub(super) fn newest(&self, known: i64, now: i64) -> i64 {
        let (mut newest, mut none_after) = (known, now);
        while self.after(newest).is_some_and(|next| next <= now) {
            let middle = newest + (none_after - newest) / 2;
            match self.after(middle) {
                Some(tick) if tick <= now => newest = tick,
                _ => none_after = middle,
            }
        }
        newest
    }
}

fn interval(every: Duration, anchor: i64) -> Result<Ticks, Invalid> {
    if !(SHORTEST..=LONGEST).contains(&every) {
        return Err(Invalid::new("every", format!("is {every:?}; it must be 1 second to 10 years")));
    }
    Ok(Ticks::Every { anchor, every: micros(every) })
}

fn cron(expression: &str) -> Result<Cron, Invalid> {
    let refused = |why: String| {
        let shown: String = expression.chars().take(80).flat_map(char::escape_debug).collect();
        let remedy = "use 5 fields (minute hour day month weekday), or 6 with seconds first, as in '0 9 * * 1-5'";
        Invalid::new("cron", format!("'{shown}' is not understood ({why}); {remedy}"))
    };
    let plain = |c: char| c.is_ascii_graphic() || c == ' ' || c == '\t';
    if expression.len() > MAX_EXPRESSION || !expression.chars().all(plain) {
        return Err(refused(format!("it must have at most {MAX_EXPRESSION} characters, all of them plain")));
    }
    let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
    parser.parse(expression).map_err(|error| refused(error.to_string().trim_end_matches('.').to_owned()))
}

fn zone(name: &str) -> Result<TimeZone, Invalid> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/_+-".contains(c);
    let known = Some(name).filter(|name| name.len() <= MAX_ZONE && name.chars().all(plain));
    known.and_then(|name| TimeZone::get(name).ok()).filter(|zone| !zone.is_unknown()).ok_or_else(|| {
        let shown: String = name.chars().take(MAX_ZONE).flat_map(char::escape_debug).collect();
        Invalid::new("time_zone", format!("'{shown}' is not known; use a name like Europe/Berlin, or UTC"))
    })
}

/// The moment at which a date and time fires in a zone.
fn moment_of(shown: DateTime, zone: &TimeZone) -> Option<Timestamp> {
    match zone.to_ambiguous_timestamp(shown).offset() {
        AmbiguousOffset::Unambiguous { offset } => offset.to_timestamp(shown).ok(),
        AmbiguousOffset::Fold { before, .. } => before.to_timestamp(shown).ok(),
        AmbiguousOffset::Gap { after, .. } => {
            // Read with the offset that holds after the gap, it is a moment before the gap.
            let before_gap = after.to_timestamp(shown).ok()?;
            zone.following(before_gap).next().map(|change| change.timestamp())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: i64 = 1_000_000;

    fn at(text: &str) -> i64 {
        text.parse::<Timestamp>().expect("the test's text is a moment").as_microsecond()
    }

    fn ticks(expr: &str, time_zone: &str) -> Ticks {
        let when = When::Cron { expr: expr.into(), time_zone: time_zone.into() };
        Ticks::of(&when, 0).expect("the test's schedule is one")
    }

    /// All ticks after one moment and up to another, as the clocks of the zone show them.
    fn between(expr: &str, time_zone: &str, from: &str, to: &str) -> Vec<String> {
        let (ticks, zone, to) = (ticks(expr, time_zone), zone(time_zone).expect("known"), at(to));
        let shown = |tick| timestamp(tick).to_zoned(zone.clone()).strftime("%d. %H:%M %:z").to_string();
        std::iter::successors(ticks.after(at(from)), |&tick| ticks.after(tick))
            .take_while(|&tick| tick <= to)
            .map(shown)
            .collect()
    }

    #[test]
    fn a_time_that_the_clocks_leave_out_fires_as_soon_as_they_go_on() {
        let berlin = between("30 2 * * *", "Europe/Berlin", "2026-03-28T00:00:00Z", "2026-03-30T12:00:00Z");
        assert_eq!(berlin, ["28. 02:30 +01:00", "29. 03:00 +02:00", "30. 02:30 +02:00"]);
        let new_york =
            between("15,45 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", "2026-03-09T12:00:00Z");
        assert_eq!(new_york, ["08. 03:00 -04:00", "09. 02:15 -04:00", "09. 02:45 -04:00"]);
        let lord_howe =
            between("15 2 * * *", "Australia/Lord_Howe", "2026-10-02T16:00:00Z", "2026-10-04T20:00:00Z");
        assert_eq!(lord_howe, ["04. 02:30 +11:00", "05. 02:15 +11:00"]);
        // The clocks of Cuba go on at midnight.
        let havana = between("0 0 * * *", "America/Havana", "2026-03-07T12:00:00Z", "2026-03-09T12:00:00Z");
        assert_eq!(havana, ["08. 01:00 -04:00", "09. 00:00 -04:00"]);
        // Samoa left out the whole of 30 December 2011.
        let apia = between("0 12 * * *", "Pacific/Apia", "2011-12-29T12:00:00Z", "2012-01-01T00:00:00Z");
        assert_eq!(apia, ["29. 12:00 -10:00", "31. 00:00 +14:00", "31. 12:00 +14:00", "01. 12:00 +14:00"]);
    }

    #[test]
    fn a_time_that_the_clocks_show_twice_fires_once() {
        let berlin = between("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", "2026-10-26T12:00:00Z");
        assert_eq!(berlin, ["25. 02:30 +02:00", "26. 02:30 +01:00"]);
        let new_york =
            between("*/20 1-2 * * *", "America/New_York", "2026-11-01T04:00:00Z", "2026-11-01T12:00:00Z");
        assert_eq!(
            new_york,
            [
                "01. 01:00 -04:00",
                "01. 01:20 -04:00",
                "01. 01:40 -04:00",
                "01. 02:00 -05:00",
                "01. 02:20 -05:00",
                "01. 02:40 -05:00"
            ]
        );
        let lord_howe =
            between("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T00:00:00Z", "2026-04-05T20:00:00Z");
        assert_eq!(lord_howe, ["05. 01:45 +11:00", "06. 01:45 +10:30"]);
    }

    #[test]
    fn every_hour_follows_the_clocks_through_every_change() {
        let berlin = between("30 * * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", "2026-03-29T02:45:00Z");
        assert_eq!(berlin, ["29. 01:30 +01:00", "29. 03:30 +02:00", "29. 04:30 +02:00"]);
        let berlin = between("30 * * * *", "Europe/Berlin", "2026-10-24T23:45:00Z", "2026-10-25T02:45:00Z");
        assert_eq!(berlin, ["25. 02:30 +02:00", "25. 02:30 +01:00", "25. 03:30 +01:00"]);
        let lord_howe =
            between("*/20 * * * *", "Australia/Lord_Howe", "2026-04-04T14:15:00Z", "2026-04-04T15:45:00Z");
        assert_eq!(lord_howe, ["05. 01:20 +11:00", "05. 01:40 +11:00", "05. 01:40 +10:30", "05. 02:00 +10:30"]);
    }

    #[test]
    fn five_fields_six_fields_names_and_nicknames_are_understood() {
        let from = at("2026-01-01T00:00:00Z");
        for (expr, next) in [
            ("0 9 * * 1-5", "2026-01-01T09:00:00Z"),
            ("15 30 9 * * *", "2026-01-01T09:30:15Z"),
            ("0 9 * * MON", "2026-01-05T09:00:00Z"),
            ("0 0 L * *", "2026-01-31T00:00:00Z"),
            ("0 0 29 2 *", "2028-02-29T00:00:00Z"),
            ("0 12 * * 5#2", "2026-01-09T12:00:00Z"),
            ("@daily", "2026-01-02T00:00:00Z"),
            ("@hourly", "2026-01-01T01:00:00Z"),
        ] {
            assert_eq!(ticks(expr, "UTC").after(from), Some(at(next)), "{expr}");
        }
    }

    #[test]
    fn what_is_no_schedule_is_refused_with_a_remedy() {
        for expr in [
            "",
            " ",
            "* * * *",
            "* * * * * * *",
            "61 * * * *",
            "* * * * 8",
            "a b c d e",
            "@never",
            "*/0 * * * *",
            "5-1 * * * *",
            "-1 * * * *",
            "0 0 * * \u{0}",
            "٣ * * * *",
            "99999999999 * * * *",
            "0 0 30 2 *",
            "0 0 31 2,4,6,9,11 *",
        ] {
            let when = When::Cron { expr: expr.into(), time_zone: "UTC".into() };
            let refused = Ticks::of(&when, 0).expect_err(expr);
            assert_eq!(refused.field, "cron", "{expr}");
            assert!(!refused.problem.contains('\0') && refused.problem.len() < 600, "{refused}");
        }
        let long = When::Cron { expr: "0,".repeat(100_000), time_zone: "UTC".into() };
        assert_eq!(Ticks::of(&long, 0).expect_err("too long").field, "cron");
        for time_zone in
            ["", "Mars/Olympus", "CET-1CEST", "../../etc/passwd", "Europe/Ber\0lin", "Etc/Unknown", "é"]
        {
            let when = When::Cron { expr: "0 0 * * *".into(), time_zone: time_zone.into() };
            assert_eq!(Ticks::of(&when, 0).expect_err(time_zone).field, "time_zone");
        }
        for every in [Duration::ZERO, Duration::from_millis(999), LONGEST + Duration::from_nanos(1), Duration::MAX]
        {
            assert_eq!(Ticks::of(&When::Every(every), 0).expect_err("out of range").field, "every");
        }
    }

    #[test]
    fn intervals_are_counted_from_their_anchor_and_do_not_drift() {
        let anchor = at("2026-01-01T00:00:07Z");
        let ticks = Ticks::of(&When::Every(Duration::from_secs(600)), anchor).expect("a schedule");
        assert_eq!(ticks.after(anchor), Some(at("2026-01-01T00:10:07Z")));
        assert_eq!(ticks.after(anchor - 5 * SECOND), Some(at("2026-01-01T00:10:07Z")));
        // However late each look is, the ticks stay where they are.
        assert_eq!(ticks.after(at("2026-01-01T00:12:59.5Z")), Some(at("2026-01-01T00:20:07Z")));
        assert_eq!(ticks.after(at("2026-06-01T00:00:07Z")), Some(at("2026-06-01T00:10:07Z")));
        assert_eq!(ticks.after(i64::MAX), None);
    }

    const ZONES: [&str; 6] =
        ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "America/Havana"];

    fn expression() -> impl Strategy<Value = String> {
        let minute =
            prop_oneof![Just("*".to_owned()), Just("*/7".to_owned()), (0..60u8).prop_map(|m| m.to_string())];
        let hour = prop_oneof![
            Just("*".to_owned()),
            Just("*/2".to_owned()),
            (0..24u8).prop_map(|h| h.to_string()),
            (0..4u8).prop_map(|h| format!("{h},{}", h + 1)),
        ];
        (minute, hour).prop_map(|(minute, hour)| format!("{minute} {hour} * * *"))
    }

    proptest! {
        /// Around the changes of clocks of 2026, minute by minute, against what the clocks show.
        #[test]
        fn ticks_are_what_the_clocks_show(expr in expression(), zone_no in 0..ZONES.len(), change in 0..2usize) {
            let zone = zone(ZONES[zone_no]).expect("known");
            let year = at("2026-01-01T00:00:00Z");
            let change = zone.following(timestamp(year)).nth(change)
                .map_or(year, |change| change.timestamp().as_microsecond());
            // Some zones end their list of changes with one at an odd second that changes nothing.
            let change = change - change % (60 * SECOND);
            let (from, to) = (change - 4 * 3_600 * SECOND, change + 4 * 3_600 * SECOND);
            let ticks = ticks(&expr, ZONES[zone_no]);
            let found: Vec<i64> = std::iter::successors(ticks.after(from), |&tick| ticks.after(tick))
                .take_while(|&tick| tick <= to).collect();
            let parsed = cron(&expr).expect("an expression");
            let minutes = (1..=8 * 60).map(|minute| from + minute * 60 * SECOND);
            let shows = |moment: i64| timestamp(moment).to_zoned(zone.clone()).datetime();
            let matching = |moment: &i64| parsed.is_time_matching(&shows(*moment)).expect("comparable");
            let expected: Vec<i64> = if expr.split(' ').nth(1) == Some("*") {
                minutes.filter(matching).collect()
            } else {
                // The first time each matching time is shown, and the end of a gap for those in it.
                let (mut expected, mut newest) = (Vec::new(), shows(from));
                for moment in minutes {
                    let shown = shows(moment);
                    let passed = std::iter::successors(Some(newest), |time| time.checked_add(jiff::Span::new().minutes(1)).ok())
                        .skip(1).take_while(|time| *time <= shown)
                        .any(|time| parsed.is_time_matching(&time).expect("comparable"));
                    if passed {
                        expected.push(moment);
                    }
                    newest = newest.max(shown);
                }
                expected
            };
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn the_newest_tick_is_found_however_many_there_are(
            expr in expression(), zone_no in 0..ZONES.len(), days in 0..400i64, seconds in 0..86_400i64,
        ) {
            let ticks = ticks(&expr, ZONES[zone_no]);
            let known = ticks.after(at("2026-01-01T00:00:00Z")).expect("it goes on");
            let now = known + (days * 86_400 + seconds) * SECOND;
            let newest = ticks.newest(known, now);
            prop_assert!(known <= newest && newest <= now);
            prop_assert!(ticks.after(newest).expect("it goes on") > now);
            prop_assert!(newest == known || ticks.after(newest - 1) == Some(newest), "it is a tick");
        }

        #[test]
        fn no_text_breaks_the_parser(expr in "[-*/,0-9LW#?@A-Za-z+ ]{0,24}", any in ".{0,40}") {
            for expr in [expr, any] {
                let _ = Ticks::of(&When::Cron { expr: expr.clone(), time_zone: "Europe/Berlin".into() }, 0);
                let _ = Ticks::of(&When::Cron { expr: "0 0 * * *".into(), time_zone: expr }, 0);
            }
        }

        #[test]
        fn intervals_follow_each_other_by_exactly_their_length(
            anchor in 0..2_000_000_000i64, every in 1..100_000u64, moment in 0..4_000_000_000i64,
        ) {
            let ticks = Ticks::of(&When::Every(Duration::from_secs(every)), anchor * SECOND).expect("a schedule");
            let every = i64::try_from(every).expect("small") * SECOND;
            let next = ticks.after(moment * SECOND).expect("it goes on");
            prop_assert!(next > moment * SECOND && (next - anchor * SECOND) % every == 0);
            prop_assert!(next - every <= (moment.max(anchor)) * SECOND);
            prop_assert_eq!(ticks.after(next), Some(next + every));
            prop_assert_eq!(ticks.newest(next, next + every * 1_000 + 1), next + every * 1_000);
        }
    }
}
