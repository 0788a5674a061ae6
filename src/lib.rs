//! KV-cache-aware load balancing for nginx.
//!
//! # The pipeline
//!
//! ```text
//! client body ──access phase──▶ prompt ──job thread──▶ token ids          (lookup::tokenize)
//!                                                         │
//!                                  balancer, peer.init ───┴─▶ overlap      (lookup::overlap)
//!                                                              │
//!                                    loads ─────────────▶ ranked servers   (select)
//!
//! engine ──ZMQ──▶ events (subscriber thread, one process) ──▶ index (shared zone, one writer)
//! ```
//!
//! # The modules
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`types`] | the words of the domain: token ids, hashes, servers, tiers, overlaps, skip reasons |
//! | [`prompt`] | request JSON → prompt → text → token ids, exactly as the engine makes them |
//! | [`remote`] | token ids from an engine, for models whose prompts are not made here |
//! | [`blocks`] | token ids → chained block hashes |
//! | [`shared`] | the map of the shared zone: header, writer lease, server rows, samples, index words |
//! | [`index`] | the prefix index in the zone: one writer, lock-free readers |
//! | [`events`] | engine events: wire format, sequence rules, the subscriber thread |
//! | [`load`] | in-flight and queued tokens, shared by all workers |
//! | [`trust`] | what engines report of prompts, against what was made and foretold |
//! | [`select`] | (overlap, loads) → ranked servers; pure |
//! | [`lookup`] | the two calls a request makes: body → tokens, tokens → overlap |
//! | `nginx` | everything that touches nginx; each callback makes one domain call |
//!
//! # The layer rule
//!
//! Arrows point down only: `nginx → {lookup, select, events, load}`, `lookup → {prompt, remote,
//! blocks, index}`, `prompt → remote`, `events → {blocks, index}`, all `→ {types, shared}`. Nothing
//! imports `nginx`. The domain forbids `unsafe`: shared memory reaches it as `&[AtomicU64]`, made
//! once in `src/nginx/zone.rs`.

pub mod blocks;
pub mod events;
pub mod index;
pub mod load;
pub mod lookup;
pub mod prompt;
pub mod remote;
pub mod select;
pub mod shared;
pub mod trust;
pub mod types;

#[cfg(feature = "nginx")]
mod nginx;
