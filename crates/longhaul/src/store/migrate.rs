//! The schema's versions. Both stores have the same numbers; each runs its own text, all missing
//! versions in one transaction.

use super::StoreError;
use crate::faults;

/// One step of the schema.
pub(crate) struct Migration {
    pub(crate) version: i64,
    pub(crate) name: &'static str,
    pub(crate) sqlite: &'static str,
    pub(crate) postgres: &'static str,
}

/// All of them, oldest first.
pub(crate) const MIGRATIONS: &[Migration] = &[
    Migration {
        version: 1,
        name: "engine",
        sqlite: include_str!("../../migrations/sqlite/V001__engine.sql"),
        postgres: include_str!("../../migrations/postgres/V001__engine.sql"),
    },
    Migration {
        version: 2,
        name: "schedules",
        sqlite: include_str!("../../migrations/sqlite/V002__schedules.sql"),
        postgres: include_str!("../../migrations/postgres/V002__schedules.sql"),
    },
    Migration {
        version: 3,
        name: "locks",
        sqlite: include_str!("../../migrations/sqlite/V003__locks.sql"),
        postgres: include_str!("../../migrations/postgres/V003__locks.sql"),
    },
    Migration {
        version: 4,
        name: "outbox",
        sqlite: include_str!("../../migrations/sqlite/V004__outbox.sql"),
        postgres: include_str!("../../migrations/postgres/V004__outbox.sql"),
    },
    Migration {
        version: 5,
        name: "reads",
        sqlite: include_str!("../../migrations/sqlite/V005__reads.sql"),
        postgres: include_str!("../../migrations/postgres/V005__reads.sql"),
    },
    Migration {
        version: 6,
        name: "undo",
        sqlite: include_str!("../../migrations/sqlite/V006__undo.sql"),
        postgres: include_str!("../../migrations/postgres/V006__undo.sql"),
    },
    Migration {
        version: 7,
        name: "undo_on",
        sqlite: include_str!("../../migrations/sqlite/V007__undo_on.sql"),
        postgres: include_str!("../../migrations/postgres/V007__undo_on.sql"),
    },
    Migration {
        version: 8,
        name: "subscribers",
        sqlite: include_str!("../../migrations/sqlite/V008__subscribers.sql"),
        postgres: include_str!("../../migrations/postgres/V008__subscribers.sql"),
    },
    Migration {
        version: 9,
        name: "lock_sessions",
        sqlite: include_str!("../../migrations/sqlite/V009__lock_sessions.sql"),
        postgres: include_str!("../../migrations/postgres/V009__lock_sessions.sql"),
    },
];

/// Which migrations a database at version `found` (0: empty) needs. A schema serves the binaries
/// of its own version and of the one before; anything newer is refused.
pub(crate) fn missing(found: i64) -> Result<impl Iterator<Item = &'static Migration>, StoreError> {
    let newest = MIGRATIONS.last().map_or(0, |migration| migration.version);
    if found > newest + 1 {
        return Err(StoreError::Incompatible(format!(
            "the database has schema version {found}, this program knows version {newest}; use a newer longhaul"
        )));
    }
    let known = faults::newest_schema();
    Ok(MIGRATIONS.iter().filter(move |migration| migration.version > found && migration.version <= known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_serves_its_own_binaries_and_those_of_the_version_before() {
        let newest = MIGRATIONS.last().expect("there is one").version;
        assert_eq!(missing(0).expect("empty").count(), MIGRATIONS.len());
        assert_eq!(missing(newest).expect("current").count(), 0);
        assert_eq!(missing(newest + 1).expect("one newer").count(), 0);
        assert!(missing(newest + 2).is_err());
    }

    #[test]
    fn versions_are_numbered_without_gaps() {
        assert!(MIGRATIONS.iter().map(|migration| migration.version).eq(1..=MIGRATIONS.len() as i64));
    }
}
