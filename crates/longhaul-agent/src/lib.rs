//! Handlers that need no code: declared in a manifest, made of commands and HTTP calls.
//!
//! [`manifest`] reads a folder of TOML files and says everything that is wrong with them, with
//! file, line and remedy. [`template`] fills the placeholders. [`tool`] runs one call of a command
//! or an HTTP endpoint. [`saga`] runs a saga manifest as the handler of a worker.
//!
//! Built on the public API of `longhaul` alone.

pub mod manifest;
pub mod saga;
pub mod template;
pub mod tool;

pub use manifest::{Loaded, Manifest, Problem, Saga, load};
pub use template::Template;
pub use tool::{Call, Tool};
