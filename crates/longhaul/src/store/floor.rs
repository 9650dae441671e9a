//! What the measurement of the storage itself gives; each store measures in a file of its own.

use serde::Serialize;

/// What the storage itself can do, without any of the engine: the upper bound for everything.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Floor {
    /// Rows per second by durable transactions of 1,000 rows (16-byte key, 200 bytes).
    pub rows_per_second: f64,
    /// Durable transactions of one row per second.
    pub commits_per_second: f64,
}
