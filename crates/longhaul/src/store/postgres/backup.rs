//! Copying the database with `pg_dump`, which PostgreSQL makes for that.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Stdio;

use async_trait::async_trait;
use tokio::process::Command;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

use super::PostgresStore;
use crate::store::StoreError;
use crate::store::backup::{BackupStore, Draft};
use crate::task::Invalid;

/// Names another `pg_dump` than the first on PATH.
const PROGRAM: &str = "LONGHAUL_PG_DUMP";
/// How much of what it complains about is passed on.
const MAX_COMPLAINT: usize = 2_000;

#[async_trait]
impl BackupStore for PostgresStore {
    async fn backup(&self, path: &Path) -> Result<Result<(), Invalid>, StoreError> {
        let tx = self.tx().await?;
        let found = tx.rows("SELECT current_schema()::text, current_database()::text", &[]).await?;
        tx.end();
        let row = found.first().ok_or_else(|| StoreError::Failed("the server names no schema".to_owned()))?;
        let (schema, database): (String, String) = (row.try_get(0)?, row.try_get(1)?);
        let draft = match Draft::begin(path)? {
            Ok(draft) => draft,
            Err(invalid) => return Ok(Err(invalid)),
        };
        let program = std::env::var_os(PROGRAM).unwrap_or_else(|| OsString::from("pg_dump"));
        let mut dump = Command::new(&program);
        dump.args(["--format=custom", "--no-password"]).arg(format!("--schema={}", quoted(&schema)));
        dump.arg("--file").arg(&draft.part);
        // All of the address in the environment, so that no list of processes shows any of it.
        dump.envs(environment(&self.config)).env("PGDATABASE", &database).env_remove("PGOPTIONS");
        dump.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let ended = dump.output().await.map_err(|error| {
            let program = program.to_string_lossy();
            if error.kind() != ErrorKind::NotFound {
                return StoreError::Failed(format!("{program} cannot be run: {error}"));
            }
            StoreError::Failed(format!(
                "{program} was not found; install PostgreSQL's client programs or set {PROGRAM}, or run elsewhere: \
                 pg_dump --format=custom --schema={} --file={} {database}",
                quoted(&schema),
                path.display()
            ))
        })?;
        if !ended.status.success() {
            let complaint = String::from_utf8_lossy(&ended.stderr);
            let complaint: String = complaint.trim().chars().take(MAX_COMPLAINT).collect();
            return Err(StoreError::Failed(format!("pg_dump failed ({}): {complaint}", ended.status)));
        }
        draft.finish()?;
        Ok(Ok(()))
    }
}

/// A name as a pattern of pg_dump that stands for itself.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The address as libpq reads it. What the environment says of certificates already stays.
fn environment(config: &Config) -> Vec<(&'static str, OsString)> {
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        Host::Unix(folder) => folder.display().to_string(),
    });
    let hosts: Vec<String> = hosts.collect();
    let ports: Vec<String> = config.get_ports().iter().map(ToString::to_string).collect();
    let mut environment: Vec<(&str, OsString)> =
        vec![("PGHOST", hosts.join(",").into()), ("PGPORT", ports.join(",").into())];
    if let Some(user) = config.get_user() {
        environment.push(("PGUSER", user.into()));
    }
    if let Some(password) = config.get_password() {
        environment.push(("PGPASSWORD", String::from_utf8_lossy(password).into_owned().into()));
    }
    if std::env::var_os("PGSSLMODE").is_none() {
        let mode = match config.get_ssl_mode() {
            SslMode::Disable => "disable",
            SslMode::Require => "require",
            _ => "prefer",
        };
        environment.push(("PGSSLMODE", mode.into()));
    }
    environment.retain(|(_, value)| !value.is_empty());
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_goes_by_the_environment_and_a_name_stands_for_itself() {
        let config: Config = "postgres://ann:s3cret@db1,db2/tasks?sslmode=require".parse().expect("an address");
        let environment = environment(&config);
        let of = |name| environment.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        assert_eq!(of("PGHOST"), Some("db1,db2".into()));
        assert_eq!((of("PGUSER"), of("PGPASSWORD")), (Some("ann".into()), Some("s3cret".into())));
        assert_eq!(of("PGPORT"), Some("5432,5432".into()));
        assert_eq!(quoted("a\"b*"), "\"a\"\"b*\"");
    }
}
