//! `longhaul token`, `webhooks`, `subscribers` and `backup`: what is done with the store itself, so that it works before
//! there is a server, and without one.

use std::time::Duration;

use longhaul::{Client, NewToken, Role, TokenInfo, Webhook};
use serde_json::json;

use super::mcp::must_be_there;
use super::{age, cell, list, local};
use crate::args::admin::{
    AddEndpointArgs, BackupArgs, CreateTokenArgs, Direct, ListEndpointsArgs, ListTokensArgs, RemoveEndpointArgs,
    RemoveSubscriberArgs, RevokeTokenArgs, RoleName, SecretArgs, SubscriberAction, SubscribersArgs, TokenAction,
    TokenArgs, WebhookAction, WebhooksArgs,
};
use crate::args::client::{RedeliverArgs, TaskArgs};
use crate::bus::SUBSCRIBER;
use crate::config::{Config, Flags, Secret};
use crate::exit::Failure;
use crate::http::{Path, Server};
use crate::out;
use crate::table::{Table, state_style};
use crate::units;

/// The configuration, with the store that was named.
pub(crate) fn configured(direct: &Direct) -> Result<Config, Failure> {
    Ok(Config::load(Flags::default().set("--store", "store.url", direct.store.as_deref()))?)
}

async fn open(config: &Config) -> Result<Client, Failure> {
    if config.store.url == "memory:" {
        return Err(Failure::usage("a store in memory ends with its process; name another with --store"));
    }
    Ok(Client::open(&config.store.url).await?.acting_as("command line"))
}

/// As [`open`], but makes no store: a list of nothing looks like a list, and a backup of nothing like a backup.
async fn open_existing(config: &Config) -> Result<Client, Failure> {
    must_be_there(&config.store.url).await?;
    open(config).await
}

pub(crate) async fn token(args: TokenArgs) -> Result<(), Failure> {
    match args.action {
        TokenAction::Create(args) => create_token(args).await,
        TokenAction::List(args) => list_tokens(args).await,
        TokenAction::Revoke(args) => revoke_token(args).await,
    }
}

async fn create_token(args: CreateTokenArgs) -> Result<(), Failure> {
    let client = open(&configured(&args.direct)?).await?;
    let role = match args.role {
        RoleName::Viewer => Role::Viewer,
        RoleName::Submitter => Role::Submitter,
        RoleName::Operator => Role::Operator,
        RoleName::Admin => Role::Admin,
    };
    let token = NewToken { name: args.name, tenant: args.tenant, role, expires_after: args.expires };
    let (info, secret) = client.create_token(token).await?;
    if args.json {
        let mut shown = json!(info);
        shown["token"] = json!(secret);
        return out::line(shown.to_string());
    }
    out::line(&secret)?;
    let until = info.expires_at.map_or_else(|| "until it is revoked".to_owned(), |at| format!("until {at}"));
    out::note(format!(
        "token {} ({}, {}, tenant {}) is good {until}; it is shown only now",
        info.id,
        out::clean(&info.name),
        info.role,
        out::clean(&info.tenant)
    ));
    Ok(())
}

async fn list_tokens(args: ListTokensArgs) -> Result<(), Failure> {
    let client = open_existing(&configured(&args.direct)?).await?;
    let tokens = client.tokens(args.tenant.as_deref()).await?;
    if args.json {
        return out::line(json!({"tokens": tokens}).to_string());
    }
    let mut table = Table::new(&["TOKEN", "NAME", "TENANT", "ROLE", "CREATED", "LAST USED", "STATE"]);
    for token in &tokens {
        table.row([
            token.id.to_string(),
            token.name.clone(),
            token.tenant.clone(),
            token.role.to_string(),
            local(&json!(token.created_at)),
            local(&json!(token.last_used_at)),
            state(token),
        ]);
    }
    table.print()
}

fn state(token: &TokenInfo) -> String {
    match (token.revoked_at, token.expires_at) {
        (Some(_), _) => "revoked".to_owned(),
        (None, Some(at)) if at <= jiff::Timestamp::now() => "expired".to_owned(),
        (None, Some(at)) => format!("until {}", local(&json!(at))),
        (None, None) => "good".to_owned(),
    }
}

async fn revoke_token(args: RevokeTokenArgs) -> Result<(), Failure> {
    let id: uuid::Uuid = args.id.parse().map_err(|_| {
        Failure::usage(format!("'{}' is not the id of a token; 'longhaul token list' shows them", args.id))
    })?;
    let client = open_existing(&configured(&args.direct)?).await?;
    let unknown = || Failure::usage(format!("there is no token {id}; 'longhaul token list' shows all"));
    let token = client.tokens(None).await?.into_iter().find(|token| token.id == id).ok_or_else(unknown)?;
    client.for_tenant(&token.tenant).revoke_token(id).await?.ok_or_else(unknown)?;
    out::note(format!("token {id} ({}) is revoked", out::clean(&token.name)));
    Ok(())
}

pub(crate) async fn webhooks(args: WebhooksArgs) -> Result<(), Failure> {
    match args.action {
        WebhookAction::Deliveries(args) => deliveries(args).await,
        WebhookAction::Redeliver(args) => redeliver(args).await,
        WebhookAction::Secret(args) => secret(args).await,
        WebhookAction::List(args) => list_endpoints(args).await,
        WebhookAction::Add(args) => add_endpoint(args).await,
        WebhookAction::Remove(args) => remove_endpoint(args).await,
    }
}

async fn deliveries(args: TaskArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&Path::task(&args.id, &["deliveries"])).await?;
    if args.remote.json {
        return answer.print();
    }
    let answer = answer.json()?;
    let mut table = Table::new(&["DELIVERY", "EVENT", "STATUS", "TRIES", "HTTP", "NEXT", "URL", "ERROR"])
        .paint(2, state_style);
    for delivery in list(&answer, "deliveries")? {
        table.row([
            cell(&delivery["id"]),
            format!("{} {}", cell(&delivery["seq"]), cell(&delivery["type"])),
            cell(&delivery["status"]),
            cell(&delivery["attempts"]),
            cell(&delivery["http_status"]),
            local(&delivery["next_at"]),
            cell(&delivery["url"]),
            cell(&delivery["error"]),
        ]);
    }
    table.print()
}

async fn redeliver(args: RedeliverArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let path = Path::task(&args.id, &["deliveries", &args.delivery, "redeliver"]);
    let answer = server.post(&path, &json!({})).await?;
    super::control::done(&args.remote, &answer, format!("delivery {} is sent again", args.delivery))
}

async fn secret(args: SecretArgs) -> Result<(), Failure> {
    let config = configured(&args.direct)?;
    // The first signs, so receivers that are set up now need only that.
    if let Some(secret) = config.webhook.secrets.first().map(Secret::expose) {
        out::line(secret)?;
        out::note(format!("configured by {}", config.origin("webhook.secret")));
        return Ok(());
    }
    out::line(open(&config).await?.webhook_secret().await?.reveal())
}

async fn list_endpoints(args: ListEndpointsArgs) -> Result<(), Failure> {
    let client = open_existing(&configured(&args.direct)?).await?.for_tenant(&args.tenant);
    let endpoints = client.endpoints().await?;
    if args.json {
        return out::line(json!({"endpoints": endpoints}).to_string());
    }
    let mut table = Table::new(&["ENDPOINT", "CREATED", "EVENTS", "URL"]);
    for endpoint in &endpoints {
        let events = &endpoint.webhook.events;
        let events = if events.is_empty() { "final events".to_owned() } else { events.join(",") };
        table.row([
            endpoint.name.clone(),
            local(&json!(endpoint.created_at)),
            events,
            endpoint.webhook.url.clone(),
        ]);
    }
    table.print()
}

async fn add_endpoint(args: AddEndpointArgs) -> Result<(), Failure> {
    let client = open(&configured(&args.direct)?).await?.for_tenant(&args.tenant);
    let mut webhook = Webhook::new(args.url);
    webhook.events = args.events;
    let endpoint = client.save_endpoint(&args.name, webhook).await?;
    out::note(format!("endpoint {} hears of tasks submitted from now on", out::clean(&endpoint.name)));
    Ok(())
}

async fn remove_endpoint(args: RemoveEndpointArgs) -> Result<(), Failure> {
    let client = open_existing(&configured(&args.direct)?).await?.for_tenant(&args.tenant);
    client.remove_endpoint(&args.name).await?;
    out::note(format!("endpoint {} is removed", out::clean(&args.name)));
    Ok(())
}

pub(crate) async fn subscribers(args: SubscribersArgs) -> Result<(), Failure> {
    match args.action {
        Some(SubscriberAction::Remove(args)) => remove_subscriber(args).await,
        None => list_subscribers(&args.direct, args.json).await,
    }
}

async fn list_subscribers(direct: &Direct, json: bool) -> Result<(), Failure> {
    let subscribers = open_existing(&configured(direct)?).await?.subscribers().await?;
    if json {
        return out::line(json!({"subscribers": subscribers}).to_string());
    }
    let mut table = Table::new(&["SUBSCRIBER", "TENANT", "RUN BY", "ROWS BEHIND", "OLDEST", "MAX BEHIND"]);
    for subscriber in &subscribers {
        let bound = subscriber.max_behind_seconds.map(|seconds| units::brief(Duration::from_secs(seconds)));
        table.row([
            subscriber.name.clone(),
            subscriber.tenant.clone().unwrap_or_else(|| "all".to_owned()),
            subscriber.held_by.clone().unwrap_or_else(|| "nobody".to_owned()),
            subscriber.rows_behind.to_string(),
            age(&json!(subscriber.oldest)),
            bound.unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table.print()
}

async fn remove_subscriber(args: RemoveSubscriberArgs) -> Result<(), Failure> {
    let client = open_existing(&configured(&args.direct)?).await?;
    let (name, shown) = (&args.name, out::clean(&args.name));
    let known = client.subscribers().await?.into_iter().find(|known| known.name == *name).ok_or_else(|| {
        Failure::usage(format!("there is no subscriber '{shown}'; 'longhaul subscribers' shows all"))
    })?;
    if let Some(process) = known.held_by {
        let how = if name == SUBSCRIBER { "start that process without --bus" } else { "stop it there" };
        return Err(Failure::usage(format!(
            "subscriber '{shown}' is run by {}; {how} first",
            out::clean(&process)
        )));
    }
    client.remove_subscriber(name).await?;
    out::note(format!("subscriber {shown} is removed; nothing is kept for it any more"));
    Ok(())
}

pub(crate) async fn backup(args: BackupArgs) -> Result<(), Failure> {
    let config = configured(&args.direct)?;
    open_existing(&config).await?.backup(&args.file).await?;
    out::note(format!("written to {}", args.file.display()));
    Ok(())
}
