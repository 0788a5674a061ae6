//! What is answered to a prompt: made-up words, the same for the same prompt on every engine.
//!
//! The ids are those that the tokenizer gives for the text, so that a session that goes on with the
//! answer in its history hits the blocks that were decoded.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::tokenizer::Tokenizer;

pub const WORDS: &[&str] = &[
    "the", "engine", "keeps", "what", "it", "has", "seen", "and", "answers", "with", "words",
    "that", "mean", "nothing", "at", "all", "only", "length", "matters", "here", "so", "read",
    "on", "no", "further", "than", "this", "line", "because", "next", "one", "says", "same",
    "again", "in", "another", "order", "which", "is", "enough", "for", "a", "test", "of", "cache",
];

pub struct Answer {
    pub text: String,
    pub ids: Vec<u32>,
}

impl Answer {
    /// At most `limit` tokens, at least one.
    pub fn new(tokenizer: &Tokenizer, prompt: &[u32], limit: usize, leading_space: bool) -> Answer {
        let mut hasher = DefaultHasher::new();
        prompt.hash(&mut hasher);
        let mut state = hasher.finish() | 1;
        let mut words = Vec::new();
        let mut left = limit;
        while words.len() < limit {
            // xorshift64: never 0 once it is not 0.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let word = WORDS[(state >> 33) as usize % WORDS.len()];
            let cost = tokenizer.word_cost(word);
            if cost > left {
                break;
            }
            left -= cost;
            words.push(word);
        }
        let mut text = words.join(" ");
        if leading_space && !text.is_empty() {
            text.insert(0, ' ');
        }
        let mut ids = tokenizer.text(&text);
        ids.truncate(limit);
        if ids.is_empty() {
            // A limit below any word: one token, which the text does not show.
            ids = tokenizer.text("a");
            ids.truncate(1);
            text = "a".to_owned();
        }
        Answer { text, ids }
    }

    /// The part of the text that token `at` adds; all parts together are the text.
    pub fn piece(&self, at: usize) -> &str {
        // The words are ASCII, so every cut is a character's border.
        let cut = |at: usize| self.text.len() * at / self.ids.len().max(1);
        self.text.get(cut(at)..cut(at + 1)).unwrap_or_default()
    }
}
