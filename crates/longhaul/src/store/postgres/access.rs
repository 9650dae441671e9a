//! Tokens.

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::PostgresStore;
use crate::store::StoreError;
use crate::store::access::{AccessStore, MAX_TOKENS, Role, TokenInfo, TokenRow, USE_GRAIN, too_many_tokens};
use crate::store::clock::micros;
use crate::task::{Invalid, timestamp};

fn token(row: &Row) -> Result<TokenInfo, StoreError> {
    let time = |column| row.try_get::<_, Option<i64>>(column).map(|time| time.map(timestamp));
    Ok(TokenInfo {
        id: row.try_get(0)?,
        name: row.try_get(1)?,
        tenant: row.try_get(2)?,
        role: Role::from_code(row.try_get(3)?),
        created_at: timestamp(row.try_get(4)?),
        expires_at: time(5)?,
        revoked_at: time(6)?,
        last_used_at: time(7)?,
    })
}

#[async_trait]
impl AccessStore for PostgresStore {
    async fn save_token(&self, row: &TokenRow) -> Result<Result<TokenInfo, Invalid>, StoreError> {
        let TokenRow { id, hash, token: new } = row;
        let (offset, lasts) = (self.clock.offset(), new.expires_after.map(micros));
        let tx = self.tx().await?;
        let count = tx.rows(include_str!("sql/token_count.sql"), &[&new.tenant, id, &offset]).await?;
        let count: i64 = count.first().map_or(Ok(0), |row| row.try_get(0))?;
        if count.unsigned_abs() >= MAX_TOKENS {
            tx.end();
            return Ok(Err(too_many_tokens()));
        }
        let saved = tx
            .rows(
                include_str!("sql/token_save.sql"),
                &[id, &&hash[..], &new.name, &new.tenant, &new.role.code(), &offset, &lasts],
            )
            .await?;
        tx.end();
        let saved = saved.first().ok_or_else(|| StoreError::Failed("the token was not saved".to_owned()))?;
        Ok(Ok(token(saved)?))
    }

    async fn tokens(&self, tenant: Option<&str>) -> Result<Vec<TokenInfo>, StoreError> {
        if tenant.is_some_and(|tenant| tenant.contains('\0')) {
            return Ok(Vec::new());
        }
        let tx = self.tx().await?;
        let found = tx.rows(include_str!("sql/tokens.sql"), &[&tenant]).await?;
        tx.end();
        found.iter().map(token).collect()
    }

    async fn revoke_token(&self, tenant: &str, id: Uuid) -> Result<Option<TokenInfo>, StoreError> {
        if tenant.contains('\0') {
            return Ok(None);
        }
        let tx = self.tx().await?;
        let revoked = tx.rows(include_str!("sql/token_revoke.sql"), &[&id, &tenant, &self.clock.offset()]).await?;
        tx.end();
        revoked.first().map(token).transpose()
    }

    async fn use_token(&self, hash: &[u8; 32]) -> Result<Option<TokenInfo>, StoreError> {
        let tx = self.tx().await?;
        let found = tx.rows(include_str!("sql/token_find.sql"), &[&&hash[..], &self.clock.offset()]).await?;
        let Some(row) = found.first() else {
            tx.end();
            return Ok(None);
        };
        let (found, now): (TokenInfo, i64) = (token(row)?, row.try_get(8)?);
        if found.last_used_at.is_none_or(|at| at.as_microsecond() + USE_GRAIN < now) {
            let used = "UPDATE tokens SET last_used_at = $2 WHERE id = $1";
            // Who comes with a good token is let in, whether or not that can be noted.
            if let Err(error) = tx.execute(used, &[&found.id, &now]).await {
                tracing::debug!(%error, "the use of a token was not noted");
            }
        }
        tx.end();
        Ok(Some(found))
    }

    async fn has_tokens(&self) -> Result<bool, StoreError> {
        let tx = self.tx().await?;
        let found = tx.rows(include_str!("sql/token_any.sql"), &[]).await?;
        tx.end();
        Ok(!found.is_empty())
    }
}
