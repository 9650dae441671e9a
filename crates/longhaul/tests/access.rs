//! Tokens as a program uses them.

mod common;

use common::Bed;
use longhaul::{Error, NewToken, Role};

on_every_store!(
    a_secret_is_shown_once_and_lets_its_owner_in_until_it_is_revoked,
    a_token_without_a_name_is_refused
);

fn token(name: &str) -> NewToken {
    NewToken { name: name.into(), tenant: "acme".into(), role: Role::Submitter, expires_after: None }
}

async fn a_secret_is_shown_once_and_lets_its_owner_in_until_it_is_revoked(bed: Bed) {
    let client = &bed.client;
    assert!(!client.has_tokens().await.expect("answered"));
    let (info, secret) = client.create_token(token("ci")).await.expect("made");
    let (_, another) = client.create_token(token("ci")).await.expect("made");
    assert_ne!(secret, another);
    assert_eq!((secret.len(), &secret[..3]), (46, "lh_"));
    assert!(secret[3..].bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)));
    let listed = client.tokens(Some("acme")).await.expect("answered");
    assert!(!serde_json::to_string(&listed).expect("JSON").contains(&secret[3..]));
    assert_eq!(client.authenticate(&secret).await.expect("answered").map(|token| token.id), Some(info.id));
    let swapped: String = secret.chars().rev().collect();
    for wrong in ["", "lh_", &secret[3..], &secret[..45], &swapped, "Bearer"] {
        assert_eq!(client.authenticate(wrong).await.expect("answered"), None, "{wrong}");
    }
    assert_eq!(client.revoke_token(info.id).await.expect("answered"), None, "another tenant's");
    let theirs = client.for_tenant("acme");
    assert!(theirs.revoke_token(info.id).await.expect("answered").is_some());
    assert_eq!(client.authenticate(&secret).await.expect("answered"), None);
    assert!(client.authenticate(&another).await.expect("answered").is_some());
}

async fn a_token_without_a_name_is_refused(bed: Bed) {
    for (bad, field) in [
        (token(" "), "name"),
        (token("a\nb"), "name"),
        (NewToken { tenant: "a/b".into(), ..token("ci") }, "tenant"),
    ] {
        let Err(Error::Invalid(invalid)) = bed.client.create_token(bad).await else { panic!("accepted") };
        assert_eq!(invalid.field, field);
    }
}
