//! `longhaul init`: what it makes is right, and nothing that is there is overwritten.

use std::process::{Command, Output};

fn longhaul(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_longhaul")).args(args).output().expect("it runs")
}

#[test]
fn what_is_made_passes_the_check_and_is_not_overwritten() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let made = folder.path().join("agents");
    let path = made.to_str().expect("text");
    let output = longhaul(&["init", path]);
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout.is_empty(), "what to do next is no data: {output:?}");
    let checked = longhaul(&["check", path]);
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success(), "{said}");
    assert!(said.contains("agent devops, 4 tools") && said.contains("saga release, 2 steps"), "{said}");

    std::fs::write(made.join("devops.toml"), "mine").expect("written");
    let again = longhaul(&["init", path]);
    assert_eq!(again.status.code(), Some(2), "{again:?}");
    assert!(String::from_utf8_lossy(&again.stderr).contains("devops.toml is there already"), "{again:?}");
    assert_eq!(std::fs::read_to_string(made.join("devops.toml")).expect("still there"), "mine");
}
