//! Tokens, made and checked.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use uuid::Uuid;

use super::{Client, Error};
use crate::store::access::{NewToken, TokenInfo, TokenRow, hash};

/// How every secret begins, so that one that leaked is recognised.
const PREFIX: &str = "lh_";
/// How long a secret is: 32 bytes in base64.
const SECRET_LEN: usize = PREFIX.len() + 43;

impl Client {
    /// Makes a token and gives its secret, which is not stored and cannot be had again. For whichever
    /// tenant it names: who may make tokens is for the caller to decide.
    pub async fn create_token(&self, token: NewToken) -> Result<(TokenInfo, String), Error> {
        token.validate()?;
        let secret = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>()));
        let row = TokenRow { id: Uuid::now_v7(), hash: hash(&secret), token };
        let info = self.engine.store.save_token(&row).await??;
        Ok((info, secret))
    }

    /// The tokens of one tenant, or of all, oldest first; also those that have expired or were revoked.
    pub async fn tokens(&self, tenant: Option<&str>) -> Result<Vec<TokenInfo>, Error> {
        Ok(self.engine.store.tokens(tenant).await?)
    }

    /// Ends a token of this client's tenant; `None` when it has no such token.
    pub async fn revoke_token(&self, id: Uuid) -> Result<Option<TokenInfo>, Error> {
        Ok(self.engine.store.revoke_token(&self.tenant, id).await?)
    }

    /// Whose secret this is; `None` when it is nobody's, has expired or was revoked.
    pub async fn authenticate(&self, secret: &str) -> Result<Option<TokenInfo>, Error> {
        if secret.len() != SECRET_LEN || !secret.starts_with(PREFIX) {
            return Ok(None);
        }
        Ok(self.engine.store.use_token(&hash(secret)).await?)
    }

    /// A secret of this name, for whatever the processes that use this store have to sign for each other. Made
    /// at the first call, the same for everyone, and never shown to anyone.
    pub async fn kept_secret(&self, name: &str) -> Result<Vec<u8>, Error> {
        let fresh = URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
        let kept = self.engine.store.kept_secret(&format!("secret_{name}"), &fresh).await?;
        Ok(kept.into_bytes())
    }

    /// Whether any token was ever made, also one that has expired or was revoked since.
    pub async fn has_tokens(&self) -> Result<bool, Error> {
        Ok(self.engine.store.has_tokens().await?)
    }
}
