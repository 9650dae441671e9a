//! Sessions at lock services. Who decides about one has the lock's row locked.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::PostgresStore;
use super::connect::Tx;
use super::locks::look_after;
use super::rows::{get_u64, to_i64};
use crate::store::clock::micros;
use crate::store::locks::{Line, key, name_of};
use crate::store::sessions::{FORGET, LockInfo, Look, Note, SERVICE, Session, SessionStore, Stage, Which};
use crate::store::{Action, Control, StoreError};
use crate::task::{TaskId, timestamp};

/// Shared by those who take a token, exclusive for who raises their counter.
pub(super) const TOKEN_LOCK: i64 = 0x6c68_746f_6b65;
/// How many sessions are decided about in one transaction.
const AT_ONCE: usize = 100;

#[async_trait]
impl SessionStore for PostgresStore {
    async fn choose_lock_service(&self, service: Option<&str>) -> Result<(), StoreError> {
        let tx = self.tx().await?;
        tx.begin().await?;
        match service {
            Some(name) => tx.execute(include_str!("sql/setting_save.sql"), &[&SERVICE, &name]).await?,
            None => tx.execute("DELETE FROM settings WHERE name = $1", &[&SERVICE]).await?,
        };
        let params: super::connect::Params<'_> = &[&service, &self.clock.offset(), &micros(FORGET)];
        tx.execute(include_str!("sql/session_leave.sql"), params).await?;
        tx.commit().await?;
        self.hints.tell_sessions();
        Ok(())
    }

    async fn lock_service(&self) -> Result<Option<String>, StoreError> {
        let tx = self.tx().await?;
        let rows = tx.rows("SELECT value FROM settings WHERE name = $1", &[&SERVICE]).await?;
        tx.end();
        rows.first().map(|row| Ok(row.try_get(0)?)).transpose()
    }

    async fn due_sessions(
        &self,
        service: &str,
        patience: Duration,
        limit: usize,
    ) -> Result<Vec<Look>, StoreError> {
        let tx = self.tx().await?;
        let params: super::connect::Params<'_> =
            &[&service, &self.clock.offset(), &micros(patience), &to_i64(limit)];
        let rows = tx.rows(include_str!("sql/session_due.sql"), params).await?;
        tx.end();
        let look = |row: &Row| {
            Ok(Look {
                key: row.try_get(0)?,
                session: row.try_get(1)?,
                stage: Stage::from_code(row.try_get(2)?),
                token: get_u64(row, 3)?,
                at: row.try_get(4)?,
            })
        };
        rows.iter().map(look).collect()
    }

    async fn note_sessions(&self, notes: &[Note]) -> Result<(), StoreError> {
        if let Some(largest) = notes.iter().filter_map(Note::raises).max() {
            raise(self, largest).await?;
        }
        for notes in notes.chunks(AT_ONCE) {
            let keys: BTreeSet<&str> = notes.iter().map(|note| note.look.key.as_str()).collect();
            look_after(self, &[], &keys, notes).await?;
        }
        Ok(())
    }

    async fn locks(&self, tenant: &str, which: &Which) -> Result<Vec<LockInfo>, StoreError> {
        let (from, to, limit) = which.range(tenant);
        let tx = self.tx().await?;
        let rows = tx.rows(include_str!("sql/locks.sql"), &[&from, &to, &limit]).await?;
        tx.end();
        rows.iter().map(info).collect()
    }
}

/// Lets tokens go on after one that was given elsewhere. In a transaction of its own, which waits for those
/// who take a token just now and has nothing that they could wait for.
async fn raise(store: &PostgresStore, largest: u64) -> Result<(), StoreError> {
    let tx = store.tx().await?;
    tx.begin().await?;
    tx.rows("SELECT pg_advisory_xact_lock($1)", &[&TOKEN_LOCK]).await?;
    tx.rows(include_str!("sql/lock_token_raise.sql"), &[&to_i64(largest)]).await?;
    tx.commit().await
}

pub(super) fn session(row: &Row) -> Result<Session, StoreError> {
    Ok(Session {
        service: row.try_get(1)?,
        id: row.try_get(2)?,
        stage: Stage::from_code(row.try_get(3)?),
        token: get_u64(row, 4)?,
        until: row.try_get(5)?,
        look_at: row.try_get(6)?,
        trouble: row.try_get(7)?,
    })
}

pub(super) async fn write(tx: &Tx, lines: impl Iterator<Item = &Line> + Clone) -> Result<(), StoreError> {
    let changed = lines.filter(|line| line.session_changed);
    let gone: Vec<&str> =
        changed.clone().filter(|line| line.session.is_none()).map(|line| line.key.as_str()).collect();
    if !gone.is_empty() {
        tx.execute(include_str!("sql/session_drop.sql"), &[&gone]).await?;
    }
    let saved: Vec<(&str, &Session)> =
        changed.filter_map(|line| Some((line.key.as_str(), line.session.as_ref()?))).collect();
    if saved.is_empty() {
        return Ok(());
    }
    fn column<'a, T>(saved: &[(&'a str, &'a Session)], value: impl Fn(&'a Session) -> T) -> Vec<T> {
        saved.iter().map(|(_, session)| value(session)).collect()
    }
    let keys: Vec<&str> = saved.iter().map(|(key, _)| *key).collect();
    tx.execute(
        include_str!("sql/session_save.sql"),
        &[
            &keys,
            &column(&saved, |session| session.service.as_str()),
            &column(&saved, |session| session.id.as_str()),
            &column(&saved, |session| session.stage.code()),
            &column(&saved, |session| to_i64(session.token)),
            &column(&saved, |session| session.until),
            &column(&saved, |session| session.look_at),
            &column(&saved, |session| session.trouble.as_deref()),
        ],
    )
    .await?;
    Ok(())
}

/// Those of the locks under which something is asked that are held as it says; they stay so until the
/// transaction ends. To be called before tasks are locked.
pub(super) async fn held(
    store: &PostgresStore,
    tx: &Tx,
    batch: &[Control],
) -> Result<BTreeSet<(String, u64)>, StoreError> {
    let under = |control: &Control| match &control.action {
        Action::Patch { under: Some(lock), .. } => Some((key(&control.tenant, &lock.name), lock.token)),
        _ => None,
    };
    let under: BTreeSet<(String, u64)> = batch.iter().filter_map(under).collect();
    if under.is_empty() {
        return Ok(under);
    }
    let keys: Vec<&str> = under.iter().map(|(key, _)| key.as_str()).collect();
    let tokens: Vec<i64> = under.iter().map(|(_, token)| to_i64(*token)).collect();
    let params: super::connect::Params<'_> = &[&keys, &tokens, &store.clock.offset()];
    let rows = tx.rows(include_str!("sql/lock_held.sql"), params).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, get_u64(row, 1)?))).collect()
}

fn info(row: &Row) -> Result<LockInfo, StoreError> {
    let key: &str = row.try_get(0)?;
    let holder: Option<TaskId> = row.try_get::<_, Option<Uuid>>(1)?.map(TaskId);
    let time = |index: usize| Ok::<_, StoreError>(row.try_get::<_, Option<i64>>(index)?.map(timestamp));
    Ok(LockInfo {
        name: name_of(key).to_owned(),
        token: holder.map(|_| get_u64(row, 2)).transpose()?,
        holder,
        acquired_at: time(3)?,
        until: time(4)?,
        waiting: get_u64(row, 5)?,
        service: row.try_get(6)?,
        trouble: row.try_get(7)?,
    })
}
