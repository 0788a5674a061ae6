//! Which process, told apart from a later one with the same pid.

use std::fs;

const START_BITS: u32 = 42;

/// A process by pid and start time, in one word so that it can be compared and swapped.
///
/// Linux pids have at most 22 bits; the start time is in clock ticks since boot, of which 42 bits
/// last for centuries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId(u64);

impl ProcessId {
    /// The calling process. Asked after the fork: a worker is another process than its master.
    pub fn current() -> ProcessId {
        let pid = std::process::id();
        ProcessId::pack(pid, start_time(pid).unwrap_or(0))
    }

    /// The process that has this pid now.
    pub fn of(pid: u32) -> Option<ProcessId> {
        start_time(pid).map(|start| ProcessId::pack(pid, start))
    }

    pub fn pid(self) -> u32 {
        (self.0 >> START_BITS) as u32
    }

    /// Whether this very process still runs. A zombie does not: it will write nothing any more.
    pub fn is_alive(self) -> bool {
        start_time(self.pid()).is_some_and(|start| ProcessId::pack(self.pid(), start) == self)
    }

    fn pack(pid: u32, start: u64) -> ProcessId {
        ProcessId(u64::from(pid) << START_BITS | start & ((1 << START_BITS) - 1))
    }

    pub(crate) fn from_word(word: u64) -> Option<ProcessId> {
        (word != 0).then_some(ProcessId(word))
    }

    pub(crate) fn word(self) -> u64 {
        self.0
    }
}

/// Field 22 of `/proc/<pid>/stat`, see proc(5); `None` for a process that is gone or a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name in parentheses may hold blanks and parentheses itself.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calling_process_is_alive() {
        let me = ProcessId::current();
        assert_eq!(me.pid(), std::process::id());
        assert!(me.is_alive());
        assert_eq!(ProcessId::from_word(me.word()), Some(me));
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let me = ProcessId::current();
        assert!(!ProcessId(me.word() ^ 1).is_alive());
    }

    #[test]
    fn an_ended_process_is_dead_even_before_it_is_reaped() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        let born = start_time(pid).map(|start| ProcessId::pack(pid, start));
        while start_time(pid).is_some() {
            std::thread::yield_now();
        }
        assert!(born.is_none_or(|p| !p.is_alive()));
        child.wait().unwrap();
    }
}
