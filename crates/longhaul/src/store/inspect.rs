//! Looking at a store without changing it: which program keeps it, and which version its schema has.

use rusqlite::{Connection, OpenFlags, OptionalExtension};

use super::postgres::PostgresStore;
use super::{StoreError, migrate, sqlite};

/// What a store says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspected {
    /// `SQLite 3.51.3`, `PostgreSQL 17.2`.
    pub engine: String,
    /// The version of its schema; 0 when it has none yet.
    pub schema: i64,
    /// The newest version that this program knows.
    pub newest: i64,
}

/// Looks at the store at `url`, which must exist. Makes nothing and brings nothing up to date.
pub async fn inspect(url: &str) -> Result<Inspected, StoreError> {
    let newest = migrate::MIGRATIONS.last().map_or(0, |migration| migration.version);
    let (engine, schema) = if let Some(path) = url.strip_prefix("sqlite:") {
        let path = path.strip_prefix("//").unwrap_or(path).to_owned();
        let found = tokio::task::spawn_blocking(move || sqlite_schema(&path)).await;
        let schema = found.map_err(|error| StoreError::Failed(error.to_string()))??;
        (format!("SQLite {}", rusqlite::version()), schema)
    } else if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        PostgresStore::inspect(url).await?
    } else {
        return Err(StoreError::Url(format!("'{url}' is not a store that can be looked at from outside")));
    };
    Ok(Inspected { engine, schema, newest })
}

fn sqlite_schema(path: &str) -> Result<i64, StoreError> {
    // Not read-only: without its shared memory, a database that nobody has open could not be read.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)
        .map_err(|error| StoreError::Url(format!("cannot open '{path}': {error}")))?;
    let table = "SELECT 1 FROM sqlite_schema WHERE name = 'longhaul_migrations'";
    let known = connection.query_row(table, [], |_| Ok(())).optional().map_err(sqlite::store_error)?;
    if known.is_none() {
        return Ok(0);
    }
    let newest = "SELECT coalesce(max(version), 0) FROM longhaul_migrations";
    connection.query_row(newest, [], |row| row.get(0)).map_err(sqlite::store_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Client;

    #[tokio::test]
    async fn looking_at_a_store_changes_nothing() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.db");
        let url = format!("sqlite:{}", path.display());
        assert!(matches!(inspect(&url).await, Err(StoreError::Url(_))), "there is none");
        assert!(!path.exists(), "and none is made");
        Connection::open(&path).expect("made").execute_batch("CREATE TABLE other (a)").expect("made");
        assert_eq!(inspect(&url).await.expect("looked at").schema, 0);
        std::fs::remove_file(&path).expect("removed");
        Client::open(&url).await.expect("made");
        let found = inspect(&url).await.expect("looked at");
        assert_eq!(found.schema, found.newest);
        assert!(found.engine.starts_with("SQLite 3."), "{}", found.engine);
    }

    #[tokio::test]
    async fn a_schema_of_postgres_is_looked_at_too() {
        let Ok(server) = std::env::var("LONGHAUL_TEST_POSTGRES") else {
            eprintln!("skipped: needs PostgreSQL; set LONGHAUL_TEST_POSTGRES or use ./dev test");
            return;
        };
        let schema = format!("inspect_{}", crate::TaskId::new().0.simple());
        let (admin, connection) =
            tokio_postgres::connect(&server, tokio_postgres::NoTls).await.expect("it answers");
        tokio::spawn(connection);
        admin.batch_execute(&format!("CREATE SCHEMA {schema}")).await.expect("a schema");
        let url = format!("{server}?options=-csearch_path%3D{schema}");
        assert_eq!(inspect(&url).await.expect("looked at").schema, 0);
        Client::open(&url).await.expect("made");
        let found = inspect(&url).await.expect("looked at");
        assert_eq!(found.schema, found.newest);
        assert!(found.engine.starts_with("PostgreSQL "), "{}", found.engine);
        admin.batch_execute(&format!("DROP SCHEMA {schema} CASCADE")).await.expect("dropped");
    }
}
