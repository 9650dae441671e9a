//! `longhaul demo`: the whole story on an embedded store, without a key and without a network.
//!
//! A server and a pool of workers, each a process of its own, on one SQLite file; deployments that are sagas of commands
//! and really change a sandbox folder; agents with a scripted model. A worker is killed in the middle, another one is
//! stopped past its leases. Each effect notes what it does in a ledger, and by that ledger everything is judged.

mod board;
mod effect;
mod judge;
mod ledger;
mod model;
mod people;
mod plan;
mod pool;
mod report;
mod story;
mod view;
mod world;

use std::process::ExitCode;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{DemoArgs, DemoEffectArgs};
use crate::exit::Failure;
use crate::out;
use judge::Judgement;
pub(crate) use ledger::What;
use model::ScriptedModel;
use plan::Plan;
use pool::Pool;
use report::Kept;
use story::Story;
use view::{Tone, View};
use world::World;

/// What a step of the demo runs.
pub(crate) fn effect(args: &DemoEffectArgs) -> ExitCode {
    match effect::run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) async fn run(args: DemoArgs) -> Result<(), Failure> {
    let mut told = Told::listen()?;
    let plan = Plan::new(args.fast);
    let world = World::make(plan.slots, plan.lease)?;
    let played = play(&args, plan, &world, &mut told).await;
    if played.is_ok() && args.keep {
        let folder = world.keep();
        out::note(format!("the folder {} is kept; 'longhaul up' in it takes it up again", folder.display()));
    } else {
        world.remove().await;
    }
    report::verdict(&played?)
}

/// Starts everything, lets it happen, and ends everything, however it went.
async fn play(args: &DemoArgs, plan: Plan, world: &World, told: &mut Told) -> Result<Judgement, Failure> {
    let model = ScriptedModel::start(plan.word, plan.work_ms).await?;
    let mut pool = tokio::select! {
        pool = Pool::start(world, plan.workers, &model.url) => pool?,
        () = told.heard() => return Err(interrupted()),
    };
    let mut view = View::new(plan.workers);
    let done = tokio::select! {
        done = perform(args, plan, world, &mut pool, &model, &mut view) => done,
        () = told.heard() => Err(interrupted()),
    };
    view.end();
    if done.is_ok() && args.keep {
        out::note(format!(
            "\nserver and workers go on: look around at {}, or with LONGHAUL_SERVER={0} longhaul ps\n\
             folder: {} (sandbox, ledger, manifests, logs)\nCtrl-C ends them; the folder is kept",
            pool.url,
            world.folder().display()
        ));
        told.heard().await;
    }
    pool.end().await;
    done
}

async fn perform(
    args: &DemoArgs,
    plan: Plan,
    world: &World,
    pool: &mut Pool,
    model: &ScriptedModel,
    view: &mut View,
) -> Result<Judgement, Failure> {
    view.say(Tone::Loud, format!("dashboard: {}", pool.url));
    view.say(
        Tone::Plain,
        format!(
            "a server and {} workers ({} tasks at once each), each a process of its own, on one SQLite file; the model is a script on {}, part of this demo",
            plan.workers, plan.slots, model.url
        ),
    );
    let mut story = Story::new(plan, !args.fast && !args.yes, world, pool, model, view)?;
    story.happen().await?;
    if !args.keep {
        story.end_workers().await;
    }
    let judgement = story.judged()?;
    drop(story);
    let seconds = view.elapsed().as_secs_f64();
    view.end();
    let kept = args.keep.then(|| Kept { dashboard: pool.url.clone(), folder: world.folder().to_owned() });
    report::print(args, &judgement, seconds, kept)?;
    Ok(judgement)
}

/// SIGINT and SIGTERM.
struct Told {
    interrupt: Signal,
    terminate: Signal,
}

impl Told {
    fn listen() -> Result<Self, Failure> {
        let deaf = |error: std::io::Error| Failure::internal(format!("cannot hear signals: {error}"));
        let interrupt = signal(SignalKind::interrupt()).map_err(deaf)?;
        Ok(Self { interrupt, terminate: signal(SignalKind::terminate()).map_err(deaf)? })
    }

    async fn heard(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

fn interrupted() -> Failure {
    Failure::interrupted("interrupted; the demo's processes are ended and its folder is removed")
}
