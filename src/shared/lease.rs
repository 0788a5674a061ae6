//! The right to write the index: at most one process has it.
//!
//! The newest worker 0 *wants* the lease; the holder sees that, finishes its batch and releases.
//! Otherwise the lease is taken only from a process that is gone, never after a time-out: a
//! holder that is merely stopped or slow may still write.

use std::sync::atomic::{AtomicU64, Ordering};

use super::ProcessId;

pub(super) const WORDS: usize = 3;
const HOLDER: usize = 0;
const WANTED: usize = 1;
const GENERATION: usize = 2;

#[derive(Clone, Copy, Debug)]
pub struct Lease<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Lease<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Lease<'a> {
        Lease { words }
    }

    pub fn holder(&self) -> Option<ProcessId> {
        ProcessId::from_word(self.words[HOLDER].load(Ordering::Acquire))
    }

    /// How often the lease changed hands.
    pub fn generation(&self) -> u64 {
        self.words[GENERATION].load(Ordering::Relaxed)
    }

    /// Asks for the lease; the last to ask is the one that gets it.
    pub fn want(&self, me: ProcessId) {
        self.words[WANTED].store(me.word(), Ordering::Release);
    }

    /// Whether the holder `me` should finish its batch and release.
    pub fn is_wanted_by_other(&self, me: ProcessId) -> bool {
        self.wanted().is_some_and(|wanted| wanted != me && wanted.is_alive())
    }

    /// Takes the lease if it is free or its holder is gone, and no other live process was the
    /// last to ask for it. True too when `me` holds it already.
    ///
    /// The acquire of the swap pairs with the release in [`Lease::release`]: a writer sees all
    /// that the one before it wrote. A holder that died released nothing; what it left half done
    /// is for the index to find.
    pub fn try_acquire(&self, me: ProcessId) -> bool {
        let held = self.words[HOLDER].load(Ordering::Acquire);
        if held == me.word() {
            return true;
        }
        let free = ProcessId::from_word(held).is_none_or(|holder| !holder.is_alive());
        if !free || self.is_wanted_by_other(me) {
            return false;
        }
        let swapped = self.words[HOLDER]
            .compare_exchange(held, me.word(), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        if swapped {
            self.words[GENERATION].fetch_add(1, Ordering::Relaxed);
        }
        swapped
    }

    /// Gives the lease up. Does nothing for a process that does not hold it.
    pub fn release(&self, me: ProcessId) {
        let _ =
            self.words[HOLDER].compare_exchange(me.word(), 0, Ordering::AcqRel, Ordering::Relaxed);
    }

    fn wanted(&self) -> Option<ProcessId> {
        ProcessId::from_word(self.words[WANTED].load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Vec<AtomicU64> {
        (0..WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    fn dead() -> ProcessId {
        ProcessId::from_word(ProcessId::current().word() ^ 1).unwrap()
    }

    #[test]
    fn a_free_lease_is_taken_and_kept() {
        let words = words();
        let lease = Lease::new(&words);
        let me = ProcessId::current();
        assert!(lease.try_acquire(me));
        assert!(lease.try_acquire(me));
        assert_eq!(lease.holder(), Some(me));
        assert_eq!(lease.generation(), 1);
        lease.release(dead());
        assert_eq!(lease.holder(), Some(me));
        lease.release(me);
        assert_eq!(lease.holder(), None);
    }

    #[test]
    fn a_live_holder_keeps_it_and_a_dead_one_loses_it() {
        let words = words();
        let lease = Lease::new(&words);
        let me = ProcessId::current();
        assert!(lease.try_acquire(me));
        assert!(!lease.try_acquire(dead()));
        lease.release(me);
        assert!(lease.try_acquire(dead()));
        assert!(lease.try_acquire(me));
        assert_eq!(lease.generation(), 3);
    }

    #[test]
    fn the_last_live_process_that_asked_comes_first() {
        let words = words();
        let lease = Lease::new(&words);
        let me = ProcessId::current();
        lease.want(me);
        assert!(lease.is_wanted_by_other(dead()));
        assert!(!lease.try_acquire(dead()));
        assert!(lease.try_acquire(me));
        lease.want(dead());
        assert!(!lease.is_wanted_by_other(me));
    }
}
