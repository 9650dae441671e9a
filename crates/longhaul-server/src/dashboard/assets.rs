//! The files that pages are made of, in the binary. Their address has a digest of all of them in it, so that browsers may
//! keep them for ever.

use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

use crate::problem::Problem;

const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! files {
    ($($name:literal: $kind:expr,)*) => {
        &[$(($name, $kind, include_bytes!(concat!("../../assets/", $name)))),*]
    };
}

/// Name, type and content.
const FILES: &[(&str, &str, &[u8])] = files! {
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "theme.js": SCRIPT,
    "main.js": SCRIPT,
    "actions.js": SCRIPT,
    "events.js": SCRIPT,
    "keys.js": SCRIPT,
    "live.js": SCRIPT,
    "morph.js": SCRIPT,
    "text.js": SCRIPT,
    "time.js": SCRIPT,
};

static VERSION: LazyLock<String> = LazyLock::new(|| {
    let mut digest = Sha256::new();
    for (name, _, content) in FILES {
        digest.update(name);
        digest.update(content);
    }
    digest.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
});

/// The folder they are in.
pub(super) fn folder() -> String {
    format!("/assets/{}", *VERSION)
}

/// One of them. A page of an older server may ask for what it was made with; it gets what there is, for once.
pub(super) async fn file(Path((version, name)): Path<(String, String)>) -> Result<Response, Problem> {
    let found = FILES.iter().find(|(known, ..)| *known == name);
    let (_, kind, content) = found.ok_or_else(|| Problem::not_found("file", &name))?;
    let kept = if version == *VERSION { "public, max-age=31536000, immutable" } else { "no-store" };
    let headers = [
        (header::CONTENT_TYPE, *kind),
        (header::CACHE_CONTROL, kept),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((StatusCode::OK, headers, *content).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_folder_is_in_the_binary() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .expect("the folder")
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
            .collect();
        let mut known: Vec<&str> = FILES.iter().map(|(name, ..)| *name).collect();
        there.sort();
        known.sort_unstable();
        assert_eq!(there, known);
    }

    #[test]
    fn no_file_names_another_host() {
        for (name, _, content) in FILES {
            let text = String::from_utf8_lossy(content).replace("http://www.w3.org/", "");
            assert!(!text.contains("http://") && !text.contains("https://"), "{name} names a host");
        }
    }
}
