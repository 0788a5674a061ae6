//! Every argument about order, for races and for crashes, lives here.
//!
//! **The rule.** The writer is the only one that stores, every store is a release, every load an
//! acquire. So whoever sees a store has seen everything that the writer stored before it, and a
//! later load cannot return something older. On x86 both are plain moves.
//!
//! **Sections.** Each run has a sequence word: even at rest, odd while the writer changes the
//! run. All that a lookup takes from a run is changed in its section only: its header but for
//! the count of children, its chunks of holders, and the place in each table slot of its blocks.
//!
//! 1. *A reader never trusts half a change.* [`read`] saw an even number `s`, then the reader
//!    loaded data, then [`same`] saw `s` again. Had one of the loads returned a value stored in
//!    a later section, then the odd number stored before that value would be visible too (the
//!    rule), and `same` could not have seen `s`. So all the loads are of the state after `s`.
//! 2. *A slot can be reused for another hash between the load of its key and of its place.* The
//!    reader loads both again inside the section of the run that the place names. A slot enters
//!    and leaves a run only in that run's section, so by 1 the slot holds that hash at that place
//!    during the whole section, or `same` fails.
//! 3. *A run can be freed and its cell reused, as a run or as a chunk of another.* The sequence
//!    word belongs to the cell, not to the run; it is kept when the cell is reused and it only
//!    grows. The run is freed in a section, so a reader that came by a slot (2) or by a child's
//!    link (4) fails in `same`. What it loaded meanwhile may be anything: cell numbers are
//!    checked against the zone and loops are bounded before they are followed.
//! 4. *From a run to its parent.* The parent outlives its children. The child's number is checked
//!    again, with the whole path (5), after the parent's was read, so the parent was the parent at
//!    that moment.
//! 5. *One state for the whole path.* The reader checks all numbers of the path again after it
//!    loaded everything. Between the last first read and the first check no run of the path
//!    changed: the answer is the state of that moment. In between it also probes for the block
//!    after the deepest one and finds it absent; blocks are only known when their parents are, so
//!    at the moment of that probe nothing deeper was known either.
//! 6. *A probe misses no key that is there all the time.* Keys do not move. A key goes into the
//!    first free slot of its lines, and each full line that it passes counts it before the key
//!    appears and until after it is gone; a probe stops at a line that counts none.
//! 7. *A repair changes everything*: [`read`] and [`same`] on the repair word around the rest.
//!
//! **Crashes.** A writer killed at any instant leaves a prefix of its stores.
//!
//! 8. The journal names the server before the first store of a call and is cleared after the
//!    last, so a torn call is known. Only that server's entries may be incomplete, and they go.
//! 9. An entry is live by its second word and is stored first word first. It moves by copy, then
//!    delete: a crash leaves it twice or beyond a gap, never lost. The repair sorts that out.
//! 10. A run's header is complete before its first slot, slots come in order and go in reverse
//!     order, and a slot is live by its key, stored last. So the slots of a run are always its
//!     blocks from the first on, and all of its ancestors' slots are there. Everything else in a
//!     run, counts and chunks, is made anew from entries and slots.
//! 11. A section that is left open stays odd, readers of that run are told to retry, then busy,
//!     until the repair; all other runs are whole by 5.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// A word of the zone. The models bring their own.
pub(super) trait Word {
    fn get(&self) -> u64;
    fn set(&self, value: u64);
}

impl Word for AtomicU64 {
    #[inline(always)]
    fn get(&self) -> u64 {
        #[cfg(test)]
        super::tests::interleave::tick();
        self.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn set(&self, value: u64) {
        #[cfg(test)]
        super::tests::crash::tick();
        self.store(value, Ordering::Release);
    }
}

/// Writer: begins a section.
#[inline]
pub(super) fn enter<W: Word>(sequence: &W) {
    sequence.set(sequence.get() | 1);
}

/// Writer: ends a section.
#[inline]
pub(super) fn leave<W: Word>(sequence: &W) {
    sequence.set((sequence.get() | 1).wrapping_add(1));
}

/// Reader: the number of the state at rest, `None` while the writer is in the section.
#[inline]
pub(super) fn read<W: Word>(sequence: &W) -> Option<u64> {
    let number = sequence.get();
    (number & 1 == 0).then_some(number)
}

/// Reader: whether no section began since `number` was read.
#[inline]
pub(super) fn same<W: Word>(sequence: &W, number: u64) -> bool {
    sequence.get() == number
}

/// Writer: makes a slot live. Its section is open if the slot belongs to a run.
#[inline]
pub(super) fn publish<W: Word>(key: &W, place: &W, hash: u64, value: u64) {
    place.set(value);
    key.set(hash);
}
