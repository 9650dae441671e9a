//! `longhaul check`: exit code, stdout, JSON.

use std::path::Path;
use std::process::{Command, Output};

const GOOD: &str = "[saga]\nname = \"deploy\"\n[[step]]\nname = \"dns\"\ncommand = [\"true\"]\n";

fn check(folder: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_longhaul")).arg("check").arg(folder).args(more).output().expect("it starts")
}

#[test]
fn good_manifests_are_listed_and_the_exit_code_is_0() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("deploy.toml");
    std::fs::write(&file, GOOD).expect("written");
    let output = check(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}: saga deploy, 1 step\n", file.display()));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn problems_are_told_on_stdout_and_the_exit_code_is_1() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("deploy.toml");
    std::fs::write(&file, GOOD.replace("command", "comand")).expect("written");
    let output = check(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let unknown = format!("{}:5: unknown key 'comand' in [[step]]\n    did you mean 'command'?\n", file.display());
    assert!(told.ends_with(&unknown), "{told}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "longhaul: 2 problems found\n");
}

#[test]
fn json_has_manifests_and_problems() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("a.toml"), GOOD).expect("written");
    std::fs::write(folder.path().join("b.toml"), GOOD).expect("written");
    let output = check(folder.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(told["manifests"][0]["name"], "deploy");
    assert_eq!(told["manifests"][0]["steps"][0], "dns");
    assert_eq!((told["problems"][0]["line"].as_u64(), told["problems"][0]["column"].as_u64()), (Some(2), Some(8)));
    assert!(told["problems"][0]["remedy"].is_string());
}

#[test]
fn an_agent_that_others_may_have_is_a_warning() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let agent = "[agent]\nname = \"boss\"\nmodel = \"m\"\ndelegates = [\"deploy\", \"elsewhere\"]\n";
    std::fs::write(folder.path().join("boss.toml"), agent).expect("written");
    std::fs::write(folder.path().join("deploy.toml"), GOOD).expect("written");
    let output = check(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(told.contains("boss may delegate to 'elsewhere', which no manifest here declares"), "{told}");
    assert_eq!(told.matches("warning: ").count(), 1, "{told}");
    let told: serde_json::Value = serde_json::from_slice(&check(folder.path(), &["--json"]).stdout).expect("JSON");
    assert_eq!(told["warnings"].as_array().map(Vec::len), Some(1));
}

#[test]
fn a_folder_that_is_not_there_is_a_problem() {
    let output = check(Path::new("no/such/folder"), &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("no/such/folder: cannot read the folder: "));
}

#[test]
fn a_reader_that_goes_away_ends_it_without_a_panic() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("deploy.toml"), GOOD).expect("written");
    for more in [&[][..], &["--json"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_longhaul"));
        let output =
            command.arg("check").arg(folder.path()).args(more).stdout(writer).output().expect("it starts");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}
