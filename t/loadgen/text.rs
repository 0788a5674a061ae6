//! Seeded randomness and text that reads like text to a tokenizer.

const WORDS: &[&str] = &[
    "time", "server", "weather", "London", "list", "of", "the", "a", "and", "with", "please",
    "table", "number", "report", "customer", "order", "cannot", "which", "find", "write",
    "function", "error", "value", "name", "when", "where", "between", "system", "data", "answer",
    "question", "short", "long", "under", "over", "policy", "refund", "contract", "page", "line",
    "code", "return",
];

/// SplitMix64: one seed, one sequence, everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Independent for each pair of a seed and a stream.
    pub fn new(seed: u64, stream: u64) -> Random {
        let mut mixed = Random(seed);
        let start = mixed.next() ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03);
        Random(start)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// In 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn text(&mut self, words: usize) -> String {
        let mut text = String::new();
        for at in 0..words {
            if at > 0 {
                text.push_str(if at % 13 == 0 { ". " } else { " " });
            }
            text.push_str(WORDS[self.below(WORDS.len())]);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_and_a_stream_give_one_text() {
        let text = |seed, stream| Random::new(seed, stream).text(50);
        assert_eq!(text(1, 2), text(1, 2));
        assert_ne!(text(1, 2), text(2, 2));
        assert_ne!(text(1, 2), text(1, 3));
        assert_eq!(text(1, 2).split(' ').count(), 50);
    }
}
