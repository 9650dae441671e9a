//! Who may do what, and see what: tokens, roles, tenants, rates, hosts.

mod common;

use common::{Answer, Server, Store};
use longhaul::{NewToken, Role};
use longhaul_server::{Rate, ServerSettings};
use reqwest::Method;
use serde_json::{Value, json};

on_every_store!(
    without_a_valid_token_nothing_is_told,
    a_token_finds_nothing_of_another_tenant_on_any_route,
    a_role_goes_as_far_as_its_name_says,
    an_admin_makes_tokens_for_its_own_tenant_only,
    a_revoked_or_expired_token_is_refused,
    what_is_under_way_ends_with_its_token,
    a_tenant_that_asks_too_much_is_told_to_wait,
    a_server_without_tokens_answers_to_its_own_names_only,
    pages_of_other_origins_change_nothing_and_read_nothing_without_a_token,
    a_token_is_enough_behind_a_proxy_that_changes_the_host,
);

async fn guarded(store: &Store) -> Server {
    Server::guarded(store.open().await, ServerSettings::default()).await
}

async fn token(server: &Server, tenant: &str, role: Role) -> String {
    let new = NewToken { name: format!("{tenant}-{role}"), tenant: tenant.to_owned(), role, expires_after: None };
    server.client.create_token(new).await.expect("a token").1
}

/// Every method and path of the server, as the document lists them.
async fn routes(server: &Server) -> Vec<(Method, String)> {
    let document = server.get("/openapi.json").await.body;
    let paths = document["paths"].as_object().expect("paths").clone();
    let mut routes = Vec::new();
    for (path, item) in paths {
        for method in item.as_object().expect("methods").keys() {
            if let Ok(method) = method.to_uppercase().parse::<Method>() {
                routes.push((method, path.clone()));
            }
        }
    }
    assert!(routes.len() > 50, "{}", routes.len());
    routes
}

async fn without_a_valid_token_nothing_is_told(store: Store) {
    let mut server = guarded(&store).await;
    let all = routes(&server).await;
    let secret = "lh_0000000000000000000000000000000000000000000";
    for wrong in [None, Some(secret.to_owned()), Some("x".to_owned()), Some(String::new())] {
        server.token = wrong;
        for (method, path) in &all {
            let path = path.replace(['{', '}'], "");
            let answer = Answer::of(server.request(method.clone(), &path).json(&json!({}))).await;
            if path == "/livez" || path == "/readyz" {
                assert_eq!(answer.status, 200);
            } else {
                answer.is_problem(401, "unauthorized");
                assert_eq!(answer.header("www-authenticate"), "Bearer");
            }
        }
    }
}

async fn a_token_finds_nothing_of_another_tenant_on_any_route(store: Store) {
    let mut server = guarded(&store).await;
    let (ours, theirs) = (token(&server, "a", Role::Admin).await, token(&server, "b", Role::Admin).await);
    let _worker = server.worker().await;
    let marker = "MARKER-OF-TENANT-A";
    server.token = Some(ours);
    let body = json!({"handler": "approve", "input": marker, "tags": {"m": marker}, "webhook": {"url": format!("http://127.0.0.1:9/{marker}")}});
    let task = server.submit(body).await;
    let approvals = server.until("/v1/approvals", |body| body["approvals"][0].is_object()).await;
    let approval = approvals["approvals"][0]["id"].as_str().expect("an id").to_owned();
    server.until(&format!("/v1/tasks/{task}"), |body| body["state"] == "waiting").await;
    let schedule = json!({"every": "1h", "task": {"handler": "echo", "input": marker}});
    Answer::of(server.request(Method::PUT, "/v1/schedules/ours").json(&schedule)).await;
    let endpoint = json!({"url": format!("http://127.0.0.1:9/{marker}")});
    Answer::of(server.request(Method::PUT, "/v1/webhooks/ours").json(&endpoint)).await;
    let tokens = server.get("/v1/tokens").await.body;
    let token_id = tokens["tokens"][0]["id"].as_str().expect("an id").to_owned();

    server.token = Some(theirs);
    let mut walked = 0;
    for (method, path) in routes(&server).await {
        if path == "/v1/events" || path.ends_with("/secret") {
            continue; // A stream that does not end is looked at below; the secret is the server's own.
        }
        let filled = path
            .replace("{id}", &task)
            .replace("{aid}", &approval)
            .replace("{token_id}", &token_id)
            .replace("{name}", "ours")
            .replace("{queue}", "default")
            .replace("{qid}", "q1")
            .replace("{did}", "d1")
            .replace("{step}", "s")
            .replace("{artifact_id}", "a1");
        let filled = if path == "/api/progress" { format!("{filled}?task_id={task}") } else { filled };
        let body = match path.as_str() {
            path if path.ends_with("/priority") => json!({"priority": 1}),
            path if path.ends_with("/messages") => json!({"text": "x"}),
            path if path.ends_with("/fork") => json!({"from_step": "x"}),
            path if path.ends_with("/decision") => json!({"decision": "retry"}),
            path if path.ends_with("/{aid}") => json!({"decision": "approve"}),
            path if path.ends_with("/{qid}") => json!({"answer": "x"}),
            _ => json!({}),
        };
        let answer = Answer::of(server.request(method.clone(), &filled).json(&body)).await;
        let text = format!("{:?}{}", answer.headers, answer.body);
        assert!(!text.contains(marker), "{method} {path} tells: {text}");
        if path.starts_with("/v1/tasks/{id}") {
            // A channel is opened by a handshake only.
            assert!(
                answer.status == 404 || (path.ends_with("/ws") && answer.status == 400),
                "{method} {path}: {} {}",
                answer.status,
                answer.body
            );
        }
        if path.starts_with("/v1/tokens/") || (path.starts_with("/v1/schedules/") && method != Method::PUT) {
            assert_eq!(answer.status, 404, "{method} {path}: {}", answer.body);
        }
        assert!(!answer.status.is_server_error(), "{method} {path}: {}", answer.body);
        walked += 1;
    }
    assert!(walked > 45, "{walked}");
    // Their stream tells of their tasks: the first event of their own task is the first they hear.
    let mut stream = common::Frames::open(server.request(Method::GET, "/v1/events?cursor=0")).await;
    let own = server.submit(json!({"handler": "echo"})).await;
    assert_eq!(stream.next().await.expect("the stream goes on").data["task_id"], own);
    let url = format!("ws://{}/v1/tasks/{task}/ws", server.address);
    let mut request =
        tokio_tungstenite::tungstenite::client::IntoClientRequest::into_client_request(url).expect("a request");
    let bearer = format!("Bearer {}", server.token.as_deref().expect("set"));
    request.headers_mut().insert("Authorization", bearer.parse().expect("a header"));
    let refused = tokio_tungstenite::connect_async(request).await.expect_err("not theirs");
    assert!(refused.to_string().contains("404"), "{refused}");
    assert_eq!(
        server.client.for_tenant("a").task(task.parse().expect("an id")).await.expect("still there").state,
        longhaul::State::Waiting
    );
}

async fn a_role_goes_as_far_as_its_name_says(store: Store) {
    let mut server = guarded(&store).await;
    let _worker = server.worker().await;
    let requests: [(Role, Method, &str, Value); 5] = [
        (Role::Viewer, Method::GET, "/v1/tasks", json!({})),
        (Role::Submitter, Method::POST, "/v1/tasks", json!({"handler": "echo"})),
        (Role::Operator, Method::PUT, "/v1/schedules/s", json!({"every": "1h", "task": {"handler": "echo"}})),
        (Role::Admin, Method::GET, "/v1/tokens", json!({})),
        (Role::Admin, Method::POST, "/v1/queues/default/pause", json!({})),
    ];
    for role in [Role::Viewer, Role::Submitter, Role::Operator, Role::Admin] {
        server.token = Some(token(&server, "default", role).await);
        for (needed, method, path, body) in &requests {
            let answer = Answer::of(server.request(method.clone(), path).json(body)).await;
            if role >= *needed {
                assert!(answer.status.is_success(), "{role} {method} {path}: {}", answer.body);
            } else {
                answer.is_problem(403, "forbidden");
                assert_eq!(answer.body["role"], needed.to_string());
            }
        }
    }
}

async fn an_admin_makes_tokens_for_its_own_tenant_only(store: Store) {
    let mut server = guarded(&store).await;
    server.token = Some(token(&server, "a", Role::Admin).await);
    let made = server.post("/v1/tokens", json!({"name": "ci", "role": "submitter", "expires_after": "90d"})).await;
    assert_eq!(made.status, 201, "{}", made.body);
    assert_eq!((&made.body["token"]["tenant"], &made.body["token"]["role"]), (&json!("a"), &json!("submitter")));
    let secret = made.body["secret"].as_str().expect("a secret").to_owned();
    let list = server.get("/v1/tokens").await.body.to_string();
    assert!(!list.contains(&secret) && list.contains("\"ci\""), "{list}");
    server
        .post("/v1/tokens", json!({"name": "x", "role": "admin", "tenant": "b"}))
        .await
        .is_problem(422, "invalid_field");
    server.token = Some(secret);
    server.get("/v1/tasks").await.status.is_success().then_some(()).expect("it can be used");
}

async fn a_revoked_or_expired_token_is_refused(store: Store) {
    let mut server = guarded(&store).await;
    let admin = token(&server, "default", Role::Admin).await;
    let new = NewToken {
        name: "short".into(),
        tenant: "default".into(),
        role: Role::Viewer,
        expires_after: Some(std::time::Duration::from_secs(3600)),
    };
    let (info, secret) = server.client.create_token(new).await.expect("a token");
    server.token = Some(secret.clone());
    assert_eq!(server.get("/v1/tasks").await.status, 200);
    server.token = Some(admin);
    let revoked = Answer::of(server.request(Method::DELETE, &format!("/v1/tokens/{}", info.id))).await;
    assert_eq!(revoked.status, 204);
    server.token = Some(secret);
    let asked = std::time::Instant::now();
    while server.get("/v1/tasks").await.status != 401 {
        assert!(asked.elapsed() < common::PATIENCE, "a revoked token is still taken");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let new = NewToken {
        name: "shorter".into(),
        tenant: "default".into(),
        role: Role::Viewer,
        expires_after: Some(std::time::Duration::from_secs(60)),
    };
    server.token = Some(server.client.create_token(new).await.expect("a token").1);
    assert_eq!(server.get("/v1/tasks").await.status, 200);
    server.client.clock().advance(std::time::Duration::from_secs(61));
    server.get("/v1/tasks").await.is_problem(401, "unauthorized");
}

async fn what_is_under_way_ends_with_its_token(store: Store) {
    let mut server = guarded(&store).await;
    server.client.announce(&["echo"]).await.expect("announced");
    let id = server.client.submit(longhaul::NewTask::new("echo", &1)).await.expect("accepted").id;
    let new = NewToken { name: "gone".into(), tenant: "default".into(), role: Role::Viewer, expires_after: None };
    let (info, secret) = server.client.create_token(new).await.expect("a token");
    server.token = Some(secret);
    let stream = server.request(Method::GET, &format!("/v1/tasks/{id}/events")).send().await.expect("a stream");
    assert_eq!(stream.status(), 200);
    let waiting = Answer::of(server.request(Method::GET, &format!("/v1/tasks/{id}/wait?timeout=5m")));
    let revoked = async { server.client.revoke_token(info.id).await.expect("revoked") };
    let all = async { tokio::join!(stream.text(), waiting, revoked) };
    let (told, waited, _) = tokio::time::timeout(common::PATIENCE, all).await.expect("it ends with its token");
    assert!(told.expect("whole").contains("task.submitted"), "until then it was told everything");
    waited.is_problem(401, "unauthorized");
}

async fn a_tenant_that_asks_too_much_is_told_to_wait(store: Store) {
    let rates = [("a".to_owned(), Rate { per_second: 0.001, burst: 5 })].into();
    let settings = ServerSettings { rates, ..Default::default() };
    let mut server = Server::guarded(store.open().await, settings).await;
    let (ours, theirs) = (token(&server, "a", Role::Admin).await, token(&server, "b", Role::Admin).await);
    server.token = Some(ours);
    for _ in 0..5 {
        assert_eq!(server.get("/v1/queues").await.status, 200);
    }
    let refused = server.get("/v1/queues").await;
    refused.is_problem(429, "rate_limited");
    assert!(refused.header("retry-after").parse::<u64>().expect("seconds") >= 1);
    server.token = Some(theirs);
    assert_eq!(server.get("/v1/queues").await.status, 200);
}

async fn a_server_without_tokens_answers_to_its_own_names_only(store: Store) {
    let settings = ServerSettings { hosts: vec!["agents.internal".into()], ..Default::default() };
    let server = Server::start(store.open().await, settings).await;
    for (host, known) in [
        ("localhost:7171", true),
        ("127.0.0.1", true),
        ("[::1]:80", true),
        ("agents.internal", true),
        ("evil.example", false),
        ("127.0.0.1.evil.example", false),
        ("", false),
    ] {
        let answer = Answer::of(server.request(Method::GET, "/v1/queues").header("Host", host)).await;
        if known {
            assert_eq!(answer.status, 200, "{host}");
        } else {
            assert!(answer.status == 403 || answer.status == 400, "{host}: {}", answer.status);
        }
    }
}

async fn pages_of_other_origins_change_nothing_and_read_nothing_without_a_token(store: Store) {
    let settings = ServerSettings { cors_origins: vec!["https://app.example".into()], ..Default::default() };
    let server = Server::start(store.open().await, settings).await;
    let own = format!("http://{}", server.address);
    let pages = [
        ("origin", "http://evil.example", false),
        ("origin", "null", false),
        ("origin", "", false),
        ("origin", "http://app.example", false),
        ("origin", "https://app.example.evil.example", false),
        ("sec-fetch-site", "cross-site", false),
        ("origin", "https://app.example", true),
        ("origin", own.as_str(), true),
        ("sec-fetch-site", "none", true),
        ("user-agent", "curl", true),
    ];
    let mut changing = 0;
    for (method, path) in routes(&server).await {
        if method == Method::GET {
            continue;
        }
        changing += 1;
        let path = path.replace(['{', '}'], "");
        for (header, value, allowed) in pages {
            // Without a body: a page needs no leave of the browser for that.
            let answer = Answer::of(server.request(method.clone(), &path).header(header, value)).await;
            match allowed {
                true => assert_ne!(answer.status, 403, "{method} {path} {header}: {value}: {}", answer.body),
                false => answer.is_problem(403, "origin_not_allowed"),
            }
        }
        // Under a name that is not the server's, a page of that name is refused for it.
        let rebound = server.request(method, &path).header("host", "evil.example:7171");
        Answer::of(rebound.header("origin", "http://evil.example:7171")).await.is_problem(403, "host_not_allowed");
    }
    assert!(changing > 25, "{changing}");
    let paused = server.request(Method::POST, "/v1/queues/default/pause");
    Answer::of(paused.header("origin", "http://evil.example")).await.is_problem(403, "origin_not_allowed");
    let queues = server.get("/v1/queues").await.body;
    assert!(!queues.to_string().contains("\"paused\":true"), "{queues}");
    for (origin, told) in [("http://evil.example", ""), ("https://app.example", "https://app.example")] {
        for path in ["/v1/queues", "/v1/tasks", "/metrics", "/openapi.json"] {
            let read = Answer::of(server.request(Method::GET, path).header("origin", origin)).await;
            assert_eq!(
                read.header("access-control-allow-origin"),
                told,
                "a browser gives it to no other page: {path}"
            );
        }
        let leave = server.request(Method::OPTIONS, "/v1/tasks").header("access-control-request-method", "POST");
        let leave = Answer::of(leave.header("origin", origin)).await;
        assert_eq!(leave.header("access-control-allow-origin"), told);
    }
}

async fn a_token_is_enough_behind_a_proxy_that_changes_the_host(store: Store) {
    let mut server = guarded(&store).await;
    server.token = Some(token(&server, "default", Role::Admin).await);
    for host in ["upstream.internal:8080", "127.0.0.1"] {
        let pause = server.request(Method::POST, "/v1/queues/default/pause").header("host", host);
        let answer = Answer::of(pause.header("origin", "https://agents.example")).await;
        assert_eq!(answer.status, 200, "{host}: {}", answer.body);
    }
    server.token = None;
    let without = server.request(Method::POST, "/v1/queues/default/pause");
    Answer::of(without.header("origin", "http://evil.example")).await.is_problem(401, "unauthorized");
}
