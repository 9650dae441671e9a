//! The dashboard as a browser gets it: pages, signing in, forms, roles and tenants. What happens inside a browser is tested with one, in
//! `longhaul-cli`.

mod common;

use common::{Frames, PATIENCE, Server, Store};
use longhaul::{Effect, NewTask, NewToken, Outbox, OutboxSettings, Role, Run, TaskError, TaskId, Worker};
use longhaul_server::ServerSettings;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use tokio::sync::mpsc;

on_every_store!(
    pages_show_what_is_there,
    what_tasks_say_never_becomes_html,
    who_is_not_signed_in_sees_nothing,
    a_session_lasts_no_longer_than_its_token,
    a_session_is_no_key_to_the_api,
    a_form_needs_the_word_of_its_session_and_a_page_of_this_server,
    a_role_decides_which_actions_there_are,
    nothing_of_another_tenant_is_shown_or_changed,
    a_bulk_cancel_says_how_many_and_spares_what_came_later,
    people_decide_in_the_inbox_under_their_names,
    a_task_is_forked_with_another_input,
    pages_are_told_of_changes_and_events_can_be_paged,
    a_step_in_doubt_is_decided_from_the_page_of_its_task,
    what_a_task_did_is_undone_from_its_page,
    a_priority_is_set_and_a_message_sent_from_the_page_of_a_task,
    a_delivery_is_sent_once_more_from_the_page_of_its_task,
);

/// What marks untrusted text: it must never be found like this.
const EVIL: &str = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&";

/// A browser as far as the server sees it: it keeps its cookie and goes nowhere by itself.
struct Browser {
    http: reqwest::Client,
    base: String,
    cookie: Option<String>,
}

struct Page {
    status: StatusCode,
    headers: reqwest::header::HeaderMap,
    text: String,
}

impl Page {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    /// What every form of the page repeats.
    fn csrf(&self) -> String {
        let (_, rest) = self.text.split_once("name=\"csrf\" value=\"").expect("a form");
        rest.split_once('"').expect("its end").0.to_owned()
    }
}

/// A form as a page has it: what it sends by itself, and what one can choose or type.
struct Form {
    action: String,
    hidden: Vec<(String, String)>,
    open: Vec<(String, Option<String>)>,
}

impl Page {
    /// The form that is sent to this path, if the page has one.
    fn form(&self, action: &str) -> Option<Form> {
        let (_, rest) = self.text.split_once(&format!("<form method=\"post\" action=\"{action}\""))?;
        let inside = rest.split_once("</form>").expect("its end").0;
        let mut form = Form { action: action.to_owned(), hidden: Vec::new(), open: Vec::new() };
        for tag in inside.split('<').filter_map(|tag| tag.split_once('>')).map(|(tag, _)| tag) {
            let attribute = |name: &str| {
                let (_, value) = tag.split_once(&format!(" {name}=\""))?;
                let value = value.split_once('"').expect("its end").0;
                let escaped = [("&#60;", "<"), ("&#62;", ">"), ("&#34;", "\""), ("&#39;", "'"), ("&#38;", "&")];
                Some(escaped.iter().fold(value.to_owned(), |value, (from, to)| value.replace(from, to)))
            };
            match (tag.split(' ').next(), attribute("name")) {
                (Some("input"), Some(name)) if tag.contains("type=\"hidden\"") => {
                    form.hidden.push((name, attribute("value").unwrap_or_default()));
                }
                (Some("input" | "select" | "textarea"), Some(name)) => form.open.push((name, None)),
                (Some("button"), Some(name)) => form.open.push((name, attribute("value"))),
                _ => {}
            }
        }
        Some(form)
    }
}

impl Browser {
    /// Fills in a form and sends it: only what the form has can be filled in.
    async fn send(&mut self, form: &Form, filled: &[(&str, &str)]) -> (StatusCode, Value) {
        for (name, value) in filled {
            let has = form
                .open
                .iter()
                .any(|(field, fixed)| field == name && fixed.as_deref().is_none_or(|fixed| fixed == *value));
            assert!(has, "{} has no {name} that can be {value}", form.action);
        }
        let hidden = form.hidden.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let fields: Vec<(&str, &str)> = hidden.chain(filled.iter().copied()).collect();
        // Without the word of the session, or with another one, nothing happens.
        for wrong in ["", "x"] {
            let fields = fields.iter().map(|&(name, value)| (name, if name == "csrf" { wrong } else { value }));
            let (status, told) = self.post(&form.action, &fields.collect::<Vec<_>>()).await;
            assert_eq!((status.as_u16(), &told["code"]), (403, &json!("forbidden")), "{}: {told}", form.action);
        }
        self.post(&form.action, &fields).await
    }

    fn new(server: &Server) -> Self {
        let none = reqwest::redirect::Policy::none();
        let http =
            reqwest::Client::builder().redirect(none).timeout(PATIENCE).no_proxy().build().expect("a client");
        Self { http, base: server.url(""), cookie: None }
    }

    fn request(&self, method: Method, path: &str, accept: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base)).header("accept", accept);
        match &self.cookie {
            Some(cookie) => request.header("cookie", cookie),
            None => request,
        }
    }

    /// A stream, as EventSource asks for it.
    fn stream(&self, path: &str) -> RequestBuilder {
        self.request(Method::GET, path, "text/event-stream")
    }

    async fn take(&mut self, request: RequestBuilder) -> Page {
        let response = request.send().await.expect("an answer");
        let (status, headers) = (response.status(), response.headers().clone());
        if let Some(set) = headers.get("set-cookie") {
            let set = set.to_str().expect("text");
            assert!(
                set.contains("HttpOnly") && set.contains("SameSite=Strict") && set.contains("Path=/"),
                "{set}"
            );
            self.cookie = set.split_once(';').map(|(cookie, _)| cookie.to_owned());
        }
        Page { status, headers, text: response.text().await.expect("a body") }
    }

    async fn get(&mut self, path: &str) -> Page {
        let request = self.request(Method::GET, path, "text/html");
        self.take(request).await
    }

    /// A form, as a page's script sends it.
    async fn post(&mut self, path: &str, fields: &[(&str, &str)]) -> (StatusCode, Value) {
        let origin = self.base.clone();
        let request = self.form(path, fields).header("origin", origin);
        let page = self.take(request).await;
        (page.status, serde_json::from_str(&page.text).unwrap_or(Value::String(page.text)))
    }

    fn form(&self, path: &str, fields: &[(&str, &str)]) -> RequestBuilder {
        let body = serde_urlencoded::to_string(fields).expect("a form");
        let request = self.request(Method::POST, path, "application/json");
        request.header("content-type", "application/x-www-form-urlencoded").body(body)
    }

    /// Signs in, and gives the word of the session.
    async fn sign_in(&mut self, token: &str) -> String {
        let origin = self.base.clone();
        let request = self.form("/sign-in", &[("token", token), ("next", "/inbox")]).header("origin", origin);
        let answer = self.take(request).await;
        assert_eq!((answer.status.as_u16(), answer.header("location")), (303, "/inbox"), "{}", answer.text);
        self.get("/").await.csrf()
    }
}

async fn open(store: &Store) -> (Server, Browser) {
    let server = Server::start(store.open().await, ServerSettings::default()).await;
    let browser = Browser::new(&server);
    (server, browser)
}

async fn token(server: &Server, tenant: &str, role: Role) -> String {
    let new = NewToken { name: format!("{tenant}-{role}"), tenant: tenant.to_owned(), role, expires_after: None };
    server.client.create_token(new).await.expect("a token").1
}

/// A server that wants tokens, and a browser that is signed in to it.
async fn signed_in(store: &Store, role: Role) -> (Server, Browser, String) {
    let server = Server::guarded(store.open().await, ServerSettings::default()).await;
    let mut browser = Browser::new(&server);
    let secret = token(&server, "default", role).await;
    let csrf = browser.sign_in(&secret).await;
    (server, browser, csrf)
}

async fn asked(server: &Server, id: &str, what: &str) -> Value {
    let path = format!("/v1/tasks/{id}/{what}");
    server.until(&path, |answer| answer[what][0].is_object()).await[what][0].clone()
}

async fn pages_show_what_is_there(store: Store) {
    let (server, mut browser) = open(&store).await;
    let _worker = server.worker().await;
    assert!(browser.get("/").await.text.contains("No tasks yet"));
    let id = server.submit(json!({"handler": "steps", "input": 3, "tags": {"team": "blue"}})).await;
    server.ended(&id).await;
    let waits = server.submit(json!({"handler": "approve", "input": "Drop the table?"})).await;
    asked(&server, &waits, "approvals").await;

    let list = browser.get("/").await;
    assert_eq!(list.status, 200);
    assert!(list.text.contains(&format!("/tasks/{id}")) && list.text.contains(&format!("/tasks/{waits}")));
    let filtered = browser.get("/?state=completed&tag=team%3Dblue&q=3").await;
    assert!(filtered.text.contains(&format!("row-{id}")) && !filtered.text.contains(&format!("row-{waits}")));
    assert_eq!(browser.get("/?state=nonsense").await.status, 400);

    let task = browser.get(&format!("/tasks/{id}")).await;
    assert!(task.text.contains("The task has completed"), "why it stands where it stands");
    for step in ["step 1", "step 2", "step 3"] {
        assert!(task.text.contains(step), "{step} is missing");
    }
    assert_eq!(task.text.matches("<rect class=\"work").count(), 3, "a bar for each step");
    let inbox = browser.get("/inbox").await;
    assert!(inbox.text.contains("Drop the table?") && inbox.text.contains("external_action"));
    let fleet = browser.get("/fleet").await;
    assert!(
        fleet.text.contains("Queues and workers")
            && fleet.text.contains("1</b> <span class=\"dim\">in the last hour")
    );
    assert_eq!(browser.get(&format!("/tasks/{}", TaskId::new())).await.status, 404);
    assert!(browser.get("/tasks/nonsense").await.text.contains("There is no such thing"));
}

async fn what_tasks_say_never_becomes_html(store: Store) {
    let (server, mut browser) = open(&store).await;
    let _worker = server.worker().await;
    let done = server.submit(json!({"handler": "echo", "input": EVIL, "tags": {"a": EVIL}})).await;
    let asks = server.submit(json!({"handler": "ask", "input": EVIL})).await;
    let approves = server.submit(json!({"handler": "approve", "input": EVIL})).await;
    let state = server.submit(json!({"handler": "state", "input": EVIL})).await;
    server.ended(&done).await;
    asked(&server, &asks, "questions").await;
    asked(&server, &approves, "approvals").await;
    server.until(&format!("/v1/tasks/{state}/state"), |answer| answer["version"].is_u64()).await;
    let mut pages = vec!["/".to_owned(), "/inbox".to_owned(), "/fleet".to_owned()];
    pages.push(format!("/?q={}", "%3Cscript%3Ealert(%27x%27)%3C/script%3E"));
    pages.push(format!("/bulk?action=cancel&q={}", "%3Cscript%3Ealert(%27x%27)%3C/script%3E"));
    pages.extend([&done, &asks, &approves, &state].map(|id| format!("/tasks/{id}")));
    for path in &pages {
        let page = browser.get(path).await;
        assert_eq!(page.status, 200, "{path}");
        assert!(!page.text.contains("<script>alert") && !page.text.contains("<img src=x"), "{path}");
        if path != "/fleet" {
            assert!(page.text.contains("&#60;script&#62;alert"), "{path} does not show it at all");
        }
        // Nothing that the policy would have to forbid.
        assert!(!page.text.contains(" style=") && !page.text.contains(" onclick="), "{path}");
        let scripts = page.text.matches("<script").count();
        assert_eq!(
            scripts,
            page.text.matches("<script src=\"/assets/").count()
                + page.text.matches("<script type=\"module\" src=\"/assets/").count(),
            "{path}"
        );
        let policy = page.header("content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'") && !policy.contains("unsafe") && !policy.contains('*'),
            "{policy}"
        );
        assert_eq!(page.header("x-content-type-options"), "nosniff");
        assert_eq!(page.header("cache-control"), "no-store");
    }
    let page = browser.get("/").await.text;
    let (_, asset) = page.split_once("href=\"/assets/").expect("an asset");
    let asset = format!("/assets/{}", asset.split_once('"').expect("its end").0);
    let file = browser.get(&asset).await;
    assert_eq!((file.status.as_u16(), file.header("content-type")), (200, "image/svg+xml"));
    assert!(file.header("cache-control").contains("immutable"));
    assert_eq!(browser.get("/assets/x/passwd").await.status, 404);
}

async fn who_is_not_signed_in_sees_nothing(store: Store) {
    let server = Server::guarded(store.open().await, ServerSettings::default()).await;
    let mut browser = Browser::new(&server);
    let id = server.client.announce(&["x"]).await.map(|()| NewTask::new("x", &1)).expect("announced");
    let id = server.client.submit(id).await.expect("accepted").id;
    for path in ["/", "/inbox", "/fleet", &format!("/tasks/{id}")] {
        let page = browser.get(path).await;
        assert_eq!(page.status, 303, "{path}");
        assert!(page.header("location").starts_with("/sign-in?next=/"), "{}", page.header("location"));
    }
    // A link on another site: the browser leaves its cookie out, and has to ask once more before one has to sign in.
    let request = browser.request(Method::GET, "/inbox?a=1", "text/html").header("sec-fetch-site", "cross-site");
    let page = browser.take(request).await;
    assert_eq!(page.status, 200);
    assert!(page.text.contains("content=\"0; url=/inbox?a=1\"") && browser.cookie.is_none(), "{}", page.text);
    // A script is told so instead.
    for path in ["/live".to_owned(), format!("/tasks/{id}/live"), format!("/tasks/{id}/log")] {
        let request = browser.http.get(format!("{}{path}", browser.base));
        assert_eq!(browser.take(request).await.status, 401, "{path}");
    }
    let (status, _) = browser.post(&format!("/tasks/{id}/cancel"), &[("csrf", "")]).await;
    assert_eq!(status, 401);
    let page = browser.get("/sign-in?next=https://evil.example/").await;
    assert!(page.status.is_success() && !page.text.contains("evil"), "nobody is sent elsewhere");
    let wrong = "lh_0000000000000000000000000000000000000000000";
    let (status, page) = browser.post("/sign-in", &[("token", wrong), ("next", "/")]).await;
    assert_eq!(status, 401);
    assert!(
        page.as_str().is_some_and(|page| page.contains("unknown, expired or revoked") && !page.contains(wrong))
    );
    // Nobody is signed in by another page either.
    let secret = token(&server, "default", Role::Viewer).await;
    let request = browser.form("/sign-in", &[("token", &secret)]).header("origin", "http://evil.example");
    assert_eq!(browser.take(request).await.status, 403);
    assert!(browser.cookie.is_none());
}

async fn a_session_lasts_no_longer_than_its_token(store: Store) {
    let server = Server::guarded(store.open().await, ServerSettings::default()).await;
    let mut browser = Browser::new(&server);
    let new = NewToken { name: "jo".into(), tenant: "default".into(), role: Role::Operator, expires_after: None };
    let (info, secret) = server.client.create_token(new).await.expect("a token");
    browser.sign_in(&secret).await;
    let cookie = browser.cookie.clone().expect("a cookie");
    assert!(!cookie.contains(&secret), "the token itself is not kept");
    // One who changes what it says has none.
    let (name, value) = cookie.split_once('=').expect("a pair");
    let (said, mac) = value.split_once('.').expect("signed");
    for forged in [format!("{name}={said}.{said}"), format!("{name}=e30.{mac}"), format!("{name}=x")] {
        browser.cookie = Some(forged);
        assert_eq!(browser.get("/").await.status, 303);
    }
    browser.cookie = Some(cookie.clone());
    // It is signed out at once,
    let page = browser.get("/").await;
    let (status, _) = browser.post("/sign-out", &[("csrf", &page.csrf())]).await;
    assert_eq!(status, 303);
    assert!(browser.cookie.as_deref().is_some_and(|cookie| cookie.ends_with('=')), "{:?}", browser.cookie);
    // and a revoked token ends every session within seconds, also what is under way.
    browser.cookie = Some(cookie);
    assert_eq!(browser.get("/").await.status, 200);
    let mut frames = Frames::open(browser.stream("/live")).await;
    assert!(frames.next().await.is_some());
    server.client.revoke_token(info.id).await.expect("revoked");
    while frames.next().await.is_some() {}
    assert_eq!(browser.get("/").await.status, 303);
}

async fn a_session_is_no_key_to_the_api(store: Store) {
    let (_server, mut browser, _) = signed_in(&store, Role::Admin).await;
    for path in ["/v1/tasks", "/v1/tokens", "/metrics"] {
        assert_eq!(browser.get(path).await.status, 401, "{path}");
    }
}

async fn a_form_needs_the_word_of_its_session_and_a_page_of_this_server(store: Store) {
    let (mut server, mut browser, csrf) = signed_in(&store, Role::Operator).await;
    server.token = Some(token(&server, "default", Role::Admin).await);
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "signal", "input": "go"})).await;
    let path = format!("/tasks/{id}/cancel");
    for wrong in [&[][..], &[("csrf", "")], &[("csrf", "x")]] {
        let (status, _) = browser.post(&path, wrong).await;
        assert_eq!(status, 403, "{wrong:?}");
    }
    for (name, value) in [("origin", "http://evil.example"), ("origin", "null"), ("sec-fetch-site", "cross-site")]
    {
        let request = browser.form(&path, &[("csrf", &csrf)]).header(name, value);
        assert_eq!(browser.take(request).await.status, 403, "{name}: {value}");
    }
    let plain = browser.request(Method::POST, &path, "text/html").header("content-type", "text/plain");
    assert_eq!(browser.take(plain.body(format!("csrf={csrf}"))).await.status, 415);
    // The word of another session is none of this one's.
    let other = token(&server, "default", Role::Operator).await;
    let foreign = Browser::new(&server).sign_in(&other).await;
    assert_eq!(browser.post(&path, &[("csrf", &foreign)]).await.0, 403);
    assert_ne!(server.get(&format!("/v1/tasks/{id}")).await.body["state"], "cancelled");

    let (status, told) = browser.post(&path, &[("csrf", &csrf), ("reason", "no longer needed")]).await;
    assert_eq!((status.as_u16(), &told["location"]), (200, &json!(format!("/tasks/{id}"))));
    let task = server.ended(&id).await;
    assert_eq!(task["state"], "cancelled");
    assert!(task["error"].to_string().contains("default-operator"), "who did it is on record: {task}");
    // Where there are no scripts one is sent back to the page.
    let request = browser.request(Method::POST, &format!("/tasks/{id}/resume"), "text/html");
    let request = request.header("content-type", "application/x-www-form-urlencoded").body(format!("csrf={csrf}"));
    let page = browser.take(request).await;
    assert_eq!((page.status.as_u16(), page.header("location")), (303, format!("/tasks/{id}").as_str()));
}

async fn a_role_decides_which_actions_there_are(store: Store) {
    let (mut server, mut viewer, csrf) = signed_in(&store, Role::Viewer).await;
    server.token = Some(token(&server, "default", Role::Admin).await);
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "approve", "input": "Go?"})).await;
    let approval = asked(&server, &id, "approvals").await;
    let schedule = json!({"every": "1h", "task": {"handler": "echo", "input": 1}});
    common::Answer::of(server.request(Method::PUT, "/v1/schedules/hourly").json(&schedule)).await;
    let pages = ["/".to_owned(), format!("/tasks/{id}"), "/inbox".to_owned(), "/fleet".to_owned()];
    for path in &pages {
        let page = viewer.get(path).await;
        assert_eq!(page.status, 200);
        assert!(
            !page.text.contains("data-action") && !page.text.contains("data-dialog"),
            "{path} offers an action"
        );
        assert!(!page.text.contains("/bulk"), "{path} offers an action");
    }
    let approve = [
        ("csrf", csrf.as_str()),
        ("id", approval["id"].as_str().expect("an id")),
        ("decision", "approve"),
        ("digest", ""),
    ];
    let name = [("csrf", csrf.as_str()), ("name", "hourly"), ("pause", "true")];
    let word = [
        ("csrf", csrf.as_str()),
        ("text", "x"),
        ("priority", "9"),
        ("from_step", "x"),
        ("step", "x"),
        ("decision", "retry"),
        ("id", "x"),
        ("answer", "x"),
        ("delivery", "00000000-0000-7000-8000-000000000000"),
        ("digest", ""),
    ];
    assert_eq!(viewer.post(&format!("/tasks/{id}/approval"), &approve).await.0, 403);
    for action in ["cancel", "resume", "priority", "message", "fork", "undo", "decide", "answer", "redeliver"] {
        assert_eq!(viewer.post(&format!("/tasks/{id}/{action}"), &word).await.0, 403, "{action}");
    }
    for path in ["/bulk", "/queue", "/schedule"] {
        assert_eq!(viewer.post(path, &name).await.0, 403, "{path}");
    }
    assert_eq!(viewer.get("/bulk?action=cancel").await.status, 403);

    let mut operator = Browser::new(&server);
    let secret = token(&server, "default", Role::Operator).await;
    let csrf = operator.sign_in(&secret).await;
    for path in &pages {
        assert!(
            operator.get(path).await.text.contains(if path == "/" { "/bulk" } else { "data-action" }),
            "{path}"
        );
    }
    let name = [("csrf", csrf.as_str()), ("name", "hourly"), ("pause", "true")];
    assert_eq!(operator.post("/schedule", &name).await.0, 200);
    assert_eq!(server.get("/v1/schedules/hourly").await.body["paused"], true);
    let queue = [("csrf", csrf.as_str()), ("name", "default"), ("pause", "true")];
    assert_eq!(operator.post("/queue", &queue).await.0, 403, "queues belong to everyone");
    let mut admin = Browser::new(&server);
    let csrf = admin.sign_in(&server.token.clone().expect("a token")).await;
    let queue = [("csrf", csrf.as_str()), ("name", "default"), ("pause", "true")];
    assert_eq!(admin.post("/queue", &queue).await.0, 200);
    assert_eq!(server.get("/v1/queues").await.body["queues"][0]["paused"], true);
}

async fn nothing_of_another_tenant_is_shown_or_changed(store: Store) {
    let (mut server, mut theirs, csrf) = signed_in(&store, Role::Admin).await;
    server.token = Some(token(&server, "other", Role::Admin).await);
    let _worker = server.worker().await;
    let marker = "MARKER-OF-THE-OTHER-TENANT";
    let id = server.submit(json!({"handler": "approve", "input": marker, "tags": {"m": marker}})).await;
    let approval = asked(&server, &id, "approvals").await["id"].as_str().expect("an id").to_owned();
    for path in ["/", "/inbox", "/fleet", "/bulk?action=cancel", "/?state=waiting"] {
        let page = theirs.get(path).await;
        assert_eq!(page.status, 200, "{path}");
        assert!(!page.text.contains(marker) && !page.text.contains(&id), "{path}");
    }
    for path in ["", "/live", "/log", "/export", "/artifacts/x", "/artifacts/x/raw"] {
        let page = theirs.get(&format!("/tasks/{id}{path}")).await;
        assert_eq!(page.status, 404, "{path}");
        assert!(!page.text.contains(marker), "{path}");
    }
    let word = [
        ("csrf", csrf.as_str()),
        ("id", &approval),
        ("decision", "approve"),
        ("digest", ""),
        ("text", "x"),
        ("priority", "9"),
        ("from_step", "x"),
        ("step", "x"),
        ("answer", "x"),
        ("delivery", "00000000-0000-7000-8000-000000000000"),
    ];
    for action in ["cancel", "resume", "priority", "message", "fork", "undo", "approval", "answer", "redeliver"] {
        let (status, told) = theirs.post(&format!("/tasks/{id}/{action}"), &word).await;
        assert_eq!(status, 404, "{action}: {told}");
    }
    let (status, told) = theirs.post("/bulk", &[("csrf", &csrf), ("action", "cancel")]).await;
    assert_eq!((status.as_u16(), told["message"].as_str()), (200, Some("0 tasks cancelled.")));
    // It still waits, and nothing happened to it.
    let task = server.until(&format!("/v1/tasks/{id}"), |task| task["state"] == "waiting").await;
    assert_eq!(task["priority"], 5);
}

async fn a_bulk_cancel_says_how_many_and_spares_what_came_later(store: Store) {
    let (server, mut browser) = open(&store).await;
    server.client.announce(&["a", "b"]).await.expect("announced");
    let submit = async |handler: &str, count: usize| {
        let tasks = (0..count).map(|_| NewTask::new(handler, &json!({"n": handler}))).collect();
        for accepted in server.client.submit_many(tasks).await.expect("an answer") {
            accepted.expect("accepted");
        }
    };
    submit("a", 1_203).await;
    submit("b", 2).await;
    let page = browser.get("/bulk?action=cancel&handler=a").await;
    assert!(page.text.contains("Cancel 1,203 tasks?"), "{}", page.text);
    let (_, before) = page.text.split_once("name=\"before\" value=\"").expect("a field");
    let before = before.split_once('"').expect("its end").0.to_owned();
    submit("a", 1).await;
    let csrf = page.csrf();
    let asked = [
        ("csrf", csrf.as_str()),
        ("action", "cancel"),
        ("handler", "a"),
        ("before", &before),
        ("reason", "too many"),
    ];
    let (status, told) = browser.post("/bulk", &asked).await;
    assert_eq!((status.as_u16(), told["message"].as_str()), (200, Some("1,203 tasks cancelled.")));
    let counts = server.client.stats().await.expect("numbers").tasks;
    assert_eq!((counts.cancelled, counts.pending), (1_203, 3), "those of b, and the one that came later");
    // And the other way round.
    let page = browser.get("/bulk?action=resume&state=cancelled").await;
    assert!(page.text.contains("Resume 1,203 tasks?"));
    let (_, told) = browser.post("/bulk", &[("csrf", &csrf), ("action", "resume"), ("state", "cancelled")]).await;
    assert_eq!(told["message"].as_str(), Some("1,203 tasks resumed."));
    assert!(browser.get("/bulk?action=resume").await.text.contains("Nothing to resume"));
}

async fn people_decide_in_the_inbox_under_their_names(store: Store) {
    let (mut server, mut browser, csrf) = signed_in(&store, Role::Operator).await;
    server.token = Some(token(&server, "default", Role::Admin).await);
    let _worker = server.worker().await;
    let approves = server.submit(json!({"handler": "approve", "input": "Ship it?"})).await;
    let denies = server.submit(json!({"handler": "approve", "input": "Drop it?"})).await;
    let asks = server.submit(json!({"handler": "ask", "input": "Which one?"})).await;
    let (first, second) =
        (asked(&server, &approves, "approvals").await, asked(&server, &denies, "approvals").await);
    let question = asked(&server, &asks, "questions").await;
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let inbox = browser.get("/inbox").await;
    assert!(inbox.text.contains("Ship it?") && inbox.text.contains("Which one?"));
    assert!(inbox.text.contains("aria-label=\"3 open\""), "the menu counts them");

    let decide = async |browser: &mut Browser, task: &str, approval: &Value, decision: &str, digest: &str| {
        let fields = [
            ("csrf", csrf.as_str()),
            ("id", &text(&approval["id"])),
            ("decision", decision),
            ("digest", digest),
            ("reason", "because"),
        ];
        browser.post(&format!("/tasks/{task}/approval"), &fields).await.0
    };
    // Only what was seen is approved.
    assert_eq!(decide(&mut browser, &approves, &first, "approve", "another").await, 409);
    assert_eq!(decide(&mut browser, &approves, &first, "approve", &text(&first["digest"])).await, 200);
    assert_eq!(decide(&mut browser, &denies, &second, "deny", "").await, 200);
    let answer = [("csrf", csrf.as_str()), ("id", &text(&question["id"])), ("answer", "the first")];
    assert_eq!(browser.post(&format!("/tasks/{asks}/answer"), &answer).await.0, 200);
    assert_eq!(server.ended(&approves).await["state"], "completed");
    assert_eq!(server.ended(&denies).await["state"], "failed");
    assert_eq!(server.ended(&asks).await["result"], "the first");
    let decided = server.get(&format!("/v1/tasks/{approves}/approvals")).await.body["approvals"][0].clone();
    assert_eq!((&decided["decided_by"], &decided["reason"]), (&json!("default-operator"), &json!("because")));
    assert!(browser.get("/inbox").await.text.contains("Nothing waits for you"));
}

async fn a_task_is_forked_with_another_input(store: Store) {
    let (server, mut browser) = open(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "steps", "input": 3})).await;
    server.ended(&id).await;
    let page = browser.get(&format!("/tasks/{id}")).await;
    assert!(page.text.contains("<option>step 2</option>"), "it can be forked from there");
    let csrf = page.csrf();
    let path = format!("/tasks/{id}/fork");
    let (status, told) =
        browser.post(&path, &[("csrf", &csrf), ("from_step", "step 2"), ("input", "{nonsense")]).await;
    assert_eq!(status, 422);
    assert!(told["detail"].as_str().is_some_and(|why| why.contains("input")), "{told}");
    let (status, told) = browser.post(&path, &[("csrf", &csrf), ("from_step", "step 2"), ("input", "2")]).await;
    assert_eq!(status, 200, "{told}");
    let fork = told["location"].as_str().and_then(|path| path.strip_prefix("/tasks/")).expect("a task").to_owned();
    let task = server.ended(&fork).await;
    assert_eq!((&task["fork_of"], &task["input"], &task["result"]), (&json!(id), &json!(2), &json!(2)));
    assert!(browser.get(&format!("/tasks/{fork}")).await.text.contains("Fork of"));
}

async fn pages_are_told_of_changes_and_events_can_be_paged(store: Store) {
    let (server, mut browser) = open(&store).await;
    let _worker = server.worker().await;
    browser.get("/").await;
    let mut changes = Frames::open(browser.stream("/live")).await;
    assert!(changes.next().await.is_some(), "the first word comes at once");
    let id = server.submit(json!({"handler": "steps", "input": 20})).await;
    assert!(changes.next().await.is_some(), "and another one when something changed");
    let last = server.ended(&id).await["last_seq"].as_u64().expect("a number");

    let mut numbers = Vec::new();
    loop {
        let after = numbers.last().copied().unwrap_or(0);
        let page = browser.get(&format!("/tasks/{id}/log?after={after}&limit=7")).await;
        let page: Value = serde_json::from_str(&page.text).expect("JSON");
        assert_eq!(page["last"], last);
        let events = page["events"].as_array().expect("a list").clone();
        if events.is_empty() {
            break;
        }
        assert!(events.len() <= 7);
        numbers.extend(events.iter().map(|event| event["seq"].as_u64().expect("a number")));
    }
    assert_eq!(numbers, (1..=last).collect::<Vec<_>>(), "each once and in order");

    // One that comes back goes on after what it saw, also beyond the end.
    let stream =
        browser.stream(&format!("/tasks/{id}/live?after=1")).header("last-event-id", (last - 1).to_string());
    let mut frames = Frames::open(stream).await;
    assert_eq!(frames.next().await.map(|frame| frame.id), Some(last.to_string()));
}

/// A server that wants tokens, an operator and a viewer who are signed in, and an admin's token for everything else.
async fn with_people(store: &Store) -> (Server, Browser, Browser) {
    let (mut server, operator, _) = signed_in(store, Role::Operator).await;
    let mut viewer = Browser::new(&server);
    let secret = token(&server, "default", Role::Viewer).await;
    viewer.sign_in(&secret).await;
    server.token = Some(token(&server, "default", Role::Admin).await);
    (server, operator, viewer)
}

async fn a_step_in_doubt_is_decided_from_the_page_of_its_task(store: Store) {
    let (server, mut operator, mut viewer) = with_people(&store).await;
    let (tried, mut tries) = mpsc::unbounded_channel();
    let pay = move |run: Run, _: Value| {
        let tried = tried.clone();
        async move {
            run.step("pay <b>", || {
                let again = tried.send(()).is_ok();
                async move { if again { Err::<u32, _>(TaskError::in_doubt("cut", "no answer")) } else { Ok(1) } }
            })
            .effect(Effect::Irreversible)
            .await
        }
    };
    let _worker = Worker::new(&server.client).handler("pay", pay).start().await.expect("a worker");
    let submit = async || {
        let id = server.submit(json!({"handler": "pay", "input": 1})).await;
        server.until(&format!("/v1/tasks/{id}"), |task| task["waiting_for"]["kind"] == "in_doubt").await;
        let path = format!("/tasks/{id}");
        (id, path)
    };
    let (id, path) = submit().await;
    let form = operator.get(&path).await.form(&format!("{path}/decide")).expect("it is asked");
    assert!(viewer.get(&path).await.form(&format!("{path}/decide")).is_none(), "a viewer does not decide");
    let (status, told) = operator.send(&form, &[("decision", "done"), ("result", "{nonsense")]).await;
    assert_eq!((status.as_u16(), &told["field"]), (422, &json!("result")));
    let done = [("decision", "done"), ("result", "42"), ("reason", "the bank says so")];
    assert_eq!(operator.send(&form, &done).await.0, 200);
    let ended = server.ended(&id).await;
    assert_eq!((&ended["state"], &ended["result"]), (&json!("completed"), &json!(42)));
    let events = server.get(&format!("/v1/tasks/{id}/export")).await.body.to_string();
    assert!(events.contains("the bank says so") && events.contains("default-operator"), "{events}");
    assert_eq!(operator.send(&form, &done).await.0, 409, "it is decided already");

    let (id, path) = submit().await;
    let form = operator.get(&path).await.form(&format!("{path}/decide")).expect("it is asked");
    assert_eq!(operator.send(&form, &[("decision", "fail")]).await.0, 200);
    assert_eq!(server.ended(&id).await["state"], "failed");

    let (id, path) = submit().await;
    let form = operator.get(&path).await.form(&format!("{path}/decide")).expect("it is asked");
    while tries.try_recv().is_ok() {}
    tries.close();
    assert_eq!(operator.send(&form, &[("decision", "retry")]).await.0, 200);
    assert_eq!(server.ended(&id).await["result"], 1, "it was done once more");
}

async fn what_a_task_did_is_undone_from_its_page(store: Store) {
    let (server, mut operator, mut viewer) = with_people(&store).await;
    let (undone, mut undos) = mpsc::unbounded_channel();
    let book = move |run: Run, _: Value| {
        let undone = undone.clone();
        async move {
            run.step("book", async || Ok::<_, TaskError>("seat 7".to_owned()))
                .undo(move |booked: String| {
                    let undone = undone.send(booked);
                    async move { undone.map_err(|_| TaskError::fatal("gone", "nobody listens")) }
                })
                .await
        }
    };
    let _worker = Worker::new(&server.client).handler("book", book).start().await.expect("a worker");
    let id = server.submit(json!({"handler": "book", "input": 1})).await;
    assert_eq!(server.ended(&id).await["state"], "completed");
    let (path, action) = (format!("/tasks/{id}"), format!("/tasks/{id}/undo"));
    assert!(viewer.get(&path).await.form(&action).is_none(), "a viewer does not undo");
    let page = operator.get(&path).await;
    assert!(page.text.contains("data-dialog=\"undo-dialog\""), "it can be opened");
    let (status, told) = operator.send(&page.form(&action).expect("a form"), &[("reason", "wrong day")]).await;
    assert_eq!(status, 200, "{told}");
    let undo = told["location"].as_str().and_then(|path| path.strip_prefix("/tasks/")).expect("a task").to_owned();
    server.ended(&undo).await;
    assert_eq!(undos.try_recv().as_deref(), Ok("seat 7"));
    let task = server.get(&format!("/v1/tasks/{undo}")).await.body;
    assert_eq!(task["undo_of"], json!(id), "{task}");
    let again = operator.get(&path).await;
    assert!(!again.text.contains("data-dialog=\"undo-dialog\""), "what is undone is not offered again");
    assert!(undos.try_recv().is_err());
}

async fn a_priority_is_set_and_a_message_sent_from_the_page_of_a_task(store: Store) {
    let (server, mut operator, mut viewer) = with_people(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "signal", "input": "message"})).await;
    server.until(&format!("/v1/tasks/{id}"), |task| task["state"] == "waiting").await;
    let path = format!("/tasks/{id}");
    for action in ["priority", "message"] {
        assert!(viewer.get(&path).await.form(&format!("{path}/{action}")).is_none(), "a viewer has no {action}");
    }
    let page = operator.get(&path).await;
    let form = page.form(&format!("{path}/priority")).expect("a form");
    assert_eq!(operator.send(&form, &[("priority", "9")]).await.0, 200);
    assert_eq!(server.get(&format!("/v1/tasks/{id}")).await.body["priority"], 9);
    assert!(operator.get(&path).await.text.contains("<option value=\"9\" selected>"), "the page shows it");
    for wrong in ["10", "-1", "high", ""] {
        assert_eq!(operator.send(&form, &[("priority", wrong)]).await.0, 422, "{wrong}");
    }
    let form = page.form(&format!("{path}/message")).expect("a form");
    assert_eq!(operator.send(&form, &[("text", "  ")]).await.0, 422, "nothing was said");
    assert_eq!(operator.send(&form, &[("text", "Ahoi <b>&amp;")]).await.0, 200);
    let ended = server.ended(&id).await;
    assert_eq!((&ended["state"], &ended["priority"]), (&json!("completed"), &json!(9)));
    assert!(ended["result"].to_string().contains("Ahoi <b>&amp;"), "{ended}");
    // One that has ended takes neither, and its page offers neither.
    assert_eq!(operator.send(&form, &[("text", "late")]).await.0, 409);
    let page = operator.get(&path).await;
    for action in ["priority", "message"] {
        assert!(page.form(&format!("{path}/{action}")).is_none(), "{action}");
    }
}

async fn a_delivery_is_sent_once_more_from_the_page_of_its_task(store: Store) {
    let (server, mut operator, mut viewer) = with_people(&store).await;
    let _worker = server.worker().await;
    let (came, mut deliveries) = mpsc::unbounded_channel();
    let receiver = axum::Router::new().fallback(async move |body: String| {
        // Told to nobody once the test has ended.
        let _ = came.send(serde_json::from_str::<Value>(&body).expect("JSON"));
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let hook = format!("http://{}/hook", listener.local_addr().expect("bound"));
    let receives = tokio::spawn(async move { axum::serve(listener, receiver).await });
    let settings = OutboxSettings { allow_loopback: true, ..OutboxSettings::default() };
    let outbox = Outbox::start(&server.client, settings).await.expect("an outbox");
    let mut next =
        async || tokio::time::timeout(PATIENCE, deliveries.recv()).await.expect("in time").expect("one");

    let webhook = json!({"url": hook, "events": ["task.completed"]});
    let id = server.submit(json!({"handler": "echo", "input": "sent", "webhook": webhook})).await;
    assert_eq!(next().await["data"]["id"], json!(id));
    let sent = |body: &Value| body["deliveries"][0]["status"] == "delivered";
    server.until(&format!("/v1/tasks/{id}/deliveries"), sent).await;
    let (path, action) = (format!("/tasks/{id}"), format!("/tasks/{id}/redeliver"));
    assert!(viewer.get(&path).await.form(&action).is_none(), "a viewer sends nothing");
    let form = operator.get(&path).await.form(&action).expect("a form");
    let (status, told) = operator.send(&form, &[]).await;
    assert_eq!((status.as_u16(), &told["location"]), (200, &json!(path)), "{told}");
    assert_eq!(next().await["data"]["id"], json!(id));
    server.until(&format!("/v1/tasks/{id}/deliveries"), sent).await;
    let mut unknown = form;
    for (name, value) in &mut unknown.hidden {
        if name == "delivery" {
            *value = TaskId::new().to_string();
        }
    }
    assert_eq!(operator.send(&unknown, &[]).await.0, 404);
    outbox.stop().await;
    receives.abort();
}
