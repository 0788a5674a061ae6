//! A writer that is killed after some stores.
#![forbid(unsafe_code)]

use std::cell::Cell;

thread_local! {
    /// Stores until the kill; none is planned at 0.
    static LEFT: Cell<u64> = const { Cell::new(0) };
}

/// Called before each store.
pub(super) fn tick() {
    LEFT.with(|left| match left.get() {
        0 => {}
        1 => {
            left.set(0);
            std::panic::panic_any(Killed);
        }
        more => left.set(more - 1),
    });
}

struct Killed;
