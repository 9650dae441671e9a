//! A store for one measurement, gone afterwards.

use tempfile::TempDir;
use tokio_postgres::NoTls;

use crate::exit::Failure;

/// See the module.
pub(super) struct BenchStore {
    url: String,
    kind: &'static str,
    /// Removed with this value.
    _folder: Option<TempDir>,
    schema: Option<(String, tokio_postgres::Client)>,
}

impl BenchStore {
    pub(super) async fn make(url: Option<&str>) -> Result<Self, Failure> {
        let Some(url) = url else {
            // In the working directory: the temporary folder may be in memory, where a sync
            // costs nothing and the figures would be lies.
            let folder = tempfile::Builder::new()
                .prefix(".longhaul-bench-")
                .tempdir_in(".")
                .map_err(|error| Failure::usage(format!("cannot write to the working directory: {error}")))?;
            let url = format!("sqlite:{}", folder.path().join("bench.db").display());
            return Ok(Self { url, kind: "sqlite", _folder: Some(folder), schema: None });
        };
        if !url.starts_with("postgres") {
            let kind = if url == "memory:" { "memory" } else { "sqlite" };
            return Ok(Self { url: url.to_owned(), kind, _folder: None, schema: None });
        }
        let unreachable =
            |error: tokio_postgres::Error| Failure::internal(format!("cannot reach PostgreSQL: {error}"));
        let (admin, connection) = tokio_postgres::connect(url, NoTls).await.map_err(unreachable)?;
        tokio::spawn(connection);
        let schema = format!("longhaul_bench_{}", uuid::Uuid::now_v7().simple());
        admin.batch_execute(&format!("CREATE SCHEMA {schema}")).await.map_err(unreachable)?;
        let mark = if url.contains('?') { '&' } else { '?' };
        let url = format!("{url}{mark}options=-csearch_path%3D{schema}");
        Ok(Self { url, kind: "postgres", _folder: None, schema: Some((schema, admin)) })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn kind(&self) -> &'static str {
        self.kind
    }

    pub(super) async fn remove(self) {
        if let Some((schema, admin)) = self.schema
            && let Err(error) = admin.batch_execute(&format!("DROP SCHEMA {schema} CASCADE")).await
        {
            eprintln!("longhaul: the schema {schema} is left over: {error}");
        }
    }
}
