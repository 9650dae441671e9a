//! What the conformance suite wants to find on a server: tools, resources and prompts of fixed content, put around Longhaul's own
//! MCP server. They exist in this test program only.
#![allow(deprecated, reason = "clients of revision 2025-11-25 are still asked for samples, roots and log levels")]

use std::collections::BTreeMap;

use hmac::{Hmac, KeyInit, Mac};
use longhaul_server::mcp::Mcp;
use rmcp::handler::server::ServerHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CancelTaskParams, ClientCapabilities,
    CompleteRequestParams, CompleteResult, ErrorData, GetPromptRequestParams, GetPromptResponse, GetPromptResult,
    GetTaskParams, GetTaskResult, InputRequiredResult, InputResponses, ListPromptsResult,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, LoggingLevel,
    LoggingMessageNotificationParam, PaginatedRequestParams, ProgressNotificationParam, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, ServerConfig, ServerRequest, SetLevelRequestParams,
    SubscribeRequestParams, SubscriptionFilter, Tool, UnsubscribeRequestParams, UpdateTaskParams,
};
use rmcp::service::{RequestContext, RoleServer, SubscriptionContext};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::Sha256;
use tokio::sync::watch;

/// A red pixel, and a sound of nothing.
const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";
const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEARKwAAIhYAQACABAAZGF0YQAAAAA=";
/// What the suite waits between messages of one call.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(50);

type Context = RequestContext<RoleServer>;

/// Told when a list changes; all instances of a process share it.
pub(crate) struct Lists {
    tools: watch::Sender<u64>,
    prompts: watch::Sender<u64>,
}

impl Default for Lists {
    fn default() -> Self {
        Self { tools: watch::Sender::new(0), prompts: watch::Sender::new(0) }
    }
}

/// Longhaul's server with the fixtures around it.
pub(crate) struct Fixtures {
    pub(crate) longhaul: Mcp,
    pub(crate) lists: &'static Lists,
}

fn made<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"))
}

/// A result that is all of it.
fn whole<T: DeserializeOwned>(mut value: Value) -> T {
    value["resultType"] = "complete".into();
    made(value)
}

fn words(text: &str) -> CallToolResult {
    whole(json!({"content": [{"type": "text", "text": text}]}))
}

fn ask(message: &str, properties: Value) -> Value {
    let required: Vec<&String> = properties.as_object().expect("an object").keys().collect();
    let schema = json!({"type": "object", "properties": properties, "required": required});
    json!({"method": "elicitation/create", "params": {"mode": "form", "message": message, "requestedSchema": schema}})
}

fn sample(text: &str) -> Value {
    let message = json!({"role": "user", "content": {"type": "text", "text": text}});
    json!({"method": "sampling/createMessage", "params": {"messages": [message], "maxTokens": 100}})
}

fn string() -> Value {
    json!({"type": "string"})
}

/// The name and the arguments of each tool.
fn tools() -> Vec<Tool> {
    let plain = [
        "test_simple_text",
        "test_image_content",
        "test_audio_content",
        "test_embedded_resource",
        "test_multiple_content_types",
        "test_tool_with_logging",
        "test_error_handling",
        "test_tool_with_progress",
        "test_elicitation_sep1034_defaults",
        "test_elicitation_sep1330_enums",
        "test_missing_capability",
        "test_streaming_elicitation",
        "test_logging_tool",
        "test_trigger_tool_change",
        "test_trigger_prompt_change",
        "test_input_required_result_elicitation",
        "test_input_required_result_sampling",
        "test_input_required_result_list_roots",
        "test_input_required_result_request_state",
        "test_input_required_result_multiple_inputs",
        "test_input_required_result_multi_round",
        "test_input_required_result_tampered_state",
        "test_input_required_result_capabilities",
    ];
    let plain = plain.map(|name| (name, json!({})));
    let more =
        [("test_sampling", json!({"prompt": string()})), ("test_elicitation", json!({"message": string()}))];
    let described = plain.into_iter().chain(more).map(|(name, properties)| {
        let schema: rmcp::model::JsonObject = made(json!({"type": "object", "properties": properties}));
        Tool::new(name, "A fixture of the conformance suite", schema)
    });
    described.collect()
}

/// A state that nobody else can make: it is signed.
fn sealed(state: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(b"fixtures").expect("a key of any length");
    mac.update(state.as_bytes());
    let mac: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{state}.{mac}")
}

fn opened(given: Option<&str>) -> Result<Option<String>, ErrorData> {
    let Some(given) = given else { return Ok(None) };
    match given.split_once('.') {
        Some((state, _)) if sealed(state) == given => Ok(Some(state.to_owned())),
        _ => Err(ErrorData::invalid_params("requestState is not what was given", None)),
    }
}

fn needs(requests: Value, state: Option<&str>) -> InputRequiredResult {
    InputRequiredResult::new(Some(made(requests)), state.map(sealed))
}

/// What was accepted under a key, if it is what was asked for.
fn accepted<'a>(given: &'a InputResponses, key: &str, member: &str) -> Option<&'a Value> {
    given.get(key)?.get("content")?.get(member)
}

impl Fixtures {
    async fn call(
        &self,
        request: &CallToolRequestParams,
        context: &Context,
    ) -> Result<CallToolResponse, ErrorData> {
        let argument = |name: &str| {
            request.arguments.as_ref().and_then(|given| given.get(name)?.as_str()).unwrap_or_default()
        };
        let resource = |uri: &str, kind: &str, text: &str| json!({"type": "resource", "resource": {"uri": uri, "mimeType": kind, "text": text}});
        let image = json!({"type": "image", "data": PNG, "mimeType": "image/png"});
        let result: CallToolResult = match &*request.name {
            "test_simple_text" => words("This is a simple text response for testing."),
            "test_image_content" => whole(json!({"content": [image]})),
            "test_audio_content" => {
                whole(json!({"content": [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}]}))
            }
            "test_embedded_resource" => {
                let text = "This is an embedded resource content.";
                whole(json!({"content": [resource("test://embedded-resource", "text/plain", text)]}))
            }
            "test_multiple_content_types" => {
                let data = resource(
                    "test://mixed-content-resource",
                    "application/json",
                    r#"{"test":"data","value":123}"#,
                );
                whole(json!({"content": [{"type": "text", "text": "Multiple content types test:"}, image, data]}))
            }
            "test_error_handling" => {
                let text = "This tool intentionally returns an error for testing";
                whole(json!({"isError": true, "content": [{"type": "text", "text": text}]}))
            }
            "test_tool_with_logging" => {
                for message in ["Tool execution started", "Tool processing data", "Tool execution completed"] {
                    self.log(context, message).await?;
                    tokio::time::sleep(PAUSE).await;
                }
                words("done")
            }
            "test_logging_tool" => {
                if context.meta.log_level().is_some() {
                    self.log(context, "asked for").await?;
                }
                words("done")
            }
            "test_tool_with_progress" => {
                for progress in [0.0, 50.0, 100.0] {
                    if let Some(token) = context.meta.get_progress_token() {
                        let told = ProgressNotificationParam::new(token, progress).with_total(100.0);
                        context.peer.notify_progress(told).await.map_err(failed)?;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                words("done")
            }
            "test_sampling" => {
                let answer = self.request(context, sample(argument("prompt"))).await?;
                words(&format!("LLM response: {}", answer["content"]["text"].as_str().unwrap_or_default()))
            }
            "test_elicitation" => {
                let fields = json!({"username": string(), "email": string()});
                let answer = self.request(context, ask(argument("message"), fields)).await?;
                words(&format!("User response: {answer}"))
            }
            "test_elicitation_sep1034_defaults" => {
                let fields = json!({
                    "name": {"type": "string", "default": "John Doe"},
                    "age": {"type": "integer", "default": 30},
                    "score": {"type": "number", "default": 95.5},
                    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
                    "verified": {"type": "boolean", "default": true},
                });
                let answer = self.request(context, ask("Everything has a default", fields)).await?;
                words(&format!("Elicitation completed: {answer}"))
            }
            "test_elicitation_sep1330_enums" => {
                let titled = |word: &str| -> Vec<Value> {
                    let one = |number: usize, title: &str| json!({"const": format!("value{number}"), "title": format!("{title} {word}")});
                    vec![one(1, "First"), one(2, "Second"), one(3, "Third")]
                };
                let options = ["option1", "option2", "option3"];
                let fields = json!({
                    "untitledSingle": {"type": "string", "enum": options},
                    "titledSingle": {"type": "string", "oneOf": titled("Option")},
                    "legacyEnum": {"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": ["Option One", "Option Two", "Option Three"]},
                    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
                    "titledMulti": {"type": "array", "items": {"anyOf": titled("Choice")}},
                });
                let answer = self.request(context, ask("Choose", fields)).await?;
                words(&format!("Elicitation completed: {answer}"))
            }
            "test_missing_capability" => {
                if context.client_capabilities().is_none_or(|client| client.sampling.is_none()) {
                    let sampling: ClientCapabilities = made(json!({"sampling": {}}));
                    return Err(ErrorData::missing_required_client_capability(sampling));
                }
                words("done")
            }
            "test_trigger_tool_change" => {
                self.lists.tools.send_modify(|count| *count += 1);
                words("done")
            }
            "test_trigger_prompt_change" => {
                self.lists.prompts.send_modify(|count| *count += 1);
                words("done")
            }
            _ => return self.in_rounds(request, context),
        };
        Ok(result.into())
    }

    /// The tools that ask their client for something before they are done.
    fn in_rounds(
        &self,
        request: &CallToolRequestParams,
        context: &Context,
    ) -> Result<CallToolResponse, ErrorData> {
        let state = opened(request.request_state.as_deref())?;
        let given = request.input_responses.clone().unwrap_or_default();
        let name = || ask("What is your name?", json!({"name": string()}));
        let roots = || json!({"method": "roots/list", "params": {}});
        let answer: CallToolResponse = match &*request.name {
            "test_streaming_elicitation" | "test_input_required_result_elicitation" => {
                match accepted(&given, "user_name", "name").and_then(Value::as_str) {
                    Some(name) => words(&format!("Hello, {name}!")).into(),
                    None => needs(json!({"user_name": name()}), None).into(),
                }
            }
            "test_input_required_result_sampling" => match given.get("capital_question") {
                Some(answer) => words(&answer["content"]["text"].to_string()).into(),
                None => needs(json!({"capital_question": sample("What is the capital of France?")}), None).into(),
            },
            "test_input_required_result_list_roots" => match given.get("client_roots") {
                Some(answer) => words(&answer["roots"].to_string()).into(),
                None => needs(json!({"client_roots": roots()}), None).into(),
            },
            "test_input_required_result_request_state" | "test_input_required_result_tampered_state" => {
                match (given.get("confirm"), state.as_deref()) {
                    (Some(_), Some("asked")) => words("state-ok").into(),
                    _ => needs(
                        json!({"confirm": ask("Please confirm", json!({"ok": {"type": "boolean"}}))}),
                        Some("asked"),
                    )
                    .into(),
                }
            }
            "test_input_required_result_multiple_inputs" => {
                let all = ["user_name", "greeting", "client_roots"].iter().all(|key| given.contains_key(*key));
                match all && state.is_some() {
                    true => words("done").into(),
                    false => {
                        let requests = json!({"user_name": name(), "greeting": sample("Generate a greeting"), "client_roots": roots()});
                        needs(requests, Some("asked")).into()
                    }
                }
            }
            "test_input_required_result_multi_round" => match state.as_deref() {
                Some("round-2") if given.contains_key("step2") => words("done").into(),
                Some("round-1") if given.contains_key("step1") => {
                    let colour = ask("Step 2: What is your favorite color?", json!({"color": string()}));
                    needs(json!({"step2": colour}), Some("round-2")).into()
                }
                _ => {
                    let name = ask("Step 1: What is your name?", json!({"name": string()}));
                    needs(json!({"step1": name}), Some("round-1")).into()
                }
            },
            "test_input_required_result_capabilities" => {
                let client = context.client_capabilities().unwrap_or_default();
                let mut requests = BTreeMap::new();
                if client.elicitation.is_some() {
                    requests.insert("user_name", name());
                }
                if client.sampling.is_some() {
                    requests.insert("greeting", sample("Generate a greeting"));
                }
                if client.roots.is_some() {
                    requests.insert("client_roots", roots());
                }
                needs(json!(requests), None).into()
            }
            other => return Err(ErrorData::invalid_params(format!("no fixture {other}"), None)),
        };
        Ok(answer)
    }

    async fn log(&self, context: &Context, message: &str) -> Result<(), ErrorData> {
        let told = LoggingMessageNotificationParam::new(LoggingLevel::Info, json!(message));
        context.peer.notify_logging_message(told).await.map_err(failed)
    }

    /// Asks the client something while its call is under way.
    async fn request(&self, context: &Context, request: Value) -> Result<Value, ErrorData> {
        let request: ServerRequest = made(request);
        let answer = context.peer.send_request(request).await.map_err(failed)?;
        Ok(serde_json::to_value(answer).expect("JSON"))
    }
}

fn failed(error: impl std::fmt::Display) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}

fn prompt(name: &str, arguments: &[&str]) -> Value {
    let arguments: Vec<Value> = arguments.iter().map(|name| json!({"name": name, "required": true})).collect();
    json!({"name": name, "description": "A fixture of the conformance suite", "arguments": arguments})
}

impl ServerHandler for Fixtures {
    fn get_info(&self) -> ServerConfig {
        let mut info = self.longhaul.get_info();
        let more = json!({"prompts": {"listChanged": true}, "completions": {}, "logging": {}});
        let mut capabilities = serde_json::to_value(&info.capabilities).expect("JSON");
        capabilities.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        capabilities["tools"]["listChanged"] = true.into();
        info.capabilities = made(capabilities);
        info
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: Context,
    ) -> Result<ListToolsResult, ErrorData> {
        let mut listed = self.longhaul.list_tools(request, context).await?;
        listed.tools.extend(tools());
        Ok(listed)
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.longhaul.get_tool(name).or_else(|| tools().into_iter().find(|tool| tool.name == name))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: Context,
    ) -> Result<CallToolResponse, ErrorData> {
        match tools().iter().any(|tool| tool.name == request.name) {
            true => self.call(&request, &context).await,
            false => self.longhaul.call_tool(request, context).await,
        }
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: Context,
    ) -> Result<ListResourcesResult, ErrorData> {
        let mut listed = self.longhaul.list_resources(request, context).await?;
        let fixed = |uri: &str, kind: &str| {
            made(
                json!({"uri": uri, "name": uri, "description": "A fixture of the conformance suite", "mimeType": kind}),
            )
        };
        listed
            .resources
            .extend([fixed("test://static-text", "text/plain"), fixed("test://static-binary", "image/png")]);
        Ok(listed)
    }

    async fn list_resource_templates(
        &self,
        request: Option<PaginatedRequestParams>,
        context: Context,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let mut listed = self.longhaul.list_resource_templates(request, context).await?;
        listed
            .resource_templates
            .push(made(json!({"uriTemplate": "test://template/{id}/data", "name": "template"})));
        Ok(listed)
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: Context,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let uri = request.uri.clone();
        let content = match uri.as_str() {
            "test://static-text" => {
                json!({"uri": uri, "mimeType": "text/plain", "text": "This is the content of the static text resource."})
            }
            "test://static-binary" => json!({"uri": uri, "mimeType": "image/png", "blob": PNG}),
            templated if templated.starts_with("test://template/") => {
                let id = templated.split('/').nth(3).unwrap_or_default();
                let data = json!({"id": id, "templateTest": true, "data": format!("Data for ID: {id}")});
                json!({"uri": uri, "mimeType": "application/json", "text": data.to_string()})
            }
            _ => return self.longhaul.read_resource(request, context).await,
        };
        Ok(ReadResourceResult::new(vec![made(content)]).into())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        let mut accepted = self.longhaul.accepted_subscription_filter(requested)?;
        accepted.tools_list_changed = requested.tools_list_changed;
        accepted.prompts_list_changed = requested.prompts_list_changed;
        Some(accepted)
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        if context.accepted().resource_subscriptions.is_some() {
            return self.longhaul.listen(context).await;
        }
        let (mut tools, mut prompts) = (self.lists.tools.subscribe(), self.lists.prompts.subscribe());
        loop {
            let sink = context.sink();
            let accepted = context.accepted();
            let sent = tokio::select! {
                Ok(()) = tools.changed() => match accepted.tools_list_changed {
                    Some(true) => sink.notify_tool_list_changed().await,
                    _ => Ok(()),
                },
                Ok(()) = prompts.changed() => match accepted.prompts_list_changed {
                    Some(true) => sink.notify_prompt_list_changed().await,
                    _ => Ok(()),
                },
                () = context.cancelled() => return Ok(()),
            };
            sent.map_err(failed)?;
        }
    }

    async fn subscribe(&self, request: SubscribeRequestParams, context: Context) -> Result<(), ErrorData> {
        match request.uri.starts_with("test://") {
            true => Ok(()),
            false => self.longhaul.subscribe(request, context).await,
        }
    }

    async fn unsubscribe(&self, request: UnsubscribeRequestParams, context: Context) -> Result<(), ErrorData> {
        self.longhaul.unsubscribe(request, context).await
    }

    async fn set_level(&self, _: SetLevelRequestParams, context: Context) -> Result<(), ErrorData> {
        // Since 2026-07-28 it is said with each request.
        if context.protocol_version().is_some_and(|revision| revision.as_str() >= "2026-07-28") {
            return Err(ErrorData::method_not_found::<rmcp::model::SetLevelRequestMethod>());
        }
        Ok(())
    }

    async fn complete(&self, _: CompleteRequestParams, _: Context) -> Result<CompleteResult, ErrorData> {
        Ok(whole(json!({"completion": {"values": ["paris", "park", "party"], "total": 3, "hasMore": false}})))
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(made(json!([
            prompt("test_simple_prompt", &[]),
            prompt("test_prompt_with_arguments", &["arg1", "arg2"]),
            prompt("test_prompt_with_embedded_resource", &["resourceUri"]),
            prompt("test_prompt_with_image", &[]),
            prompt("test_input_required_result_prompt", &[]),
        ]))))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _: Context,
    ) -> Result<GetPromptResponse, ErrorData> {
        let argument = |name: &str| {
            request.arguments.as_ref().and_then(|given| given.get(name)?.as_str()).unwrap_or_default()
        };
        let said = |contents: &[Value]| -> GetPromptResult {
            let messages: Vec<Value> =
                contents.iter().map(|content| json!({"role": "user", "content": content})).collect();
            whole(json!({"messages": messages}))
        };
        let text = |text: &str| json!({"type": "text", "text": text});
        let result = match request.name.as_str() {
            "test_simple_prompt" => said(&[text("This is a simple prompt for testing.")]),
            "test_prompt_with_arguments" => {
                let both =
                    format!("Prompt with arguments: arg1='{}', arg2='{}'", argument("arg1"), argument("arg2"));
                said(&[text(&both)])
            }
            "test_prompt_with_embedded_resource" => said(&[
                json!({"type": "resource", "resource": {"uri": argument("resourceUri"), "mimeType": "text/plain",
                    "text": "Embedded resource content for testing."}}),
                text("Please process the embedded resource above."),
            ]),
            "test_prompt_with_image" => said(&[
                json!({"type": "image", "data": PNG, "mimeType": "image/png"}),
                text("Please analyze the image above."),
            ]),
            "test_input_required_result_prompt" => {
                let given = request.input_responses.clone().unwrap_or_default();
                match accepted(&given, "user_context", "context").and_then(Value::as_str) {
                    Some(context) => said(&[text(context)]),
                    None => {
                        let context = ask("What context should the prompt use?", json!({"context": string()}));
                        return Ok(needs(json!({"user_context": context}), None).into());
                    }
                }
            }
            other => return Err(ErrorData::invalid_params(format!("no prompt {other}"), None)),
        };
        Ok(result.into())
    }

    async fn get_task(&self, request: GetTaskParams, context: Context) -> Result<GetTaskResult, ErrorData> {
        self.longhaul.get_task(request, context).await
    }

    async fn update_task(&self, request: UpdateTaskParams, context: Context) -> Result<(), ErrorData> {
        self.longhaul.update_task(request, context).await
    }

    async fn cancel_task(&self, request: CancelTaskParams, context: Context) -> Result<(), ErrorData> {
        self.longhaul.cancel_task(request, context).await
    }
}
