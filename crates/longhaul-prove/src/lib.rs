//! The fault suite of Longhaul: seeded random programs run on real processes that are killed, stopped and made to fail,
//! and a checker decides afterwards whether everything that is promised held.
//!
//! The rooms: [`program`] (what tasks do, drawn from a seed), [`handler`] (does it), [`ledger`] (what really happened,
//! noted outside of the product), [`records`] (what clients were told), [`people`] (who answer, approve and decide),
//! [`process`] (workers, listeners and clients, which can be killed), [`server`] and [`bed`] (a store and everything around it), [`disk`],
//! [`proxy`] and [`broker`] (which fail on purpose), [`history`] (all that is known afterwards), [`check`] (the invariants over it), [`drive`] (which faults when), [`migrations`] (broken off and raced), [`mutants`] (defects
//! that must be found), [`report`] (`docs/proof.md`).

pub mod bed;
pub mod broker;
pub mod chance;
pub mod check;
pub mod disk;
pub mod drive;
pub mod handler;
pub mod history;
pub mod ledger;
pub mod migrations;
pub mod mutants;
pub mod people;
pub mod process;
pub mod program;
pub mod proxy;
pub mod records;
pub mod report;
pub mod server;

/// What can go wrong with the suite itself.
pub type Anyhow = Box<dyn std::error::Error + Send + Sync>;
