//! `longhaul approvals`, `approve`, `deny` and `answer`: what tasks ask of people.

use serde_json::{Value, json};

use super::control::done;
use super::{age, cell, list, text_of};
use crate::args::client::{AnswerArgs, DecisionArgs, ListArgs};
use crate::exit::Failure;
use crate::http::{Path, Server};
use crate::out;
use crate::table::Table;
use crate::view;

pub(crate) async fn approvals(args: ListArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&Path::new(&["v1", "approvals"])).await?;
    if args.remote.json {
        return answer.print();
    }
    let answer = answer.json()?;
    let approvals = list(&answer, "approvals")?;
    let mut table = Table::new(&["TASK", "APPROVAL", "RISK", "ASKED", "EXPIRES", "FOR"]);
    for approval in approvals {
        table.row([
            cell(&approval["task_id"]),
            cell(&approval["id"]),
            cell(&approval["risk"]),
            format!("{} ago", age(&approval["requested_at"])),
            super::local(&approval["expires_at"]),
            what(approval),
        ]);
    }
    table.print()?;
    if !approvals.is_empty() {
        out::note("'longhaul approve TASK [APPROVAL]' or 'longhaul deny TASK [APPROVAL]' decides");
    }
    Ok(())
}

/// What is asked for: the tool and its arguments, or the question.
fn what(approval: &Value) -> String {
    let said: Vec<String> = ["reason", "tool", "arguments"].map(|key| view::value(&approval[key])).into();
    out::short(&said.into_iter().filter(|said| !said.is_empty()).collect::<Vec<_>>().join(" · "), 400)
}

pub(crate) async fn decide(args: DecisionArgs, approve: bool) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let approval = match &args.approval {
        Some(approval) => approval.clone(),
        None => {
            let answer = server.get(&Path::task(&args.id, &["approvals"])).await?.json()?;
            let open =
                list(&answer, "approvals")?.iter().filter(|approval| approval["status"] == "pending").collect();
            only(&args.id, "approval", open, what)?
        }
    };
    let mut body = json!({"decision": if approve { "approve" } else { "deny" }});
    if let Some(reason) = &args.reason {
        body["reason"] = json!(reason);
    }
    let answer = server.post(&Path::task(&args.id, &["approvals", &approval]), &body).await?;
    let told = if approve { "approved" } else { "denied" };
    done(&args.remote, &answer, format!("{told}: approval {approval} of task {}", args.id))
}

pub(crate) async fn answer(args: AnswerArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let text = if args.text == "-" { text_of("-")? } else { args.text };
    let question = match &args.question {
        Some(question) => question.clone(),
        None => {
            let answer = server.get(&Path::task(&args.id, &["questions"])).await?.json()?;
            let open = list(&answer, "questions")?.iter().filter(|question| is_open(question)).collect();
            only(&args.id, "question", open, |question| view::value(&question["question"]))?
        }
    };
    let answer = server.post(&Path::task(&args.id, &["questions", &question]), &json!({"answer": text})).await?;
    done(&args.remote, &answer, format!("answered: question {question} of task {}", args.id))
}

fn is_open(question: &Value) -> bool {
    question["answer"].is_null()
        && question["answered_at"].is_null()
        && matches!(question["status"].as_str(), None | Some("pending" | "open"))
}

/// The one that is open; which one is meant is never guessed.
fn only(task: &str, thing: &str, open: Vec<&Value>, what: fn(&Value) -> String) -> Result<String, Failure> {
    match open.as_slice() {
        [] => Err(Failure::usage(format!(
            "task {task} has no open {thing}; 'longhaul why {task}' says what it waits for"
        ))),
        [one] => {
            out::note(format!("{thing} {}: {}", cell(&one["id"]), out::clean(&what(one))));
            one["id"]
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| Failure::internal(format!("the {thing} has no id")))
        }
        many => {
            let lines: Vec<String> =
                many.iter().map(|one| format!("    {}  {}", cell(&one["id"]), out::clean(&what(one)))).collect();
            let flag = if thing == "question" { "--question QID" } else { "APPROVAL" };
            Err(Failure::usage(format!(
                "task {task} has {} open {thing}s; say which one with {flag}:\n{}",
                many.len(),
                lines.join("\n")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_of_several_is_meant_is_never_guessed() {
        let (a, b) = (json!({"id": "a", "reason": "one"}), json!({"id": "b", "reason": "two"}));
        assert_eq!(only("t", "approval", vec![&a], what), Ok("a".to_owned()));
        let told = only("t", "approval", vec![&a, &b], what).expect_err("two").to_string();
        assert!(told.contains("    a  one\n    b  two"), "{told}");
        assert_eq!(only("t", "question", vec![], what).expect_err("none").code(), 2);
    }
}
