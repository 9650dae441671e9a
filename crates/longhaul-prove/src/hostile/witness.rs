//! Whether something was stored: a look at the store past everyone who is tested.
//!
//! [`Witness::version`] is cheap and changes with every transaction that wrote, and now and then without one;
//! [`Witness::digest`] reads everything there is.

use std::collections::BTreeSet;

use longhaul::TaskId;
use rusqlite::types::ValueRef;
use sha2::{Digest as _, Sha256};
use tokio_postgres::NoTls;

use super::trial::Broke;

/// See the module.
pub(super) enum Witness {
    Sqlite(Box<rusqlite::Connection>),
    Postgres(Box<tokio_postgres::Client>),
}

/// What the store has that somebody asked for, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) tasks: BTreeSet<String>,
    pub(super) schedules: BTreeSet<String>,
    pub(super) endpoints: BTreeSet<String>,
    pub(super) tokens: BTreeSet<String>,
}

/// What is looked for, and where.
const HELD: [&str; 4] =
    ["SELECT id FROM tasks", "SELECT name FROM schedules", "SELECT name FROM endpoints", "SELECT id FROM tokens"];

impl Witness {
    /// Looks at the file of a store on SQLite.
    pub(super) fn of_file(path: &std::path::Path) -> Result<Self, Broke> {
        let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
        Ok(Self::Sqlite(Box::new(rusqlite::Connection::open_with_flags(path, flags)?)))
    }

    /// Looks at a store on PostgreSQL, by its URL.
    pub(super) async fn of_server(url: &str) -> Result<Self, Broke> {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        // Ends with the client.
        tokio::spawn(connection);
        Ok(Self::Postgres(Box::new(client)))
    }

    /// Another one than before if something was written in between.
    pub(super) async fn version(&self) -> Result<String, Broke> {
        match self {
            Self::Sqlite(connection) => {
                let version: i64 = connection.query_row("PRAGMA data_version", [], |row| row.get(0))?;
                Ok(version.to_string())
            }
            Self::Postgres(client) => {
                let row = client.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await?;
                Ok(row.get(0))
            }
        }
    }

    /// The same if and only if the store has the same content.
    pub(super) async fn digest(&self) -> Result<[u8; 32], Broke> {
        match self {
            Self::Sqlite(connection) => digest_of_file(connection),
            Self::Postgres(client) => {
                let tables = client
                    .query("SELECT table_name::text FROM information_schema.tables WHERE table_schema = current_schema() ORDER BY 1", &[])
                    .await?;
                let mut digest = Sha256::new();
                for table in tables {
                    let table: String = table.get(0);
                    digest.update(&table);
                    for row in client.query(&format!("SELECT t::text FROM \"{table}\" t ORDER BY 1"), &[]).await? {
                        digest.update(row.get::<_, String>(0));
                        digest.update([0]);
                    }
                }
                Ok(digest.finalize().into())
            }
        }
    }

    /// What the store has.
    pub(super) async fn held(&self) -> Result<Held, Broke> {
        let mut sets: [BTreeSet<String>; 4] = Default::default();
        for (query, set) in HELD.iter().zip(&mut sets) {
            match self {
                Self::Sqlite(connection) => {
                    let mut statement = connection.prepare_cached(query)?;
                    let mut rows = statement.query([])?;
                    while let Some(row) = rows.next()? {
                        set.insert(match row.get_ref(0)? {
                            ValueRef::Blob(id) => TaskId(uuid::Uuid::from_slice(id)?).to_string(),
                            other => other.as_str()?.to_owned(),
                        });
                    }
                }
                Self::Postgres(client) => {
                    let text = query.replacen(" FROM", "::text FROM", 1);
                    set.extend(client.query(&text, &[]).await?.into_iter().map(|row| row.get::<_, String>(0)));
                }
            }
        }
        let [tasks, schedules, endpoints, tokens] = sets;
        Ok(Held { tasks, schedules, endpoints, tokens })
    }
}

fn digest_of_file(connection: &rusqlite::Connection) -> Result<[u8; 32], Broke> {
    let mut tables =
        connection.prepare_cached("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")?;
    let tables: Vec<String> = tables.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    let mut digest = Sha256::new();
    for table in tables {
        digest.update(&table);
        let mut statement = connection.prepare_cached(&format!("SELECT * FROM \"{table}\" ORDER BY 1, 2"))?;
        let columns = statement.column_count();
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            for column in 0..columns {
                digest.update(format!("{:?}", row.get_ref(column)?));
                digest.update([0]);
            }
        }
    }
    Ok(digest.finalize().into())
}
