//! Durable waits: for a time, for a signal, for a person.
//!
//! A run that only waits is suspended after a moment: its future is dropped and nothing is held
//! for it. What it waits for brings it back, and it is replayed up to here. What arrives has its
//! place in the log, so a `select!` takes the same branch in every replay.

use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::time::Duration;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::desk::{Address, Asking, Turn, Unfinished};
use super::journal::APPROVAL;
use super::step::{decode, encode};
use super::{Operation, Run};
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::faults;
use crate::record::{Effect, Op, Record};
use crate::store::clock::micros;
use crate::store::{AskChange, AskKind, NewAsk};
use crate::task::{Invalid, Waiting, check_name, timestamp};

/// Where signals arrive.
pub(crate) const SIGNAL: &str = "signal/";
/// Where answers to questions arrive.
pub(crate) const QUESTION: &str = "question/";
/// How long an approval can be given, unless said otherwise.
const APPROVAL_TIME: Duration = Duration::from_secs(86_400);

impl Run {
    /// Waits for this long, measured from the first time the task got here: a crash or a restart
    /// meanwhile does not make it longer.
    pub fn sleep(&self, duration: Duration) -> Sleep {
        Sleep { run: self.clone(), key: None, until: Until::After(duration) }
    }

    /// Waits until this time of the store's clock.
    pub fn sleep_until(&self, at: Timestamp) -> Sleep {
        Sleep { run: self.clone(), key: None, until: Until::At(at) }
    }

    async fn sleep_to(&self, operation: Operation, until: Until) -> Result<(), TaskError> {
        loop {
            let started = match operation.turn().await {
                Turn::Recorded(outcome) => return outcome.map(drop),
                Turn::Start(started) => started,
            };
            let now = self.now_micros();
            let until = match (started.wait, until) {
                (Some((Some(until), _)), _) => until,
                (_, Until::At(at)) => self.begin_sleep(&operation, at.as_microsecond()),
                (_, Until::After(time)) => self.begin_sleep(&operation, now.saturating_add(micros(time))),
            };
            self.desk().wait(&operation.key, operation.waiting("timer", &operation.key.1, Some(until)));
            tokio::time::sleep_until(self.instant_of(until)).await;
            self.desk().stop_waiting(&operation.key);
            let event = NewEvent::of_step("step.completed", &operation.key.1, json!({"kind": "sleep"}));
            operation.record(operation.done(now, RawValue::NULL.to_owned()), [event]).await;
        }
    }

    /// Notes until when, once; written when the run is suspended, or before.
    fn begin_sleep(&self, operation: &Operation, until: i64) -> i64 {
        let data = json!({"kind": "sleep", "until": timestamp(until)});
        let event = NewEvent::of_step("step.started", &operation.key.1, data);
        let mut desk = self.desk();
        let record = desk.of_part(operation.key.0, operation.began(Some(until), None));
        desk.note(record, event);
        until
    }

    /// Waits for a signal of this name, sent with [`Client::signal`](crate::Client::signal). One
    /// that came before it was waited for is kept; several are given in the order in which they
    /// came, each once.
    pub fn signal<T: DeserializeOwned>(&self, name: &str) -> Signal<T> {
        Signal { run: self.clone(), key: None, name: name.to_owned(), gives: PhantomData }
    }

    /// Asks a person and waits for the answer, given with [`Client::answer`](crate::Client::answer).
    pub fn ask(&self, question: impl Into<String>) -> Question {
        Question { run: self.clone(), key: None, question: question.into(), expires: None }
    }

    /// Asks a person to allow something and waits for the decision, given with
    /// [`Client::approve`](crate::Client::approve) or [`Client::deny`](crate::Client::deny). The
    /// approval is for exactly this text, risk and [arguments](Approve::arguments), can be used
    /// once, and must be given and used within 24 hours unless said otherwise. When a handler that was changed
    /// meanwhile asks for something else at this place, what was approved does not count and people are asked again. A denial is the error
    /// `denied`, a decision that did not come in time, or that nobody was there to use in time,
    /// `approval_expired`; neither is tried again.
    pub fn approve(&self, what: impl Into<String>, risk: Risk) -> Approve {
        let (what, arguments) = (what.into(), Ok(Value::Null));
        let (run, expires) = (self.clone(), APPROVAL_TIME);
        Approve { run, key: None, what, risk, tool: None, definition: None, arguments, expires, step: None }
    }

    /// Puts something to a person, once, and waits for what they say.
    async fn ask_person(&self, operation: &Operation, put: &Put) -> Result<Box<RawValue>, TaskError> {
        if put.text.contains('\0') {
            return Err(TaskError::fatal("bad_arguments", "what is asked must have no NUL"));
        }
        loop {
            let started = match operation.turn().await {
                Turn::Recorded(outcome) => return outcome,
                Turn::Start(started) => started,
            };
            let (until, id) = self.put(operation, started, put).await;
            self.desk().wait(&operation.key, operation.waiting(put.kind(), &id, until));
            let Some(until) = until else { continue };
            let turn = tokio::select! {
                biased;
                turn = operation.turn() => turn,
                () = tokio::time::sleep_until(self.instant_of(until)) => {
                    self.desk().stop_waiting(&operation.key);
                    self.expire(operation, id, until, put).await;
                    continue;
                }
            };
            if let Turn::Recorded(outcome) = turn {
                return outcome;
            }
        }
    }

    /// Puts the question, unless that was done before; gives until when it can be answered, and its id.
    async fn put(&self, operation: &Operation, started: Unfinished, put: &Put) -> (Option<i64>, String) {
        if let Some((until, Some(id))) = started.wait {
            return (until, id);
        }
        let until = put.expires.map(|expires| self.now_micros().saturating_add(micros(expires)));
        // Never used again, so that an old message cannot answer a new question.
        let id = faults::now_v7().simple().to_string();
        let step = operation.key.1.clone();
        let event = match put.kind {
            AskKind::Question => NewEvent::of_step(
                "question.asked",
                &step,
                json!({"id": id, "question": put.text, "expires_at": until.map(timestamp)}),
            ),
            AskKind::Approval => NewEvent::of_step(
                "approval.requested",
                &step,
                json!({"id": id, "what": put.text, "subject": put.subject, "digest": put.digest,
                       "expires_at": until.map(timestamp)}),
            ),
        };
        let address = operation.address();
        self.desk().ask_changed(AskChange::Open(NewAsk {
            id: id.clone(),
            kind: put.kind,
            step: address,
            text: put.text.clone(),
            subject: put.subject.to_string(),
            digest: put.digest.clone(),
            expires_at: until,
        }));
        operation.record(operation.began(until, Some(id.clone())), [event]).await;
        (until, id)
    }

    /// Nobody answered in time. Should someone have done so at this very moment, that counts.
    async fn expire(&self, operation: &Operation, id: String, until: i64, put: &Put) {
        let step = operation.key.1.clone();
        let message = format!("nobody answered '{}' before {}", put.text, timestamp(until));
        let error = match put.kind {
            AskKind::Question => TaskError::fatal("question_expired", message),
            AskKind::Approval => TaskError::fatal("approval_expired", message),
        };
        let error = error.detail("step", step).detail("id", id.clone());
        self.expired(operation, id, error).await;
    }

    /// Records that its time is up.
    async fn expired(&self, operation: &Operation, id: String, error: TaskError) {
        let step = operation.key.1.clone();
        let event = NewEvent::of_step("step.failed", &step, json!({"error": error, "last": true}));
        let started = self.now_micros();
        let record = Record::Failed { step, effect: Effect::Read, attempt: 1, started, last: true, error };
        let batch = {
            let mut desk = self.desk();
            desk.ask_changed(AskChange::Expire { id });
            let record = desk.of_part(operation.key.0, record);
            desk.record(record, [event])
        };
        operation.on_disk(batch).await;
    }

    /// Records what was decided, once. An approval is used in the transaction that records it, and the
    /// store's clock decides whether that is in time: whoever was away for too long has none.
    async fn settle(&self, operation: &Operation, decided: DecidedApproval) -> Result<(), TaskError> {
        let (id, step) = (decided.id.clone(), operation.key.1.clone());
        let approve = decided.approve;
        let late = format!("{} approved it, but it was not used before it expired", decided.by);
        let result = encode(&operation.key, &DecidedApproval { settled: true, ..decided })?;
        let event = NewEvent::of_step("step.completed", &step, json!({"kind": "approval", "id": id}));
        let batch = {
            let mut desk = self.desk();
            if approve {
                desk.ask_changed(AskChange::Use { id: id.clone(), step: step.clone() });
            }
            let record = desk.of_part(operation.key.0, operation.done(self.now_micros(), result));
            desk.record(record, [event])
        };
        let in_time = std::future::poll_fn(|cx| self.desk().poll_used(batch, &id, cx)).await;
        if !in_time {
            let error = TaskError::fatal("approval_expired", late).detail("step", step).detail("id", id.clone());
            self.expired(operation, id, error).await;
        }
        Ok(())
    }
}

impl Operation {
    /// The record of a wait that begins.
    pub(super) fn began(&self, until: Option<i64>, id: Option<String>) -> Record {
        Record::Wait { step: self.key.1.clone(), op: self.op, until, id }
    }

    pub(super) fn waiting(&self, kind: &str, id: &str, until: Option<i64>) -> Waiting {
        Waiting { kind: kind.to_owned(), id: id.to_owned(), since: None, until: until.map(timestamp) }
    }

    pub(super) fn address(&self) -> String {
        self.run.desk().address_of(&self.key).unwrap_or_default()
    }
}

/// Something that is put to a person.
struct Put {
    kind: AskKind,
    text: String,
    subject: Value,
    digest: String,
    expires: Option<Duration>,
}

impl Put {
    fn kind(&self) -> &'static str {
        match self.kind {
            AskKind::Question => "question",
            AskKind::Approval => "approval",
        }
    }
}

/// When a sleep is over.
#[derive(Clone, Copy)]
enum Until {
    After(Duration),
    At(Timestamp),
}

/// A sleep; `.await` it.
#[must_use = "nothing is waited for until it is awaited"]
pub struct Sleep {
    run: Run,
    key: Option<String>,
    until: Until,
}

impl Sleep {
    /// Tells sleeps apart that are under way at the same time.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }
}

impl IntoFuture for Sleep {
    type Output = Result<(), TaskError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { run, key, until } = self;
        let operation = run.take_place(Asking { key: key.as_deref(), ..Asking::plain("sleep", Op::Sleep) });
        Box::pin(async move { run.sleep_to(operation?, until).await })
    }
}

/// A wait for a signal; `.await` it.
#[must_use = "nothing is waited for until it is awaited"]
pub struct Signal<T> {
    run: Run,
    key: Option<String>,
    name: String,
    gives: PhantomData<fn() -> T>,
}

impl<T> Signal<T> {
    /// Tells waits for the same signal apart that are under way at the same time; the first that
    /// waits is given the first that comes.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }
}

impl<T: DeserializeOwned> IntoFuture for Signal<T> {
    type Output = Result<T, TaskError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { run, key, name, .. } = self;
        let operation = check_signal(&name)
            .map_err(|invalid| TaskError::fatal("bad_signal", invalid.to_string()))
            .and_then(|()| {
                let title = format!("signal {name}");
                let address = Some(Address::At(format!("{SIGNAL}{name}")));
                let key = key.as_deref();
                run.take_place(Asking { key, address, ..Asking::plain(&title, Op::Signal) })
            });
        Box::pin(async move {
            let operation = operation?;
            loop {
                match operation.turn().await {
                    Turn::Recorded(message) => return decode(&operation.key, &message?),
                    Turn::Start(_) => run.desk().wait(&operation.key, operation.waiting("signal", &name, None)),
                }
            }
        })
    }
}

/// A question about to be asked; `.await` it for the answer.
#[must_use = "a question is not asked until it is awaited"]
pub struct Question {
    run: Run,
    key: Option<String>,
    question: String,
    expires: Option<Duration>,
}

impl Question {
    /// Tells questions apart that are under way at the same time.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Without an answer in this time it ends with the error `question_expired`.
    pub fn expires(mut self, time: Duration) -> Self {
        self.expires = Some(time);
        self
    }
}

impl IntoFuture for Question {
    type Output = Result<String, TaskError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { run, key, question, expires } = self;
        let (address, key) = (Some(Address::Own(QUESTION)), key.as_deref());
        let operation = run.take_place(Asking { key, address, ..Asking::plain("ask", Op::Question) });
        let digest = digest(&json!({"question": question}));
        let put = Put { kind: AskKind::Question, text: question, subject: Value::Null, digest, expires };
        Box::pin(async move {
            let operation = operation?;
            let message = run.ask_person(&operation, &put).await?;
            Ok(decode::<Answered>(&operation.key, &message)?.answer)
        })
    }
}

/// What arrives for a question.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answered {
    pub(crate) id: String,
    pub(crate) answer: String,
    pub(crate) by: String,
}

/// How dangerous something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Risk {
    /// Changes nothing.
    ReadOnly,
    /// Changes something here.
    WriteLocal,
    /// Changes something elsewhere.
    ExternalAction,
}

impl Risk {
    /// The word used in manifests, states and the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "read_only",
            Self::WriteLocal => "write_local",
            Self::ExternalAction => "external_action",
        }
    }
}

/// An approval about to be asked for; `.await` it for the decision.
#[must_use = "an approval is not asked for until it is awaited"]
pub struct Approve {
    run: Run,
    key: Option<String>,
    what: String,
    risk: Risk,
    tool: Option<(String, String)>,
    definition: Option<String>,
    arguments: Result<Value, String>,
    expires: Duration,
    step: Option<String>,
}

impl Approve {
    /// Tells approvals apart that are under way at the same time.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// The exact arguments of what is approved; shown to people, and part of the digest.
    pub fn arguments(mut self, arguments: &impl Serialize) -> Self {
        self.arguments = serde_json::to_value(arguments).map_err(|error| error.to_string());
        self
    }

    /// The tool that is to be called, by its name and a digest of its definition: shown to people, and part
    /// of what is approved.
    pub fn tool(mut self, name: &str, definition: &str) -> Self {
        self.tool = Some((name.to_owned(), definition.to_owned()));
        self
    }

    /// A digest of how the arguments will be used: not shown, and part of what is approved.
    pub fn definition(mut self, digest: &str) -> Self {
        self.definition = Some(digest.to_owned());
        self
    }

    /// For how long it can be decided and used.
    pub fn expires(mut self, time: Duration) -> Self {
        self.expires = time;
        self
    }

    /// The step that it is for. Once that is recorded, the approval was used for what the step was then, and
    /// nobody is asked again when it is another one now.
    pub fn step(mut self, name: impl Into<String>) -> Self {
        self.step = Some(name.into());
        self
    }
}

/// A decision for something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Approval {
    /// The approval's id.
    pub id: String,
    /// Who approved.
    pub by: String,
    /// Why, if they said so.
    pub reason: Option<String>,
}

/// What arrives for an approval.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DecidedApproval {
    pub(crate) id: String,
    pub(crate) approve: bool,
    pub(crate) by: String,
    pub(crate) reason: Option<String>,
    /// The run has taken note of it, and used it if it was approved.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) settled: bool,
    /// Names exactly what was decided about; older records do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<String>,
}

impl IntoFuture for Approve {
    type Output = Result<Approval, TaskError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { run, key, what, risk, tool, definition, arguments, expires, step } = self;
        let operation = run.take_place(approving(key.as_deref()));
        Box::pin(async move {
            let mut operation = operation?;
            let arguments = arguments.map_err(|error| TaskError::fatal("bad_arguments", error))?;
            let mut subject = json!({"risk": risk, "arguments": arguments});
            let mut content = json!({"what": what, "risk": risk, "arguments": arguments});
            if let Some((name, definition)) = tool {
                content["tool"] = json!({"name": name, "definition": definition});
                subject["tool"] = name.into();
            }
            if let Some(definition) = definition {
                content["definition"] = definition.into();
            }
            let digest = digest(&content);
            let put = Put { kind: AskKind::Approval, text: what, subject, digest, expires: Some(expires) };
            let decided = loop {
                let message = run.ask_person(&operation, &put).await?;
                let decided: DecidedApproval = decode(&operation.key, &message)?;
                let is_other = decided.digest.as_ref().is_some_and(|digest| *digest != put.digest);
                let was_used = || step.as_ref().is_some_and(|step| run.is_recorded(&operation, step));
                if decided.approve && is_other && !was_used() {
                    // What was approved is not what stands here now.
                    operation = run.ask_anew(operation, key.as_deref(), &put.digest)?;
                    continue;
                }
                if decided.settled {
                    break decided;
                }
                run.settle(&operation, decided).await?;
            };
            let DecidedApproval { id, approve, by, reason, .. } = decided;
            if approve {
                return Ok(Approval { id, by, reason });
            }
            let why = reason.map_or_else(String::new, |reason| format!(": {reason}"));
            Err(TaskError::fatal("denied", format!("{by} denied it{why}"))
                .detail("step", operation.key.1.clone())
                .detail("by", by))
        })
    }
}

/// An approval's place on the desk.
fn approving(key: Option<&str>) -> Asking<'_> {
    Asking { key, address: Some(Address::Own(APPROVAL)), ..Asking::plain("approve", Op::Approval) }
}

impl Run {
    /// Whether how this step ended is on record, in the part of the journal of the operation.
    fn is_recorded(&self, operation: &Operation, step: &str) -> bool {
        self.desk().journal().recorded(&(operation.key.0, step.to_owned())).is_some()
    }

    /// Another place for an approval whose decision was about something else; named by what it is about, so
    /// that a replay finds it.
    fn ask_anew(&self, old: Operation, key: Option<&str>, digest: &str) -> Result<Operation, TaskError> {
        drop(old);
        let key = key.map_or_else(|| digest.to_owned(), |key| format!("{key}:{digest}"));
        self.take_place(approving(Some(&key)))
    }
}

/// Names content exactly. Members are in the order of their names, so equal content has one digest.
fn digest(content: &Value) -> String {
    let hash = Sha256::digest(content.to_string());
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a signal may have this name.
pub(crate) fn check_signal(name: &str) -> Result<(), Invalid> {
    check_name("signal", name)
}
