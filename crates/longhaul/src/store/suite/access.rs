//! Tokens.

use std::time::Duration;

use uuid::Uuid;

use super::bed::Bed;
use crate::store::access::{MAX_TOKENS, NewToken, Role, TokenInfo, TokenRow, hash};

fn new(secret: &str, tenant: &str) -> TokenRow {
    let token = NewToken { name: "ci".into(), tenant: tenant.into(), role: Role::Operator, expires_after: None };
    TokenRow { id: Uuid::now_v7(), hash: hash(secret), token }
}

async fn save(bed: &Bed, row: &TokenRow) -> TokenInfo {
    bed.store.save_token(row).await.expect("the store answers").expect("saved")
}

async fn find(bed: &Bed, secret: &str) -> Option<TokenInfo> {
    bed.store.use_token(&hash(secret)).await.expect("the store answers")
}

async fn tokens(bed: &Bed, tenant: Option<&str>) -> Vec<Uuid> {
    bed.store.tokens(tenant).await.expect("the store answers").iter().map(|token| token.id).collect()
}

async fn a_token_is_found_by_its_secret_alone_in_every_process(bed: Bed) {
    assert!(!bed.store.has_tokens().await.expect("the store answers"));
    let row = new("one", "acme");
    let saved = save(&bed, &row).await;
    assert_eq!(save(&bed, &row).await, saved, "once more changes nothing");
    assert!(bed.store.has_tokens().await.expect("the store answers"));
    let other = bed.another_process().await;
    let found = find(&other, "one").await.expect("known");
    assert_eq!((found.id, found.tenant.as_str(), found.role), (row.id, "acme", Role::Operator));
    assert_eq!((found.name.as_str(), found.expires_at, found.revoked_at), ("ci", None, None));
    assert!(find(&bed, "another").await.is_none());
    assert!(find(&bed, "").await.is_none());
}

async fn an_expired_token_cannot_be_used(bed: Bed) {
    let mut row = new("one", "acme");
    row.token.expires_after = Some(Duration::from_secs(60));
    let saved = save(&bed, &row).await;
    let lasts = saved.expires_at.expect("it expires").duration_since(saved.created_at);
    assert_eq!(lasts.as_secs(), 60);
    bed.advance(50);
    assert!(find(&bed, "one").await.is_some());
    bed.advance(11);
    assert!(find(&bed, "one").await.is_none());
    assert!(bed.store.has_tokens().await.expect("the store answers"), "what was closed does not open by itself");
    assert_eq!(tokens(&bed, Some("acme")).await, [row.id], "it is still listed");
}

async fn a_revoked_token_cannot_be_used_and_only_its_tenant_can_revoke_it(bed: Bed) {
    let row = new("one", "acme");
    save(&bed, &row).await;
    let revoke = async |tenant: &str, id| bed.store.revoke_token(tenant, id).await.expect("the store answers");
    for (tenant, id) in [("default", row.id), ("acme\0", row.id), ("acme", Uuid::now_v7())] {
        assert!(revoke(tenant, id).await.is_none());
    }
    assert!(find(&bed, "one").await.is_some());
    let revoked = revoke("acme", row.id).await.expect("revoked").revoked_at;
    assert!(find(&bed, "one").await.is_none());
    assert!(bed.store.has_tokens().await.expect("the store answers"), "what was closed does not open by itself");
    bed.advance(5);
    assert_eq!(revoke("acme", row.id).await.expect("there").revoked_at, revoked, "it stays as it was");
}

async fn tokens_are_listed_by_tenant_or_all(bed: Bed) {
    let (one, two) = (new("one", "acme"), new("two", "default"));
    save(&bed, &one).await;
    save(&bed, &two).await;
    assert_eq!(tokens(&bed, Some("acme")).await, [one.id]);
    assert_eq!(tokens(&bed, None).await, [one.id, two.id]);
    assert!(tokens(&bed, Some("nobody")).await.is_empty());
    assert!(tokens(&bed, Some("acme\0")).await.is_empty());
}

async fn the_last_use_of_a_token_is_kept_within_minutes(bed: Bed) {
    save(&bed, &new("one", "acme")).await;
    let last_used = async || bed.store.tokens(None).await.expect("the store answers")[0].last_used_at;
    assert_eq!(last_used().await, None);
    find(&bed, "one").await;
    let first = last_used().await;
    assert!(first.is_some());
    bed.advance(100);
    find(&bed, "one").await;
    assert_eq!(last_used().await, first, "not every use is a write");
    bed.advance(300);
    find(&bed, "one").await;
    assert!(last_used().await > first);
}

async fn a_tenant_has_a_bounded_number_of_tokens(bed: Bed) {
    let mut ids = Vec::new();
    for n in 0..MAX_TOKENS {
        ids.push(save(&bed, &new(&n.to_string(), "acme")).await.id);
    }
    let refused = bed.store.save_token(&new("more", "acme")).await.expect("the store answers");
    assert_eq!(refused.expect_err("too many").field, "tokens");
    save(&bed, &new("other", "default")).await;
    bed.store.revoke_token("acme", ids[0]).await.expect("the store answers").expect("revoked");
    save(&bed, &new("more", "acme")).await;
}

on_every_store![
    a_token_is_found_by_its_secret_alone_in_every_process,
    an_expired_token_cannot_be_used,
    a_revoked_token_cannot_be_used_and_only_its_tenant_can_revoke_it,
    tokens_are_listed_by_tenant_or_all,
    the_last_use_of_a_token_is_kept_within_minutes,
    a_tenant_has_a_bounded_number_of_tokens,
];
