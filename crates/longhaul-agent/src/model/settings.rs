//! What an agent's manifest, or an embedder, says about its model.

use std::time::Duration;

/// Which model, and how it is called. The key and the base URL are not in here: they come from the
/// environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSettings {
    /// Whose API is spoken.
    pub provider: Provider,
    /// The model's name.
    pub model: String,
    /// The model to ask when the first one cannot be had.
    pub fallback_model: Option<String>,
    /// Whether the answer is asked for piece by piece.
    pub stream: bool,
    /// How long to wait for what.
    pub timeouts: Timeouts,
    /// How often, and after which pause, to try again.
    pub retries: Retries,
}

impl ModelSettings {
    /// A model with the defaults for everything else.
    pub fn new(provider: Provider, model: impl Into<String>) -> Self {
        Self {
            provider,
            model: model.into(),
            fallback_model: None,
            stream: true,
            timeouts: Timeouts::default(),
            retries: Retries::default(),
        }
    }
}

/// Whose API is spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Provider {
    /// OpenAI chat completions, which most other providers and local servers offer too:
    /// `OPENAI_BASE_URL`, `OPENAI_API_KEY` or `OPENAI_API_KEY_FILE`.
    #[default]
    OpenAi,
    /// Anthropic Messages: `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` or `ANTHROPIC_API_KEY_FILE`.
    Anthropic,
}

impl Provider {
    /// Every provider, for messages that list them.
    pub const ALL: [Self; 2] = [Self::OpenAi, Self::Anthropic];

    /// Its name in a manifest.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
        }
    }

    /// The provider of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|provider| provider.name() == name)
    }
}

/// How long a call waits for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For a connection. 10 s by default.
    pub connect: Duration,
    /// For the first token of a streamed answer, counted from the request. 60 s by default. An answer
    /// that is not asked for as a stream comes whole, so only `whole_call` bounds it.
    pub first_token: Duration,
    /// For the next sign of life of an answer that has begun. 30 s by default. Keep-alive messages
    /// are signs of life: some providers send nothing else while a long tool call is written.
    pub silence: Duration,
    /// For everything: all tries, the pauses between them, and the fallback model. 600 s by default.
    pub whole_call: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            first_token: Duration::from_secs(60),
            silence: Duration::from_secs(30),
            whole_call: Duration::from_secs(600),
        }
    }
}

/// How often, and after which pause, a call is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    /// Tries of each model in all, at least 1. 4 by default.
    pub attempts: u32,
    /// The most of the first pause; it doubles with each try. The pause is a random part of it, so
    /// that many callers do not come back at the same moment. 1 s by default.
    pub pause: Duration,
    /// The most of any such pause. 15 s by default.
    pub max_pause: Duration,
    /// The longest wait that a provider may ask for with `Retry-After`; asked for more, the call
    /// gives the model up. 60 s by default.
    pub max_retry_after: Duration,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            attempts: 4,
            pause: Duration::from_secs(1),
            max_pause: Duration::from_secs(15),
            max_retry_after: Duration::from_secs(60),
        }
    }
}
