//! The line at the desk: which operations may have something to be given, lowest order first, and who
//! waits at which address. No I/O.
//!
//! What is in line are hints: whoever takes one looks whether it still holds. So nothing has to be
//! searched for, however many operations are under way.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::journal::Key;
use super::order::Order;

/// See the module.
#[derive(Default)]
pub(super) struct Line {
    /// The order of an outcome, the number of the operation that may be given it, and its key.
    due: BTreeSet<(Order, u64, Key)>,
    /// Those that wait at each address, by their numbers.
    waiting: HashMap<String, BTreeMap<u64, Key>>,
    /// Those that may start, or start again.
    fresh: Vec<Key>,
}

impl Line {
    /// Something may be given to an operation.
    pub(super) fn push(&mut self, order: Order, number: u64, key: Key) {
        self.due.insert((order, number, key));
    }

    /// The next that may be given something: the order of that, and the operation's number and key.
    pub(super) fn pop(&mut self) -> Option<(Order, u64, Key)> {
        self.due.pop_first()
    }

    /// An operation may start.
    pub(super) fn may_start(&mut self, key: Key) {
        self.fresh.push(key);
    }

    /// Those that may start.
    pub(super) fn take_fresh(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.fresh)
    }

    /// An operation begins to wait at an address.
    pub(super) fn wait_at(&mut self, address: &str, number: u64, key: Key) {
        self.waiting.entry(address.to_owned()).or_default().insert(number, key);
    }

    /// An operation no longer waits at an address.
    pub(super) fn leave(&mut self, address: &str, number: u64) {
        if let Some(waiting) = self.waiting.get_mut(address) {
            waiting.remove(&number);
            if waiting.is_empty() {
                self.waiting.remove(address);
            }
        }
    }

    /// Those that wait at an address, the first first.
    pub(super) fn waiting_at(&self, address: &str) -> impl Iterator<Item = (u64, &Key)> {
        self.waiting.get(address).into_iter().flatten().map(|(number, key)| (*number, key))
    }

    /// Whether anything waits at any address.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
