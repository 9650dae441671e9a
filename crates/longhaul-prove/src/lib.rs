//! The fault suite of Longhaul: seeded random programs run on real processes that are killed, stopped and made to fail,
//! and a checker decides afterwards whether everything that is promised held.
//!
//! The rooms: [`program`] (what tasks do, drawn from a seed), [`handler`] (does it), [`ledger`] (what really
//! happened, noted outside of the product), [`records`] (what clients were told), [`people`] (who answer, approve
//! and decide), [`process`] (workers, listeners and clients, which can be killed), [`serve`] (servers, too),
//! [`via`], [`web`] and [`after`] (what clients do, by the library and over HTTP), [`hooks`] (who is told by
//! webhooks), [`ticks`] (schedules), [`server`] and [`bed`] (a store and everything around it), [`disk`],
//! [`proxy`] and [`broker`] (which fail on purpose), [`history`] (all that is known afterwards), [`happened`]
//! (what of it was done at all), [`check`] (the invariants over it), [`drive`] (which faults when), [`readers`] (a
//! run of its own for who reads events), [`soak`] (an hour of everything), [`migrations`] (broken off and raced),
//! [`mutants`] (defects that must be found), [`hostile`] (input that nobody should send), [`report`]
//! (`docs/proof.md`). [`simulate`] does the same in one thread, with simulated processes and time, for thousands
//! of seeds. [`all`] runs everything.

pub mod after;
pub mod all;
pub mod bed;
pub mod broker;
pub mod chance;
pub mod check;
pub mod disk;
pub mod drive;
pub mod handler;
pub mod happened;
pub mod history;
pub mod hooks;
pub mod hostile;
pub mod ledger;
pub mod migrations;
pub mod mutants;
pub mod people;
pub mod process;
pub mod program;
pub mod proxy;
pub mod readers;
pub mod records;
pub mod report;
pub mod serve;
pub mod server;
pub mod simulate;
pub mod soak;
pub mod ticks;
pub mod via;
pub mod web;

/// What can go wrong with the suite itself.
pub type Anyhow = Box<dyn std::error::Error + Send + Sync>;
