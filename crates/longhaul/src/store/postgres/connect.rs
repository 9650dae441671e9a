//! Ways to the server: the pool, the connection reserved for heartbeats, TLS, and what errors mean.
//!
//! A statement must have one plan from an empty table to millions of rows: a nested loop over the
//! short list it was given and an index. Plans are made once per connection, often while tables
//! are empty, so two things see to it. Every session has settings that rule out other joins; and
//! statements join with `t.id = ANY (ARRAY[d.id])` instead of `t.id = d.id`, which can only be
//! answered by looking `d`'s rows up in the index, never the other way round. (`t.state + 0 = 1` keeps
//! the planner off the index of running tasks for the same reason.) So rows are also locked in the
//! order of the list. `synchronous_commit` is left as the server has it.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, PoolError, QueueMode, RecyclingMethod, Runtime,
    TimeoutType,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Config, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::faults;
use crate::store::StoreError;

/// How many transactions may be under way at once.
const CONNECTIONS: usize = 8;
/// How long to wait for a connection, a new one or one of the pool.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long sent data may stay unanswered by the peer's kernel, and how soon a silent connection is
/// probed: what finds a peer that vanished without a word.
const PEER_GONE: Duration = Duration::from_secs(15);

/// Settings of every session. Joins other than nested loops, and scans of whole tables, are what
/// the planner would choose for batches of hundreds of rows and what ruins them on large tables.
const SESSION: &str = "
    SET default_transaction_isolation = 'read committed';
    SET default_transaction_read_only = off;
    SET idle_in_transaction_session_timeout = '30s';
    SET plan_cache_mode = force_generic_plan;
    SET jit = off;
    SET enable_hashjoin = off;
    SET enable_mergejoin = off;
    SET enable_seqscan = off;
    SET enable_bitmapscan = off;
";

/// Parameters of a statement.
pub(super) type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

/// Where the server is and how to reach it.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) config: Config,
    pub(super) tls: MakeRustlsConnect,
}

impl Address {
    /// Reads `url`. `sslmode=require` (and `verify-full`, its other name here) wants a certificate
    /// that the system trusts; the default `prefer` takes whatever encryption the server offers.
    pub(super) fn parse(url: &str) -> Result<Self, StoreError> {
        let url = url.replace("sslmode=verify-full", "sslmode=require");
        let mut config = Config::from_str(&url).map_err(|error| {
            StoreError::Url(format!("not an address of a PostgreSQL database: {}", with_causes(&error)))
        })?;
        config.connect_timeout(PATIENCE).keepalives_idle(PEER_GONE).tcp_user_timeout(PEER_GONE);
        if config.get_application_name().is_none() {
            config.application_name("longhaul");
        }
        let tls = MakeRustlsConnect::new(tls(config.get_ssl_mode() == SslMode::Require)?);
        Ok(Self { config, tls })
    }

    /// The pool for everything but heartbeats.
    pub(super) fn pool(&self) -> Result<Pool, StoreError> {
        self.build(CONNECTIONS, "SET statement_timeout = '30s';")
    }

    /// The connection that only heartbeats use, so that they are never behind a queue of commits.
    pub(super) fn reserved(&self) -> Result<Pool, StoreError> {
        self.build(1, "SET statement_timeout = '4s';")
    }

    fn build(&self, size: usize, timeout: &'static str) -> Result<Pool, StoreError> {
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(self.config.clone(), self.tls.clone(), recycling);
        let session = Hook::async_fn(move |client: &mut deadpool_postgres::ClientWrapper, _| {
            Box::pin(async move {
                client.batch_execute(&[SESSION, timeout].concat()).await.map_err(HookError::Backend)
            })
        });
        Pool::builder(manager)
            .max_size(size)
            // The connection used last is the one whose server process has everything at hand.
            .queue_mode(QueueMode::Lifo)
            .runtime(Runtime::Tokio1)
            .timeouts(deadpool_postgres::Timeouts {
                wait: Some(PATIENCE),
                create: Some(PATIENCE),
                recycle: Some(PATIENCE),
            })
            .post_create(session)
            .build()
            .map_err(|error| StoreError::Failed(error.to_string()))
    }
}

/// A connection with a transaction on it. Dropped before [`Tx::commit`] has answered, it closes the
/// connection: the server then rolls back, and nobody inherits half a transaction.
///
/// Statements are pipelined by polling their futures together (`join`): each sends on its first
/// poll, in the order of the arguments.
pub(super) struct Tx {
    client: Option<Object>,
}

impl Tx {
    pub(super) async fn on(pool: &Pool) -> Result<Self, StoreError> {
        let client = pool.get().await.inspect_err(|error| {
            if matches!(error, PoolError::Timeout(TimeoutType::Wait)) {
                faults::met("empty_pool");
            }
        })?;
        Ok(Self { client: Some(client) })
    }

    fn client(&self) -> Result<&Object, StoreError> {
        self.client.as_ref().ok_or_else(|| StoreError::Failed("the transaction has ended".to_owned()))
    }

    /// The statement, prepared once per connection.
    pub(super) async fn prepare(&self, sql: &str) -> Result<Statement, StoreError> {
        Ok(self.client()?.prepare_cached(sql).await?)
    }

    pub(super) async fn begin(&self) -> Result<(), StoreError> {
        Ok(self.client()?.batch_execute("BEGIN").await?)
    }

    pub(super) async fn query(&self, statement: &Statement, params: Params<'_>) -> Result<Vec<Row>, StoreError> {
        Ok(self.client()?.query(statement, params).await?)
    }

    /// Prepares and runs a statement; gives its rows.
    pub(super) async fn rows(&self, sql: &str, params: Params<'_>) -> Result<Vec<Row>, StoreError> {
        let statement = self.prepare(sql).await?;
        self.query(&statement, params).await
    }

    /// Prepares and runs a statement; gives the number of rows it changed.
    pub(super) async fn execute(&self, sql: &str, params: Params<'_>) -> Result<u64, StoreError> {
        let client = self.client()?;
        let statement = client.prepare_cached(sql).await?;
        Ok(client.execute(&statement, params).await?)
    }

    /// Runs statements without parameters.
    pub(super) async fn batch(&self, sql: &str) -> Result<(), StoreError> {
        Ok(self.client()?.batch_execute(sql).await?)
    }

    /// Sends COMMIT; to be polled with the statements before it. [`Tx::end`] must follow.
    pub(super) async fn send_commit(&self) -> Result<(), StoreError> {
        faults::committing().await?;
        self.batch("COMMIT").await
    }

    /// Gives the connection back to the pool, after the transaction has ended.
    pub(super) fn end(mut self) {
        drop(self.client.take());
    }

    pub(super) async fn commit(self) -> Result<(), StoreError> {
        self.send_commit().await?;
        self.end();
        Ok(())
    }

    pub(super) async fn rollback(self) -> Result<(), StoreError> {
        self.batch("ROLLBACK").await?;
        self.end();
        Ok(())
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        if let Some(client) = self.client.take() {
            drop(Object::take(client));
        }
    }
}

/// Certificates are checked against those the system trusts, or not at all.
fn tls(verify: bool) -> Result<ClientConfig, StoreError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| StoreError::Failed(format!("cannot set up TLS: {error}")))?;
    if !verify {
        let anyone = Arc::new(Anyone { provider });
        return Ok(builder.dangerous().with_custom_certificate_verifier(anyone).with_no_client_auth());
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(StoreError::Url(
            "sslmode=require needs the system's certificates, and none were found; \
             install ca-certificates or set SSL_CERT_FILE"
                .to_owned(),
        ));
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Takes any certificate. `sslmode=prefer` asks for encryption where it can be had and promises
/// nothing (it goes on without any where there is none), as with every other client of PostgreSQL.
#[derive(Debug)]
struct Anyone {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        if let Some(refused) = error.as_db_error() {
            let text = format!("{} (SQLSTATE {})", refused.message(), refused.code().code());
            return if is_passing(refused.code()) { Self::Unavailable(text) } else { Self::Failed(text) };
        }
        // Without a SQLSTATE it is the connection, unless a value could not be written or read, or the
        // server's certificate is not trusted.
        let source = std::error::Error::source(&error);
        let broken = error.is_closed()
            || source.is_none_or(|source| {
                let io = source.downcast_ref::<std::io::Error>();
                io.is_some_and(|io| !io.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()))
            });
        let text = with_causes(&error);
        if broken { Self::Unavailable(text) } else { Self::Failed(text) }
    }
}

impl From<PoolError> for StoreError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Backend(error) | PoolError::PostCreateHook(HookError::Backend(error)) => error.into(),
            PoolError::Timeout(TimeoutType::Wait) => {
                Self::Unavailable(format!("no connection was free for {} s", PATIENCE.as_secs()))
            }
            other => Self::Unavailable(other.to_string()),
        }
    }
}

/// Whether the same statement may be accepted a moment later: the server is going, coming or
/// overloaded, a deadlock was broken, a statement took too long, a failover left us at a standby.
fn is_passing(code: &SqlState) -> bool {
    let (code, class) = (code.code(), &code.code()[..2]);
    matches!(class, "08" | "53" | "58")
        || matches!(
            code,
            "57P01" | "57P02" | "57P03" | "57P05" | "57014" | "40001" | "40P01" | "55P03" | "25006" | "25P03"
        )
}

/// The error and what caused it, in one line.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_by_itself_is_told_from_what_does_not() {
        for passing in [
            "08006", "53300", "58030", "57P01", "57P02", "57P03", "57P05", "57014", "40001", "40P01", "55P03",
            "25006", "25P03",
        ] {
            assert!(is_passing(&SqlState::from_code(passing)), "{passing}");
        }
        for lasting in ["23505", "42P01", "22P02", "28P01", "3D000", "25001", "40002", "57P04"] {
            assert!(!is_passing(&SqlState::from_code(lasting)), "{lasting}");
        }
    }

    #[test]
    fn every_text_is_an_address_or_is_refused() {
        use longhaul_hostile::Judged;
        longhaul_hostile::check("store-urls", 300, |text| match Address::parse(&String::from_utf8_lossy(text)) {
            Ok(_) => Judged::Accepted,
            Err(error) => {
                assert!(matches!(error, StoreError::Url(_)), "{error}");
                Judged::Refused
            }
        });
    }

    #[test]
    fn an_address_that_is_none_is_refused_with_its_reason() {
        let error = Address::parse("postgres://host/db?sslmode=sometimes").err().expect("refused");
        assert!(error.to_string().contains("sslmode"), "{error}");
        assert!(Address::parse("postgres://user@host/db?sslmode=disable").is_ok());
    }
}
