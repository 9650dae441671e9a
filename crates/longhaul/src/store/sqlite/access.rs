//! Tokens.

use async_trait::async_trait;
use rusqlite::{OptionalExtension, Row};
use uuid::Uuid;

use super::rows::Id;
use super::{SqliteStore, store_error};
use crate::store::StoreError;
use crate::store::access::{AccessStore, MAX_TOKENS, Role, TokenInfo, TokenRow, USE_GRAIN, too_many_tokens};
use crate::store::clock::micros;
use crate::task::{Invalid, timestamp};

fn token(row: &Row<'_>) -> rusqlite::Result<TokenInfo> {
    let time = |column| row.get::<_, Option<i64>>(column).map(|time| time.map(timestamp));
    Ok(TokenInfo {
        id: row.get::<_, Id>(0)?.0,
        name: row.get(1)?,
        tenant: row.get(2)?,
        role: Role::from_code(row.get(3)?),
        created_at: timestamp(row.get(4)?),
        expires_at: time(5)?,
        revoked_at: time(6)?,
        last_used_at: time(7)?,
    })
}

#[async_trait]
impl AccessStore for SqliteStore {
    async fn save_token(&self, row: &TokenRow) -> Result<Result<TokenInfo, Invalid>, StoreError> {
        let TokenRow { id, hash, token: new } = row.clone();
        self.write(false, move |tx| {
            let count = |tx: &super::Tx<'_>| -> rusqlite::Result<u64> {
                tx.sql.query_row(include_str!("sql/token_count.sql"), (&new.tenant, Id(id), tx.now), |row| {
                    row.get(0)
                })
            };
            if count(tx).map_err(store_error)? >= MAX_TOKENS {
                return Ok(Err(too_many_tokens()));
            }
            let expires = new.expires_after.map(|time| tx.now + micros(time));
            let role = new.role.code();
            let params = (Id(id), hash, &new.name, &new.tenant, role, tx.now, expires);
            tx.sql.query_row(include_str!("sql/token_save.sql"), params, token).map(Ok).map_err(store_error)
        })
        .await
    }

    async fn tokens(&self, tenant: Option<&str>) -> Result<Vec<TokenInfo>, StoreError> {
        let tenant = tenant.map(str::to_owned);
        self.read(move |sql| {
            sql.prepare_cached(include_str!("sql/tokens.sql"))?.query_map([tenant], token)?.collect()
        })
        .await
    }

    async fn revoke_token(&self, tenant: &str, id: Uuid) -> Result<Option<TokenInfo>, StoreError> {
        let tenant = tenant.to_owned();
        self.write(false, move |tx| {
            let params = (Id(id), tenant, tx.now);
            tx.sql.query_row(include_str!("sql/token_revoke.sql"), params, token).optional().map_err(store_error)
        })
        .await
    }

    async fn use_token(&self, hash: &[u8; 32]) -> Result<Option<TokenInfo>, StoreError> {
        let (hash, now) = (*hash, self.clock.now_micros());
        let find = include_str!("sql/token_find.sql");
        let found =
            self.read(move |sql| sql.prepare_cached(find)?.query_row((hash, now), token).optional()).await?;
        let Some(found) = found else { return Ok(None) };
        if found.last_used_at.is_none_or(|at| at.as_microsecond() + USE_GRAIN < now) {
            let id = found.id;
            let noted = self.write(false, move |tx| {
                let used = "UPDATE tokens SET last_used_at = ?2 WHERE id = ?1";
                tx.sql.execute(used, (Id(id), tx.now)).map_err(store_error)
            });
            // Who comes with a good token is let in, whether or not that can be noted.
            if let Err(error) = noted.await {
                tracing::debug!(%error, "the use of a token was not noted");
            }
        }
        Ok(Some(found))
    }

    async fn has_tokens(&self) -> Result<bool, StoreError> {
        self.read(|sql| sql.prepare_cached(include_str!("sql/token_any.sql"))?.exists([])).await
    }
}
