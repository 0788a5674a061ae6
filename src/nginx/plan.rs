//! The servers of an upstream, ranked for one request.

use super::conf::UpstreamConf;
use super::peers::{self, Locked, Peer, Peers};
use super::process::{self, Process};
use crate::load::{self, Load, Rows};
use crate::lookup::{self, Match};
use crate::prompt::Tokens;
use crate::select::{Candidate, Demand, Ranked, rank};
use crate::shared::{ServerField, UpstreamField};
use crate::types::{ServerId, Skip};

/// One primary server of an upstream, or one rank of it.
pub struct Seat {
    /// Only to be followed under the lock of its list.
    pub peer: *mut Peer,
    /// Its bit in nginx's map of tried servers.
    pub index: usize,
    pub id: ServerId,
    /// Its data-parallel rank, and how many there are at its address.
    pub rank: u32,
    pub ranks: u32,
    pub usable: bool,
    pub weight: u32,
    pub load: Load,
    pub found: Match,
}

impl Seat {
    /// Its rank, where there are several.
    pub fn rank(&self) -> Option<u32> {
        Some(self.rank).filter(|_| self.ranks > 1)
    }
}

pub struct Plan {
    pub seats: Vec<Seat>,
    /// The usable ones, best first; `candidate` counts in `seats`.
    pub ranked: Vec<Ranked>,
    /// Load alone decides `ranked`.
    shadow: bool,
    /// In shadow mode the seat that would have come first.
    pub shadowed: Option<usize>,
    pub demand: Demand,
    /// Choices that were made in the upstream before this order.
    pub choices: u64,
    /// The index could not be read.
    pub busy: bool,
}

/// Ranks the primary servers that are usable and not among `tried`; in `shadow` mode by load alone.
///
/// # Safety
/// `peers` is the upstream's list, live and not locked by the caller.
pub unsafe fn make(
    process: &Process,
    conf: &UpstreamConf,
    peers: *mut Peers,
    prompt: Option<&Tokens>,
    tried: &[ServerId],
    shadow: bool,
) -> Plan {
    let upstream = process.upstream(&conf.name);
    let choices = upstream.map_or(0, |row| row.get(UpstreamField::Choices));
    // SAFETY: the caller's.
    let mut seats = unsafe { seats(process, conf, peers, tried) };
    let ids: Vec<ServerId> = seats.iter().map(|seat| seat.id).collect();
    let mut scratch = process.scratch.borrow_mut();
    let overlap = |prompt: Option<&Tokens>, scratch: &mut _| {
        let prompt = prompt.map(|tokens| (tokens, process.key(tokens.model)));
        lookup::overlap(process.zone, &process.index, prompt, &ids, scratch)
    };
    let (found, busy) = match overlap(prompt, &mut scratch) {
        Ok(found) => (found, false),
        Err(Skip::IndexBusy) | Err(_) => (overlap(None, &mut scratch).unwrap_or_default(), true),
    };
    for (seat, found) in seats.iter_mut().zip(found) {
        seat.found = found;
    }
    let tokens = prompt.filter(|_| !busy).map_or(0, |tokens| tokens.ids.len() as u32);
    let demand = Demand { tokens, rate: upstream.map_or(0.0, |row| load::rate(&row)) };
    let mut plan =
        Plan { seats, ranked: Vec::new(), shadow, shadowed: None, demand, choices, busy };
    plan.order(process, conf);
    plan
}

impl Plan {
    /// Ranks the same servers by what they have to do now.
    pub fn rank_again(&mut self, process: &Process, conf: &UpstreamConf) {
        self.choices =
            process.upstream(&conf.name).map_or(0, |row| row.get(UpstreamField::Choices));
        let rows = Rows::held(process.zone);
        for seat in &mut self.seats {
            seat.load = rows.load(seat.id);
        }
        self.order(process, conf);
    }

    fn order(&mut self, process: &Process, conf: &UpstreamConf) {
        self.ranked = order(process, conf, self.demand, &self.seats, |found| *found);
        if self.shadow {
            self.shadowed = self.ranked.first().map(|place| place.candidate);
            let demand = Demand { tokens: 0, ..self.demand };
            self.ranked = order(process, conf, demand, &self.seats, |_| Match::default());
        }
    }
}

/// A seat for each rank of each peer.
unsafe fn seats(
    process: &Process,
    conf: &UpstreamConf,
    peers: *mut Peers,
    tried: &[ServerId],
) -> Vec<Seat> {
    let rows = Rows::held(process.zone);
    let mut seats = Vec::new();
    // SAFETY: the caller's; the lock is held while the peers are looked at.
    unsafe {
        let _lock = Locked::read(peers);
        for (index, peer) in peers::each(peers) {
            let seen = &*peer;
            let ids = process.servers(conf, seen.name.as_bytes());
            for (rank, id) in (0..).zip(ids.iter()) {
                seats.push(Seat {
                    peer,
                    index,
                    id: *id,
                    rank,
                    ranks: ids.len() as u32,
                    usable: peers::usable(seen) && !tried.contains(id),
                    weight: seen.weight.max(1) as u32,
                    load: rows.load(*id),
                    found: Match::default(),
                });
            }
        }
    }
    seats
}

/// Ranks the usable seats by their load and by what `credit` makes of what they hold.
fn order(
    process: &Process,
    conf: &UpstreamConf,
    demand: Demand,
    seats: &[Seat],
    credit: impl Fn(&Match) -> Match,
) -> Vec<Ranked> {
    let now = process::now_ms();
    let usable: Vec<usize> = (0..seats.len()).filter(|at| seats[*at].usable).collect();
    let candidates: Vec<Candidate> = usable
        .iter()
        .map(|at| {
            let seat = &seats[*at];
            let (row, found) = (process.zone.server(seat.id), credit(&seat.found));
            Candidate {
                overlap: found.overlap,
                block_size: found.block_size,
                prompt_blocks: found.prompt_blocks,
                load: seat.load,
                head_ms: now.saturating_sub(row.get(ServerField::HeadSinceMs)),
                weight: seat.weight,
                turn: row.get(ServerField::Turn),
            }
        })
        .collect();
    let mut ranked = rank(conf.policy(), demand, &candidates);
    for place in &mut ranked {
        place.candidate = usable[place.candidate];
    }
    ranked
}
