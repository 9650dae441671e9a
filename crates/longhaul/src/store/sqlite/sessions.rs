//! Sessions at lock services.

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row};

use super::locks::{self, Why};
use super::rows::Id;
use super::{SqliteStore, Tx, store_error};
use crate::store::clock::micros;
use crate::store::locks::{Line, name_of};
use crate::store::sessions::{FORGET, LockInfo, Look, Note, SERVICE, Session, SessionStore, Stage, Which};
use crate::store::{LockToken, StoreError};
use crate::task::{TaskId, timestamp};

#[async_trait]
impl SessionStore for SqliteStore {
    async fn choose_lock_service(&self, service: Option<&str>) -> Result<(), StoreError> {
        let service = service.map(str::to_owned);
        self.write(false, move |tx| choose(tx, service.as_deref())).await
    }

    async fn lock_service(&self) -> Result<Option<String>, StoreError> {
        self.read(service).await
    }

    async fn due_sessions(
        &self,
        service: &str,
        patience: Duration,
        limit: usize,
    ) -> Result<Vec<Look>, StoreError> {
        let service = service.to_owned();
        // Most often there is nothing to do, and nothing to write then.
        let (of, now) = (service.clone(), self.clock.now_micros());
        let any = "SELECT 1 FROM lock_sessions WHERE service = ?1 AND look_at <= ?2";
        if !self.read(move |sql| sql.prepare_cached(any)?.exists((of, now))).await? {
            return Ok(Vec::new());
        }
        self.write(false, move |tx| due(tx, &service, patience, limit)).await
    }

    async fn note_sessions(&self, notes: &[Note]) -> Result<(), StoreError> {
        let notes = notes.to_vec();
        self.write(false, move |tx| notes.iter().try_for_each(|one| note(tx, one))).await
    }

    async fn locks(&self, tenant: &str, which: &Which) -> Result<Vec<LockInfo>, StoreError> {
        let (from, to, limit) = which.range(tenant);
        self.read(move |sql| {
            sql.prepare_cached(include_str!("sql/locks.sql"))?.query_map((from, to, limit), info)?.collect()
        })
        .await
    }
}

/// The service that has to give locks too.
pub(super) fn service(sql: &Connection) -> rusqlite::Result<Option<String>> {
    let mut select = sql.prepare_cached("SELECT value FROM settings WHERE name = ?")?;
    select.query_row([SERVICE], |row| row.get(0)).optional()
}

fn choose(tx: &mut Tx<'_>, service: Option<&str>) -> Result<(), StoreError> {
    let done = match service {
        Some(name) => tx.sql.execute(include_str!("sql/setting_save.sql"), (SERVICE, name)),
        None => tx.sql.execute("DELETE FROM settings WHERE name = ?", [SERVICE]),
    };
    done.map_err(store_error)?;
    tx.sql
        .execute(include_str!("sql/session_leave.sql"), (service, tx.now, micros(FORGET)))
        .map_err(store_error)?;
    tx.told.sessions = true;
    Ok(())
}

fn due(tx: &mut Tx<'_>, service: &str, patience: Duration, limit: usize) -> Result<Vec<Look>, StoreError> {
    let (now, until) = (tx.now, tx.now.saturating_add(micros(patience)));
    let look = |row: &Row<'_>| {
        Ok(Look {
            key: row.get(0)?,
            session: row.get(1)?,
            stage: Stage::from_code(row.get(2)?),
            token: row.get(3)?,
            at: now,
        })
    };
    tx.sql
        .prepare_cached(include_str!("sql/session_due.sql"))
        .and_then(|mut update| update.query_map((service, now, until, limit as i64), look)?.collect())
        .map_err(store_error)
}

fn note(tx: &mut Tx<'_>, note: &Note) -> Result<(), StoreError> {
    if let Some(largest) = note.raises() {
        tx.sql.execute(include_str!("sql/lock_token_raise.sql"), [largest]).map_err(store_error)?;
    }
    locks::settle(tx, &note.look.key, Why::Noted(note))
}

pub(super) fn read(tx: &Tx<'_>, key: &str) -> Result<Option<Session>, StoreError> {
    let session = |row: &Row<'_>| {
        Ok(Session {
            service: row.get(1)?,
            id: row.get(2)?,
            stage: Stage::from_code(row.get(3)?),
            token: row.get(4)?,
            until: row.get(5)?,
            look_at: row.get(6)?,
            trouble: row.get(7)?,
        })
    };
    tx.sql
        .prepare_cached(include_str!("sql/session_rows.sql"))
        .and_then(|mut select| select.query_row([key], session).optional())
        .map_err(store_error)
}

pub(super) fn write(tx: &mut Tx<'_>, line: &Line) -> Result<(), StoreError> {
    if !line.session_changed {
        return Ok(());
    }
    let done = match &line.session {
        Some(Session { service, id, stage, token, until, look_at, trouble }) => {
            tx.sql.prepare_cached(include_str!("sql/session_save.sql")).and_then(|mut save| {
                save.execute((&line.key, service, id, stage.code(), token, until, look_at, trouble))
            })
        }
        None => tx
            .sql
            .prepare_cached(include_str!("sql/session_drop.sql"))
            .and_then(|mut delete| delete.execute([&line.key])),
    };
    done.map_err(store_error)?;
    tx.told.sessions |= line.calls_for_a_look(tx.now);
    Ok(())
}

/// Whether a tenant's lock is held under a token.
pub(super) fn is_held(tx: &Tx<'_>, key: &str, lock: &LockToken) -> Result<bool, StoreError> {
    tx.sql
        .prepare_cached(include_str!("sql/lock_held.sql"))
        .and_then(|mut select| select.exists((key, lock.token, tx.now)))
        .map_err(store_error)
}

fn info(row: &Row<'_>) -> rusqlite::Result<LockInfo> {
    let key: String = row.get(0)?;
    let holder: Option<TaskId> = row.get::<_, Option<Id>>(1)?.map(|id| TaskId(id.0));
    Ok(LockInfo {
        name: name_of(&key).to_owned(),
        token: row.get::<_, Option<u64>>(2)?.filter(|_| holder.is_some()),
        holder,
        acquired_at: row.get::<_, Option<i64>>(3)?.map(timestamp),
        until: row.get::<_, Option<i64>>(4)?.map(timestamp),
        waiting: row.get(5)?,
        service: row.get(6)?,
        trouble: row.get(7)?,
    })
}
