//! Access: the tokens that programs and people show. Only hashes are stored; a secret is seen once, by the
//! one who made it.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::StoreError;
use crate::task::{Invalid, check_name};

/// How many tokens a tenant may have that can be used.
pub(crate) const MAX_TOKENS: u64 = 1_000;
/// How exactly the last use of a token is kept, microseconds.
pub(crate) const USE_GRAIN: i64 = 300_000_000;

/// The tokens of a store.
#[async_trait]
pub trait AccessStore: Send + Sync {
    /// Keeps a token. Refused when the tenant has `MAX_TOKENS` that can be used.
    async fn save_token(&self, token: &TokenRow) -> Result<Result<TokenInfo, Invalid>, StoreError>;

    /// The tokens of a tenant, or all, oldest first; also those that can no longer be used.
    async fn tokens(&self, tenant: Option<&str>) -> Result<Vec<TokenInfo>, StoreError>;

    /// Ends a token of `tenant`, for good; gives it as it is then. One that had ended stays as it was.
    async fn revoke_token(&self, tenant: &str, id: Uuid) -> Result<Option<TokenInfo>, StoreError>;

    /// The token with this hash, if it can be used now. Notes that it was used, about.
    async fn use_token(&self, hash: &[u8; 32]) -> Result<Option<TokenInfo>, StoreError>;

    /// Whether any token was ever made, also one that has ended: who once closed a door does not find it open
    /// when the last key is lost.
    async fn has_tokens(&self) -> Result<bool, StoreError>;
}

/// What a token allows; each role may do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(i16)]
pub enum Role {
    /// Look.
    Viewer = 0,
    /// Submit tasks, and steer them.
    Submitter = 1,
    /// Approve, decide, pause, delete.
    Operator = 2,
    /// Make and revoke tokens, and everything else.
    Admin = 3,
}

impl Role {
    /// All roles, in the order of what they allow.
    pub const ALL: [Role; 4] = [Self::Viewer, Self::Submitter, Self::Operator, Self::Admin];

    pub(crate) fn code(self) -> i16 {
        self as i16
    }

    /// The role stored as `code`. A number this version does not know allows as little as possible.
    pub(crate) fn from_code(code: i16) -> Self {
        Self::ALL.into_iter().find(|role| role.code() == code).unwrap_or(Self::Viewer)
    }

    /// The name used in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Submitter => "submitter",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Role {
    type Err = Invalid;
    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::ALL
            .into_iter()
            .find(|role| role.name() == text)
            .ok_or_else(|| Invalid::new("role", "must be viewer, submitter, operator or admin"))
    }
}

/// A token about to be made.
#[derive(Clone, Debug)]
pub struct NewToken {
    /// A name for people: whose it is, what for.
    pub name: String,
    /// Whose tasks it is for.
    pub tenant: String,
    /// What it allows.
    pub role: Role,
    /// For how long it can be used; for ever when missing.
    pub expires_after: Option<Duration>,
}

impl NewToken {
    pub(crate) fn validate(&self) -> Result<(), Invalid> {
        check_name("tenant", &self.tenant)?;
        let name = self.name.trim();
        if name.is_empty() || self.name.len() > 128 || self.name.chars().any(char::is_control) {
            return Err(Invalid::new("name", "must have 1 to 128 bytes and no control characters"));
        }
        Ok(())
    }
}

/// A token on its way into the store.
#[derive(Clone, Debug)]
pub struct TokenRow {
    /// Its id.
    pub id: Uuid,
    /// The hash of its secret.
    pub hash: [u8; 32],
    /// The rest.
    pub token: NewToken,
}

/// A token as others see it: never its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenInfo {
    /// What it is revoked by.
    pub id: Uuid,
    /// A name for people.
    pub name: String,
    /// Whose tasks it is for.
    pub tenant: String,
    /// What it allows.
    pub role: Role,
    /// When it was made.
    pub created_at: Timestamp,
    /// From when on it cannot be used.
    pub expires_at: Option<Timestamp>,
    /// When it was revoked.
    pub revoked_at: Option<Timestamp>,
    /// When it was last used, within five minutes.
    pub last_used_at: Option<Timestamp>,
}

/// Why a tenant gets no further token.
pub(crate) fn too_many_tokens() -> Invalid {
    Invalid::new("tokens", format!("are {MAX_TOKENS} already, the most a tenant may have; revoke some"))
}

/// What is stored of a secret. A secret has 256 random bits, so a plain hash is enough, and looking it up
/// by an index tells nobody how much of a guess was right.
pub(crate) fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_may_do_what_those_before_it_may() {
        assert!(Role::ALL.is_sorted());
        for role in Role::ALL {
            assert_eq!(role.name().parse(), Ok(role));
            assert_eq!(Role::from_code(role.code()), role);
        }
        assert_eq!(Role::from_code(77), Role::Viewer);
        assert_eq!("root".parse::<Role>().expect_err("no such role").field, "role");
    }
}
