//! A model that can be called: tries, pauses, and the model to fall back to.

use std::fmt;

use longhaul::TaskError;
use reqwest::Url;
use tokio::time::Instant;
use tracing::{Instrument, Span, field};

use super::anthropic::Anthropic;
use super::environment::{Environment, Key, is_loopback};
use super::error::{ModelError, ModelErrorKind};
use super::exchange::Exchange;
use super::openai::OpenAi;
use super::protocol::Protocol;
use super::{Answer, Finish, Heard, ModelSettings, Provider, Request, pause};
use crate::net;

/// A model that can be called. Cheap to clone; its connections are shared.
#[derive(Clone)]
pub struct Model {
    settings: ModelSettings,
    environment: Environment,
    protocol: &'static dyn Protocol,
    /// By the proxy of the environment, if it names one.
    client: reqwest::Client,
    /// By no proxy: none can reach this very machine for us.
    direct: reqwest::Client,
}

/// Where one try goes.
struct Target {
    url: Url,
    key: Option<Key>,
}

impl Model {
    /// A model whose key and base URL come from the environment of this process, at each call.
    /// Fails when the base URL cannot be one; a key may still come.
    pub fn from_env(settings: &ModelSettings) -> Result<Self, ModelError> {
        Self::new(settings, Environment::process())
    }

    /// A model whose key and base URL come from this environment, at each call.
    pub fn new(settings: &ModelSettings, environment: Environment) -> Result<Self, ModelError> {
        let protocol: &'static dyn Protocol = match settings.provider {
            Provider::OpenAi => &OpenAi,
            Provider::Anthropic => &Anthropic,
        };
        environment.base_url(&protocol.variables())?;
        let no_client = |why: &dyn fmt::Display| {
            ModelError::new(ModelErrorKind::BadRequest, format!("no HTTPS client can be made: {why}"))
        };
        let begin = || {
            let client = net::client().map_err(|error| no_client(&error))?;
            Ok::<_, ModelError>(client.connect_timeout(settings.timeouts.connect))
        };
        Ok(Self {
            settings: settings.clone(),
            environment,
            protocol,
            client: begin()?.build().map_err(|error| no_client(&error))?,
            direct: begin()?.no_proxy().build().map_err(|error| no_client(&error))?,
        })
    }

    /// What it was made with.
    pub fn settings(&self) -> &ModelSettings {
        &self.settings
    }

    /// Whether a call could be made now: there is a key, if one is needed. Calls nobody.
    pub async fn ready(&self) -> Result<(), ModelError> {
        self.target().await.map(drop)
    }

    /// Calls the request's model, and the fallback model when the first cannot be had.
    ///
    /// What may pass (rate limits, 5xx, lost connections, cut or broken answers, silence) is tried
    /// again after a pause, as [`ModelSettings::retries`] says; a `Retry-After` of the provider is kept.
    /// `heard` gets every piece of text as it comes, with the number of the try, so that a listener can
    /// tell a new try from the one before.
    ///
    /// Dropping the future ends the call.
    pub async fn call(
        &self,
        request: &Request,
        heard: &mut (dyn FnMut(Heard<'_>) + Send),
    ) -> Result<Answer, TaskError> {
        let deadline = Instant::now() + self.settings.timeouts.whole_call;
        let mut attempt = 0;
        let error = match self.ask(request, deadline, &mut attempt, heard).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let fallback = self.settings.fallback_model.as_ref().filter(|fallback| **fallback != request.model);
        let first = told(&error, &request.model, attempt);
        let (Some(fallback), true) = (fallback, error.another_may_help() && Instant::now() < deadline) else {
            return Err(first);
        };
        tracing::warn!(model = request.model, code = error.kind.code(), fallback, "asking the fallback model");
        let request = Request { model: fallback.clone(), ..request.clone() };
        let tried = attempt;
        self.ask(&request, deadline, &mut attempt, heard)
            .await
            .map_err(|error| told(&error, &request.model, attempt - tried).caused_by(first))
    }

    /// Calls one model until it answers, or there is no point in going on.
    async fn ask(
        &self,
        request: &Request,
        deadline: Instant,
        attempt: &mut u32,
        heard: &mut (dyn FnMut(Heard<'_>) + Send),
    ) -> Result<Answer, ModelError> {
        let retries = &self.settings.retries;
        let mut tried = 0;
        loop {
            tried += 1;
            *attempt += 1;
            let error = match self.try_once(request, deadline, *attempt, heard).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if !error.retryable {
                return Err(error);
            }
            if let Some(wait) = error.retry_after.filter(|wait| *wait > retries.max_retry_after) {
                let message = format!(
                    "{}; it wants to be left alone for {} s, and a call waits no longer than {} s: try again then",
                    error.message,
                    wait.as_secs(),
                    retries.max_retry_after.as_secs(),
                );
                return Err(ModelError { message, ..error });
            }
            let pause = error.retry_after.unwrap_or_else(|| pause::back_off(retries, tried));
            if tried >= retries.attempts || Instant::now() + pause >= deadline {
                return Err(error);
            }
            let (code, status) = (error.kind.code(), error.status);
            tracing::info!(model = request.model, attempt, code, status, ?pause, "the model is asked again");
            tokio::time::sleep(pause).await;
        }
    }

    async fn try_once(
        &self,
        request: &Request,
        deadline: Instant,
        attempt: u32,
        heard: &mut (dyn FnMut(Heard<'_>) + Send),
    ) -> Result<Answer, ModelError> {
        let target = self.target().await?;
        let span = self.span(request, &target.url, attempt);
        let exchange = Exchange {
            protocol: self.protocol,
            client: if is_loopback(&target.url) { &self.direct } else { &self.client },
            request,
            stream: self.settings.stream,
            timeouts: &self.settings.timeouts,
            deadline,
            url: &target.url,
            key: target.key.as_ref(),
        };
        let mut heard = |text: &str| heard(Heard { attempt, text });
        let ended = exchange.run(&mut heard).instrument(span.clone()).await;
        record(&span, &ended);
        ended
    }

    async fn target(&self) -> Result<Target, ModelError> {
        let variables = self.protocol.variables();
        let mut url = self.environment.base_url(&variables)?;
        let key = self.environment.key(&variables, &url).await?;
        let path = format!("{}/{}", url.path().trim_end_matches('/'), self.protocol.path(url.path()));
        url.set_path(&path);
        url.set_fragment(None);
        Ok(Target { url, key })
    }

    /// The span of one try, with the names that OpenTelemetry has for calls of models. What is said is
    /// not in it.
    fn span(&self, request: &Request, url: &Url, attempt: u32) -> Span {
        tracing::info_span!(
            "chat",
            otel.name = format!("chat {}", request.model),
            otel.kind = "client",
            otel.status_code = field::Empty,
            attempt,
            gen_ai.operation.name = "chat",
            gen_ai.provider.name = self.settings.provider.name(),
            gen_ai.request.model = request.model,
            gen_ai.request.temperature = request.temperature,
            gen_ai.request.max_tokens = request.max_tokens,
            gen_ai.response.model = field::Empty,
            gen_ai.response.finish_reasons = field::Empty,
            gen_ai.usage.input_tokens = field::Empty,
            gen_ai.usage.output_tokens = field::Empty,
            server.address = url.host_str(),
            server.port = url.port_or_known_default(),
            error.type = field::Empty,
        )
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// The error as a task's, with what was tried.
fn told(error: &ModelError, model: &str, attempts: u32) -> TaskError {
    TaskError::from(error.clone()).detail("model", model).detail("attempts", attempts)
}

fn record(span: &Span, ended: &Result<Answer, ModelError>) {
    match ended {
        Ok(answer) => {
            span.record("gen_ai.response.model", &answer.model);
            span.record("gen_ai.response.finish_reasons", format!("[\"{}\"]", finish_name(&answer.finish)));
            // A guess is not what the provider counted.
            if !answer.usage.estimated {
                span.record("gen_ai.usage.input_tokens", answer.usage.input_tokens);
                span.record("gen_ai.usage.output_tokens", answer.usage.output_tokens);
            }
        }
        Err(error) => {
            span.record("error.type", error.kind.code());
            span.record("otel.status_code", "ERROR");
        }
    }
}

fn finish_name(finish: &Finish) -> &str {
    match finish {
        Finish::Stop => "stop",
        Finish::ToolCalls => "tool_calls",
        Finish::Length => "length",
        Finish::Refused => "content_filter",
        Finish::Other(name) => name,
    }
}
