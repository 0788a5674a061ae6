//! (overlap, loads) → servers ranked, best first. Pure.
//!
//! A selection is the whole order, not one server: a retry takes the next.
#![forbid(unsafe_code)]

use std::cmp::Ordering;

use crate::load::Load;
use crate::types::{Overlap, Tier};

/// Worth of a matched block by where it lies, for [`Policy::Weighted`].
const TIER_VALUE: [f64; Tier::COUNT] = [1.0, 0.7, 0.4, 0.2];

/// Time to bring a block in from a lower tier, as a part of the time to prefill it.
const TIER_LOAD: [f64; Tier::COUNT] = [0.0, 0.1, 0.3, 0.6];

/// Prefill tokens that one decoding request costs the next: a light touch, since a full decode
/// term loses locality.
const DECODE_TOKENS: f64 = 16.0;

/// α of the cost: how much more uncached prefill weighs than waiting, for it also keeps others
/// waiting; it grows with the backlog of the whole upstream.
const ALPHA: f64 = 2.0;
const ALPHA_PER_SECOND: f64 = 4.0;
const ALPHA_MOST: f64 = 10.0;

/// `kvc_aware_weights`, each 0..1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    pub cache: f64,
    pub tier: f64,
    pub load: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Weights { cache: 0.5, tier: 0.3, load: 0.2 }
    }
}

/// `kvc_aware_policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Policy {
    /// Expected time to first token.
    #[default]
    Cost,
    /// `cache × hit_ratio + tier × tier_score + load × load_score`.
    Weighted(Weights),
}

impl Policy {
    pub fn name(self) -> &'static str {
        match self {
            Policy::Cost => "cost",
            Policy::Weighted(_) => "weighted",
        }
    }
}

/// The prompt, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Prompt tokens; 0 when they are not known, and then only load counts.
    pub tokens: u32,
    /// Prefill speed of the upstream in tokens per second, 0 until learned.
    pub rate: f64,
}

/// One usable server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    pub overlap: Overlap,
    /// Tokens in a block of this server, 0 if not known; then it has no overlap either.
    pub block_size: u32,
    /// Whole blocks of the prompt that could have been matched.
    pub prompt_blocks: u32,
    pub load: Load,
    /// Milliseconds that the oldest queued prompt has been running.
    pub head_ms: u64,
    /// The server's `weight`, at least 1.
    pub weight: u32,
    /// Turn of this server among equals, lowest first; see [`next_turn`].
    pub turn: u64,
}

impl Candidate {
    pub fn matched_tokens(&self) -> u32 {
        self.overlap.blocks * self.block_size
    }

    fn hit_ratio(&self) -> f64 {
        match self.prompt_blocks {
            0 => 0.0,
            blocks => f64::from(self.overlap.blocks) / f64::from(blocks),
        }
    }

    /// Prefill work in tokens: the uncached ones, and the loading of lower tiers' blocks.
    fn work(&self, prompt_tokens: u32) -> f64 {
        let uncached = f64::from(prompt_tokens.saturating_sub(self.matched_tokens()));
        let load: f64 =
            self.overlap.tiers.iter().zip(TIER_LOAD).map(|(n, part)| f64::from(*n) * part).sum();
        uncached + load * f64::from(self.block_size)
    }

    fn busy(&self) -> f64 {
        f64::from(self.load.in_flight) / f64::from(self.weight.max(1))
    }
}

/// What a server's place in the order rests on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Terms {
    /// In seconds, or in tokens until the upstream's rate is known. The sum is the score.
    Cost { backlog: f64, prefill: f64, decode: f64 },
    /// Already weighted. The sum is the score.
    Weighted { cache: f64, tier: f64, load: f64 },
}

impl Terms {
    /// Lower is better for `cost`, higher for `weighted`.
    pub fn score(&self) -> f64 {
        match *self {
            Terms::Cost { backlog, prefill, decode } => backlog + prefill + decode,
            Terms::Weighted { cache, tier, load } => cache + tier + load,
        }
    }
}

/// A place in the order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranked {
    /// Index into the candidates.
    pub candidate: usize,
    pub terms: Terms,
}

/// Ranks all candidates, best first; the order is total, so equal inputs give equal orders.
pub fn rank(policy: Policy, demand: Demand, candidates: &[Candidate]) -> Vec<Ranked> {
    let mut ranked: Vec<Ranked> = match policy {
        Policy::Cost => cost_terms(demand, candidates),
        Policy::Weighted(weights) => {
            candidates.iter().map(|c| weighted_terms(weights, c)).collect()
        }
    }
    .into_iter()
    .enumerate()
    .map(|(candidate, terms)| Ranked { candidate, terms })
    .collect();

    let matched = candidates.iter().any(|c| c.overlap.blocks > 0);
    ranked.sort_by(|a, b| {
        let by_score = match policy {
            Policy::Cost => a.terms.score().total_cmp(&b.terms.score()),
            Policy::Weighted(_) if matched => b.terms.score().total_cmp(&a.terms.score()),
            // Nothing to weigh: least load.
            Policy::Weighted(_) => Ordering::Equal,
        };
        let (x, y) = (&candidates[a.candidate], &candidates[b.candidate]);
        by_score
            .then_with(|| x.busy().total_cmp(&y.busy()))
            .then_with(|| x.load.queued_tokens.cmp(&y.load.queued_tokens))
            .then_with(|| x.turn.cmp(&y.turn))
            .then_with(|| a.candidate.cmp(&b.candidate))
    });
    ranked
}

/// The turn that a server gets once picked: among servers that are equal otherwise the least
/// recently picked comes first, a server of weight 2 twice as often as one of weight 1.
/// `now` is the turn of the server that was picked last.
pub fn next_turn(turn: u64, now: u64, weight: u32) -> u64 {
    const STRIDE: u64 = 1 << 20;
    turn.max(now.saturating_sub(STRIDE)) + STRIDE / u64::from(weight.max(1))
}

fn cost_terms(demand: Demand, candidates: &[Candidate]) -> Vec<Terms> {
    // Without a rate a token counts as a second would: only the order matters.
    let rate = if demand.rate > 0.0 { demand.rate } else { 1.0 };
    let backlogs: Vec<f64> = candidates
        .iter()
        .map(|c| {
            let running = if demand.rate > 0.0 { c.head_ms as f64 / 1000.0 } else { 0.0 };
            let queued = c.load.queued_tokens as f64 / rate;
            (queued - running).max(0.0) / f64::from(c.weight.max(1))
        })
        .collect();
    let least = backlogs.iter().copied().fold(f64::INFINITY, f64::min);
    let alpha = match demand.rate > 0.0 && least.is_finite() {
        true => (ALPHA + ALPHA_PER_SECOND * least).min(ALPHA_MOST),
        false => ALPHA,
    };
    candidates
        .iter()
        .zip(backlogs)
        .map(|(c, backlog)| Terms::Cost {
            backlog,
            prefill: alpha * c.work(demand.tokens) / rate,
            decode: c.busy() * DECODE_TOKENS / rate,
        })
        .collect()
}

fn weighted_terms(weights: Weights, c: &Candidate) -> Terms {
    let hit_ratio = c.hit_ratio();
    let value: f64 =
        c.overlap.tiers.iter().zip(TIER_VALUE).map(|(n, value)| f64::from(*n) * value).sum();
    let mean = if c.overlap.blocks > 0 { value / f64::from(c.overlap.blocks) } else { 0.0 };
    Terms::Weighted {
        cache: weights.cache * hit_ratio,
        tier: weights.tier * mean * hit_ratio,
        load: weights.load / (1.0 + f64::from(c.load.in_flight)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(gpu: u32, cpu: u32, in_flight: u32, queued_tokens: u64) -> Candidate {
        Candidate {
            overlap: Overlap { blocks: gpu + cpu, tiers: [gpu, cpu, 0, 0] },
            block_size: 16,
            prompt_blocks: 100,
            load: Load { in_flight, queued_tokens },
            head_ms: 0,
            weight: 1,
            turn: 0,
        }
    }

    fn order(policy: Policy, demand: Demand, candidates: &[Candidate]) -> Vec<usize> {
        rank(policy, demand, candidates).iter().map(|r| r.candidate).collect()
    }

    const WEIGHTED: Policy = Policy::Weighted(Weights { cache: 0.5, tier: 0.3, load: 0.2 });
    const PROMPT: Demand = Demand { tokens: 1616, rate: 0.0 };

    #[test]
    fn weighted_is_the_documented_sum() {
        let all = [candidate(80, 20, 1, 0), candidate(50, 0, 0, 0)];
        let ranked = rank(WEIGHTED, PROMPT, &all);
        assert_eq!(ranked[0].candidate, 0);
        let Terms::Weighted { cache, tier, load } = ranked[0].terms else { panic!() };
        assert!((cache - 0.5).abs() < 1e-12);
        assert!((tier - 0.3 * 0.94).abs() < 1e-12);
        assert!((load - 0.1).abs() < 1e-12);
        assert!((ranked[1].terms.score() - (0.25 + 0.15 + 0.2)).abs() < 1e-12);
    }

    #[test]
    fn weighted_without_a_match_is_least_load() {
        let mut all = [candidate(0, 0, 3, 0), candidate(0, 0, 2, 0), candidate(0, 0, 4, 0)];
        assert_eq!(order(WEIGHTED, PROMPT, &all), [1, 0, 2]);
        all[2].weight = 4;
        assert_eq!(order(WEIGHTED, PROMPT, &all), [2, 1, 0]);
    }

    #[test]
    fn cost_without_a_rate_is_queued_plus_twice_the_uncached_tokens() {
        let all = [candidate(100, 0, 0, 5000), candidate(0, 0, 0, 0)];
        let ranked = rank(Policy::Cost, PROMPT, &all);
        assert_eq!(ranked[0].candidate, 1);
        assert_eq!(ranked[0].terms.score(), 2.0 * 1616.0);
        assert_eq!(ranked[1].terms.score(), 5000.0 + 2.0 * 16.0);
    }

    #[test]
    fn cost_with_a_rate_lets_the_backlog_decay_and_alpha_grow() {
        let demand = Demand { tokens: 1616, rate: 1000.0 };
        let mut busy = candidate(0, 0, 0, 3000);
        busy.head_ms = 1000;
        let mut busier = candidate(100, 0, 0, 9000);
        busier.weight = 2;
        let ranked = rank(Policy::Cost, demand, &[busy, busier]);
        // The least backlog is 2 s, so alpha is 2 + 4 * 2 = 10, as far as it goes.
        let Terms::Cost { backlog, prefill, .. } = ranked[1].terms else { panic!() };
        assert_eq!(ranked[0].candidate, 1);
        assert!((backlog - 2.0).abs() < 1e-9);
        assert!((prefill - 16.16).abs() < 1e-9);
        let Terms::Cost { backlog, prefill, .. } = ranked[0].terms else { panic!() };
        assert!((backlog - 4.5).abs() < 1e-9);
        assert!((prefill - 0.16).abs() < 1e-9);
    }

    #[test]
    fn blocks_of_a_lower_tier_cost_their_load_time() {
        let all = [candidate(0, 100, 0, 0), candidate(100, 0, 0, 0), candidate(90, 0, 0, 0)];
        assert_eq!(order(Policy::Cost, PROMPT, &all), [1, 0, 2]);
    }

    #[test]
    fn equals_take_turns_by_weight() {
        let mut all = [candidate(0, 0, 0, 0), candidate(0, 0, 0, 0), candidate(0, 0, 0, 0)];
        all[1].weight = 2;
        let mut now = 0;
        let mut picked = [0; 3];
        for _ in 0..400 {
            let first = rank(Policy::Cost, PROMPT, &all)[0].candidate;
            picked[first] += 1;
            let before = all[first].turn;
            all[first].turn = next_turn(before, now, all[first].weight);
            now = now.max(before);
        }
        assert_eq!(picked, [100, 200, 100]);
    }

    #[test]
    fn a_newcomer_does_not_get_every_turn() {
        let mut all = [candidate(0, 0, 0, 0), candidate(0, 0, 0, 0)];
        all[0].turn = 1 << 40;
        let mut now = 1 << 40;
        let mut picked = [0; 2];
        for _ in 0..100 {
            let first = rank(Policy::Cost, PROMPT, &all)[0].candidate;
            picked[first] += 1;
            let before = all[first].turn;
            all[first].turn = next_turn(before, now, 1);
            now = now.max(before);
        }
        assert!(picked[0] >= 49, "{picked:?}");
    }

    proptest! {
        /// The order is a permutation, sorted by score, and a better server never ranks lower:
        /// more overlap at equal load, or less load at equal overlap.
        #[test]
        fn dominance(
            rows in prop::collection::vec((0u32..50, 0u32..50, 0u32..20, 0u64..50_000, 1u32..4), 1..12),
            rate in prop_oneof![Just(0.0), 100.0..20_000.0f64],
            weighted in any::<bool>(),
        ) {
            let all: Vec<Candidate> = rows.iter().map(|&(gpu, cpu, in_flight, queued, weight)| {
                Candidate { weight, ..candidate(gpu, cpu, in_flight, queued) }
            }).collect();
            let policy = if weighted { WEIGHTED } else { Policy::Cost };
            let demand = Demand { tokens: 1616, rate };
            let ranked = rank(policy, demand, &all);
            let mut seen: Vec<usize> = ranked.iter().map(|r| r.candidate).collect();
            let position = seen.clone();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..all.len()).collect::<Vec<_>>());
            let place = |i: usize| position.iter().position(|&p| p == i);
            for (i, a) in all.iter().enumerate() {
                for (j, b) in all.iter().enumerate() {
                    let same_load = a.load == b.load && a.weight == b.weight;
                    if same_load && a.overlap.tiers[1] == b.overlap.tiers[1]
                        && a.overlap.tiers[0] > b.overlap.tiers[0] {
                        prop_assert!(place(i) < place(j));
                    }
                    if a.overlap == b.overlap && a.weight == b.weight
                        && a.load.in_flight < b.load.in_flight
                        && a.load.queued_tokens <= b.load.queued_tokens {
                        prop_assert!(place(i) < place(j));
                    }
                }
            }
        }
    }
}
