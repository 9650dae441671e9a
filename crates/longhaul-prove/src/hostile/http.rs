//! Hostile requests, to every route: bodies, queries, paths, headers and forms.
//!
//! An input is a request as one would write it down: a line with method and path, headers, an empty line, the body.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Method, Request, Uri};
use longhaul_hostile::Judged;

use super::bed::{Bed, Place};
use super::trial::{Broke, Trial};

/// After so many inputs what is stored is compared with what was accepted, and the next bed is made.
const BATCH: u64 = 2_500;

/// Requests to a server on a store in memory; every other bed wants a token.
pub(super) async fn memory(trial: &mut Trial<'_>) -> Result<(), Broke> {
    on(trial, &Place::Memory).await
}

/// Requests to a server on PostgreSQL, at this URL.
pub(super) async fn postgres(trial: &mut Trial<'_>, url: &str) -> Result<(), Broke> {
    on(trial, &Place::Postgres(url)).await
}

async fn on(trial: &mut Trial<'_>, place: &Place<'_>) -> Result<(), Broke> {
    let mut guarded = false;
    loop {
        let mut bed = Bed::make(place, guarded).await?;
        guarded = !guarded;
        for _ in 0..BATCH {
            let Some(input) = trial.draw()? else { return bed.audit().await };
            let judged = one(&mut bed, &input).await?;
            trial.judged(judged)?;
        }
        bed.audit().await?;
        trial.calm()?;
    }
}

async fn one(bed: &mut Bed, input: &[u8]) -> Result<Judged, Broke> {
    let Some(request) = request(&bed.filled(input)) else { return Ok(Judged::Refused) };
    let (reads, removes) = (request.method().is_safe(), *request.method() == Method::DELETE);
    let path = request.uri().path().to_owned();
    let answer = bed.send(request).await?;
    bed.check(&answer)?;
    let accepted = answer.status.is_success() || answer.status.is_redirection();
    if accepted && removes && path.starts_with("/v1/tasks/") {
        bed.removed();
    }
    if accepted && path.starts_with("/tasks/") && (path.ends_with("/fork") || path.ends_with("/undo")) {
        bed.made(&answer);
    }
    // Signing in and out make a cookie and store nothing; whatever else is accepted and no reading may store.
    if bed.has_changed().await? && (reads || !accepted) {
        unwritten(bed, input).await?;
    }
    Ok(if accepted { Judged::Accepted } else { Judged::Refused })
}

/// Something was written while a request was refused, or only read: perhaps nothing that can be seen. Asks once more and compares.
async fn unwritten(bed: &mut Bed, input: &[u8]) -> Result<(), Broke> {
    let before = bed.witness.digest().await?;
    if let Some(request) = request(&bed.filled(input)) {
        bed.send(request).await?;
    }
    let same = bed.witness.digest().await? == before;
    bed.has_changed().await?;
    same.then_some(()).ok_or_else(|| Broke("it was refused, or only read, and something was stored".to_owned()))
}

/// The request that an input says, if one can be made of it.
pub(super) fn request(input: &[u8]) -> Option<Request<Body>> {
    let (head, body) = match input.windows(2).position(|two| two == b"\n\n") {
        Some(end) => (&input[..end], &input[end + 2..]),
        None => (input, &[][..]),
    };
    let mut lines = head.split(|byte| *byte == b'\n');
    let mut words = lines.next()?.splitn(2, |byte| *byte == b' ');
    let method = Method::from_bytes(words.next()?).ok()?;
    let mut request =
        Request::builder().method(method).uri(target(words.next()?)?).body(Body::from(body.to_vec())).ok()?;
    let headers = request.headers_mut();
    for line in lines {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = (line[..colon].trim_ascii(), line[colon + 1..].trim_ascii());
        // What no header can have is for the connection, which is another parser.
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    if !headers.contains_key("host") {
        headers.insert("host", HeaderValue::from_static("localhost"));
    }
    Some(request)
}

/// A path with its query, with what cannot stand in one encoded.
fn target(text: &[u8]) -> Option<Uri> {
    let mut target = String::with_capacity(text.len());
    if text.first() != Some(&b'/') {
        target.push('/');
    }
    for &byte in text {
        match byte {
            b'!' | b'$'..=b';' | b'=' | b'?'..=b'[' | b']' | b'_' | b'a'..=b'z' | b'~' => {
                target.push(char::from(byte))
            }
            _ => target.push_str(&format!("%{byte:02X}")),
        }
    }
    target.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_is_read_as_the_request_it_says() {
        let made = request(b"POST /v1/tasks/\xc3\xa4 b?x={1}\ncontent-type: application/json\nx: \xff\n\n{}\n\n")
            .expect("a request");
        assert_eq!(
            (made.method(), made.uri().to_string().as_str()),
            (&Method::POST, "/v1/tasks/%C3%A4%20b?x=%7B1%7D")
        );
        assert_eq!(made.headers()["content-type"], "application/json");
        assert_eq!(made.headers()["x"].as_bytes(), b"\xff");
        assert_eq!(made.headers()["host"], "localhost");
        assert!(request(b"").is_none() && request(b"GET").is_none() && request(b"GE\0T /").is_none());
    }

    async fn is_stored_behind_its_back(store: impl AsyncFnOnce(&Bed)) -> String {
        let mut bed = Bed::make(&Place::Memory, false).await.expect("a bed");
        bed.audit().await.expect("everything was accepted so far");
        store(&bed).await;
        assert!(bed.has_changed().await.expect("the store can be looked at"));
        let Broke(why) = bed.audit().await.expect_err("it is found");
        why
    }

    #[tokio::test]
    async fn what_is_stored_and_was_not_accepted_is_found() {
        let why = is_stored_behind_its_back(async |bed| {
            bed.client.submit(longhaul::NewTask::new("echo", &1)).await.expect("accepted");
        });
        assert!(why.await.contains("nobody was told"));
        let why = is_stored_behind_its_back(async |bed| {
            bed.client.save_endpoint("x", longhaul::Webhook::new("https://example.com")).await.expect("saved");
        });
        assert!(why.await.contains("endpoint 'x'"));
        let why = is_stored_behind_its_back(async |bed| {
            let id = bed.name("done").parse().expect("an id");
            bed.client.delete(id).await.expect("deleted");
        });
        assert!(why.await.contains("were accepted"));
    }

    #[tokio::test]
    async fn a_request_is_accepted_or_refused_and_reads_store_nothing() {
        let mut bed = Bed::make(&Place::Memory, false).await.expect("a bed");
        for (input, expected) in [
            ("POST /v1/tasks\ncontent-type: application/json\n\n{\"handler\":\"echo\"}", Judged::Accepted),
            (
                "POST /v1/tasks\ncontent-type: application/json\n\n{\"handler\":\"echo\",\"priority\":10}",
                Judged::Refused,
            ),
            ("GET /v1/tasks/{state}/export\n\n", Judged::Accepted),
            ("DELETE /v1/tasks/{done}\n\n", Judged::Accepted),
            ("DELETE /v1/tasks/{pending}\n\n", Judged::Refused),
        ] {
            let judged = one(&mut bed, input.as_bytes()).await.expect("nothing breaks");
            assert_eq!(judged, expected, "{input}");
        }
        bed.audit().await.expect("what is stored was accepted");
    }
}
