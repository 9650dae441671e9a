//! The arguments of the commands that use the store itself, and of those about this program.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use clap_complete::Shell;

use super::client::{RedeliverArgs, Remote, TaskArgs};
use crate::units;

/// A store that is opened directly.
#[derive(Args, Clone, Debug)]
pub(crate) struct Direct {
    /// The store: sqlite:PATH or postgres://… [default: as configured, see 'longhaul doctor']
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct TokenArgs {
    #[command(subcommand)]
    pub(crate) action: TokenAction,
}

#[derive(Subcommand, Debug)]
pub(crate) enum TokenAction {
    /// Make a token and print it; it is shown only this once.
    #[command(after_help = "\
Examples:
  longhaul token create ci --role submitter --expires 90d
  LONGHAUL_TOKEN=$(longhaul token create me --role admin) longhaul ps

Roles, each with all that the one before may do: viewer looks; submitter submits tasks; operator steers them
(cancels, resumes, undoes, forks, signals), approves, decides, and keeps schedules; admin pauses queues and makes tokens.")]
    Create(CreateTokenArgs),
    /// All tokens, without their secrets.
    List(ListTokensArgs),
    /// Make a token useless within seconds, also for streams that are open.
    Revoke(RevokeTokenArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleName {
    Viewer,
    Submitter,
    Operator,
    Admin,
}

#[derive(Args, Debug)]
pub(crate) struct CreateTokenArgs {
    /// Whom or what it is for.
    pub(crate) name: String,
    /// What it may do.
    #[arg(long, default_value = "submitter")]
    pub(crate) role: RoleName,
    /// Whose tasks it sees.
    #[arg(long, default_value = "default")]
    pub(crate) tenant: String,
    /// How long it is good for [default: until it is revoked]
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub(crate) expires: Option<Duration>,
    #[command(flatten)]
    pub(crate) direct: Direct,
    /// JSON on stdout, the secret as "token".
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ListTokensArgs {
    /// Only those of this tenant.
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    #[command(flatten)]
    pub(crate) direct: Direct,
    /// JSON on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct RevokeTokenArgs {
    /// The token's id, as 'token list' shows it.
    #[arg(value_name = "TOKEN")]
    pub(crate) id: String,
    #[command(flatten)]
    pub(crate) direct: Direct,
}

#[derive(Args, Debug)]
pub(crate) struct WebhooksArgs {
    #[command(subcommand)]
    pub(crate) action: WebhookAction,
}

#[derive(Subcommand, Debug)]
pub(crate) enum WebhookAction {
    /// What was sent for a task, and what became of it.
    Deliveries(TaskArgs),
    /// Send an event of a task once more.
    Redeliver(RedeliverArgs),
    /// The secret that signs webhooks; receivers need it.
    Secret(SecretArgs),
    /// The endpoints that hear of every task.
    List(ListEndpointsArgs),
    /// Let an endpoint hear of the tasks that are submitted from now on.
    #[command(after_help = "\
Example:
  longhaul webhooks add ops https://ops.example.com/hook --event task.failed --event 'approval.*'")]
    Add(AddEndpointArgs),
    /// Remove an endpoint.
    Remove(RemoveEndpointArgs),
}

#[derive(Args, Debug)]
pub(crate) struct SecretArgs {
    #[command(flatten)]
    pub(crate) direct: Direct,
}

#[derive(Args, Debug)]
pub(crate) struct ListEndpointsArgs {
    /// Whose endpoints.
    #[arg(long, default_value = "default")]
    pub(crate) tenant: String,
    #[command(flatten)]
    pub(crate) direct: Direct,
    /// JSON on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct AddEndpointArgs {
    /// Its name; one of the same name is replaced.
    pub(crate) name: String,
    /// Where to send.
    pub(crate) url: String,
    /// An event type, 'prefix.*' or '*'; may be given several times [default: the final events]
    #[arg(long = "event", value_name = "TYPE")]
    pub(crate) events: Vec<String>,
    /// Whose tasks it hears of.
    #[arg(long, default_value = "default")]
    pub(crate) tenant: String,
    #[command(flatten)]
    pub(crate) direct: Direct,
}

#[derive(Args, Debug)]
pub(crate) struct RemoveEndpointArgs {
    /// Its name.
    pub(crate) name: String,
    /// Whose endpoint.
    #[arg(long, default_value = "default")]
    pub(crate) tenant: String,
    #[command(flatten)]
    pub(crate) direct: Direct,
}

#[derive(Args, Debug)]
pub(crate) struct SubscribersArgs {
    #[command(subcommand)]
    pub(crate) action: Option<SubscriberAction>,
    #[command(flatten)]
    pub(crate) direct: Direct,
    /// JSON on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum SubscriberAction {
    /// Forget a subscriber that nobody runs any more; what it has not passed is no longer kept for it.
    Remove(RemoveSubscriberArgs),
}

#[derive(Args, Debug)]
pub(crate) struct RemoveSubscriberArgs {
    /// Its name.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) direct: Direct,
}

#[derive(Args, Debug)]
pub(crate) struct BackupArgs {
    /// The file to write; it must not exist yet.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) direct: Direct,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) direct: Direct,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell that should complete.
    pub(crate) shell: Shell,
}

#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Write a page for each command into this folder, instead of the main one to stdout.
    #[arg(value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
}
