//! Everything that touches nginx.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `module` | the module tables that nginx reads from the loaded file |
//! | `directives` | the directive table: the parser and README are held against it |
//! | `conf` | what the configuration comes to: main, upstream and location |
//! | `setters` | one function for each directive |
//! | `setup` | what is checked and hooked once the configuration is read |
//! | `zone` | the shared zone as words |
//! | `process` | what a worker holds, from init_process to exit_process |
//! | `context` | one request's state, found again after an internal redirect |
//! | `body` | the client body, in memory or in a file |
//! | `jobs` | tokenizer threads and the way back to the event loop |
//! | `askers` | threads that ask engines for the tokens of remote models |
//! | `access` | the access phase handler |
//! | `plan` | the servers of an upstream, ranked for one request |
//! | `balancer` | peer.init, get and free |
//! | `choice` | one request's choice: the servers in order, the first reserved |
//! | `booking` | what a choice changes: loads, counters, what is learned and looked out for |
//! | `peers` | nginx's own peers: iteration, locks, usability |
//! | `flag` | flags of other modules' locations |
//! | `filter` | what an answer tells: its first token, the usage report |
//! | `following` | whose events are followed: the peers as they are now |
//! | `variables` | `$kvc_aware_*` |
//! | `index_page`, `explain` | `kvc_aware_index` |
//! | `log` | one macro for all log lines |

mod access;
mod askers;
mod balancer;
mod body;
mod booking;
mod choice;
mod conf;
mod context;
mod directives;
mod explain;
mod filter;
mod flag;
mod following;
mod index_page;
mod jobs;
mod log;
mod module;
mod peers;
mod plan;
mod process;
mod setters;
mod setup;
mod variables;
mod zone;

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs what a callback does; a panic ends there, for one that leaves `extern "C"` would end the
/// worker with all its requests.
fn guard<T>(fallback: T, callback: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(callback)).unwrap_or_else(|_| {
        process::panicked();
        fallback
    })
}
