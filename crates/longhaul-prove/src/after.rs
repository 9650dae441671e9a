//! What a client does with a task that it submitted: it cancels it, patches its state, looks around, and when it has ended opens
//! it again, forks it, or has undone what it did.

use std::sync::Arc;
use std::time::Duration;

use longhaul::{State, TaskId};
use tokio::time::{Instant, sleep};

use crate::Anyhow;
use crate::chance::Chance;
use crate::program::Plan;
use crate::records::{Answer, Records};
use crate::via::Via;

/// How long a client waits for a task to end.
const PATIENCE: Duration = Duration::from_secs(120);

/// Does all that the plan says.
pub async fn after(via: &Via, records: &Arc<Records>, plan: &Plan, task: TaskId) -> Result<(), Anyhow> {
    if let Via::Web(web, tenant) = via {
        web.look_around(tenant, task, &mut Chance::of(plan.program.number, 7)).await;
    }
    // Two at once, so that they get in each other's way.
    let patching = async {
        tokio::try_join!(patch(via, records, plan.patches, task), patch(via, records, plan.patches, task))
    };
    let cancelling = async {
        if let Some(after) = plan.cancel_after_ms {
            sleep(Duration::from_millis(after)).await;
            via.cancel(records, task).await?;
        }
        Ok::<_, Anyhow>(())
    };
    tokio::try_join!(patching, cancelling)?;
    for _ in 0..plan.resumes {
        match via.ended(task, PATIENCE).await {
            Some(State::Failed | State::Cancelled) => drop(via.resume(records, task).await?),
            _ => break,
        }
    }
    if (plan.undo || plan.fork.is_some()) && via.ended(task, PATIENCE).await.is_some() {
        if let Some(from) = plan.fork_from() {
            via.fork(records, task, from).await?;
        }
        if plan.undo
            && let Answer::Done { task: undo, .. } = via.undo(records, task).await?
            && via.ended(undo, PATIENCE).await == Some(State::Failed)
        {
            // One that failed can be asked for again, and undoes the rest.
            via.undo(records, task).await?;
        }
    }
    Ok(())
}

/// Counts a task's goal up so many times, unless the task ends before. Whoever else does so too is noticed by the version.
async fn patch(via: &Via, records: &Records, times: u32, task: TaskId) -> Result<(), Anyhow> {
    let until = Instant::now() + Duration::from_secs(20);
    let mut left = times;
    while left > 0 && Instant::now() < until {
        let Some((version, goal)) = via.state(task).await else {
            if via.ended(task, Duration::ZERO).await.is_some() {
                return Ok(());
            }
            sleep(Duration::from_millis(30)).await;
            continue;
        };
        match via.patch(records, task, version, goal + 1).await? {
            Answer::Done { .. } => left -= 1,
            Answer::Refused { why } if why.contains("version") => {}
            // It has ended, or nobody knows.
            _ => return Ok(()),
        }
    }
    Ok(())
}
