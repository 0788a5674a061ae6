//! The arguments of [`crate::index::seqlock`], numbered as there, in every interleaving.
#![forbid(unsafe_code)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::index::seqlock::{Word, enter, leave, publish, read, same};

impl Word for AtomicU64 {
    fn get(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn set(&self, value: u64) {
        self.store(value, Ordering::Release);
    }
}

/// A run of one word.
struct Run {
    sequence: AtomicU64,
    data: AtomicU64,
}

impl Run {
    fn new(data: u64) -> Run {
        Run { sequence: AtomicU64::new(0), data: AtomicU64::new(data) }
    }

    fn change(&self, change: impl FnOnce()) {
        enter(&self.sequence);
        change();
        leave(&self.sequence);
    }

    fn set(&self, data: u64) {
        self.change(|| self.data.set(data));
    }
}

/// Runs `write` and `read` against each other.
fn model<T: Send + Sync + 'static>(
    make: impl Fn() -> T + Send + Sync + 'static,
    write: impl Fn(&T) + Send + Sync + Copy + 'static,
    look: impl Fn(&T) + Send + Sync + 'static,
) {
    loom::model(move || {
        let state = Arc::new(make());
        let writer = {
            let state = Arc::clone(&state);
            thread::spawn(move || write(&state))
        };
        look(&state);
        writer.join().unwrap();
    });
}

#[test]
fn case_1_no_half_change() {
    model(
        || (Run::new(0), AtomicU64::new(0)),
        |(run, more)| {
            for value in 1..3 {
                run.change(|| {
                    run.data.set(value);
                    more.set(value);
                });
            }
        },
        |(run, more)| {
            let Some(number) = read(&run.sequence) else { return };
            let seen = (run.data.get(), more.get());
            if same(&run.sequence, number) {
                assert_eq!(seen.0, seen.1);
            }
        },
    );
}

/// A slot goes from one run to another hash in another run, and back to the first hash there.
#[test]
fn case_2_a_slot_is_reused() {
    model(
        || {
            let slot = (AtomicU64::new(7), AtomicU64::new(0));
            (slot, [Run::new(7), Run::new(0)])
        },
        |((key, place), runs)| {
            runs[0].change(|| {
                key.set(0);
                runs[0].data.set(0);
            });
            runs[1].change(|| {
                publish(key, place, 8, 1);
                runs[1].data.set(8);
            });
            runs[1].change(|| {
                key.set(0);
                publish(key, place, 7, 1);
                runs[1].data.set(7);
            });
        },
        |((key, place), runs)| {
            if key.get() != 7 {
                return;
            }
            let at = place.get();
            let run = &runs[at as usize];
            let Some(number) = read(&run.sequence) else { return };
            let here = key.get() == 7 && place.get() == at;
            let data = run.data.get();
            if here && same(&run.sequence, number) {
                assert_eq!(data, 7);
            }
        },
    );
}

/// A child and then its parent are freed, and the parent's cell becomes something else.
#[test]
fn cases_3_and_4_a_parent_is_freed() {
    const FREED: u64 = 9;
    model(
        || (Run::new(1), Run::new(5)),
        |(child, parent)| {
            child.set(FREED);
            parent.set(FREED);
            // A chunk of another run: its section is not this cell's.
            parent.data.set(4);
        },
        |(child, parent)| {
            let Some(first) = read(&child.sequence) else { return };
            if child.data.get() == FREED {
                return;
            }
            let Some(second) = read(&parent.sequence) else { return };
            let data = parent.data.get();
            if same(&child.sequence, first) && same(&parent.sequence, second) {
                assert_eq!(data, 5);
            }
        },
    );
}

#[test]
fn case_5_one_state_for_two_runs() {
    model(
        || [Run::new(0), Run::new(0)],
        |runs| {
            runs[0].set(1);
            runs[1].set(1);
            runs[0].set(2);
        },
        |runs| {
            let Some(second) = read(&runs[1].sequence) else { return };
            let Some(first) = read(&runs[0].sequence) else { return };
            let seen = (runs[0].data.get(), runs[1].data.get());
            if same(&runs[1].sequence, second) && same(&runs[0].sequence, first) {
                assert!([(0, 0), (1, 0), (1, 1), (2, 1)].contains(&seen), "{seen:?}");
            }
        },
    );
}

/// The deepest block's run grows by a block while it is looked at: if the next block was absent
/// after all was read, nobody is credited with it.
#[test]
fn case_5_the_block_after_the_deepest() {
    model(
        || (Run::new(1), AtomicU64::new(0)),
        |(run, next)| {
            run.change(|| {
                next.set(1);
                run.data.set(2);
            });
        },
        |(run, next)| {
            let Some(number) = read(&run.sequence) else { return };
            let held = run.data.get();
            let absent = next.get() == 0;
            if same(&run.sequence, number) {
                assert_eq!(absent, held == 1);
            }
        },
    );
}

/// A key lies in the second line; others come and go that passed the first, too.
#[test]
fn case_6_a_probe_misses_nothing() {
    model(
        || (AtomicU64::new(1), [AtomicU64::new(7), AtomicU64::new(0)]),
        |(passed, line)| {
            passed.set(2);
            line[1].set(8);
            line[1].set(0);
            passed.set(1);
        },
        |(passed, line)| {
            let found = passed.get() != 0 && line.iter().any(|key| key.get() == 7);
            assert!(found);
        },
    );
}
