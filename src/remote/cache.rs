//! Prompts that were asked for: bounded in number and in tokens, the least recently used go first.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Api;
use crate::types::TokenId;

const MAX_ENTRIES: usize = 4096;

/// Of all entries together: 16 MB.
const MAX_TOKENS: usize = 4 << 20;

/// Some prompts hold today's date, and an engine may be started anew with another template.
const LIFETIME: Duration = Duration::from_secs(60);

/// 128 bits, keyed at random: nobody outside can make two requests with one digest.
pub type Digest = (u64, u64);

/// The keys of digests, apart from the cache: a long body is not to be hashed under its lock.
#[derive(Default)]
pub struct Digests(RandomState, RandomState);

impl Digests {
    pub fn of(&self, model: usize, api: Api, body: &[u8]) -> Digest {
        let what = (model, api.render, body);
        (self.0.hash_one(what), self.1.hash_one(what))
    }
}

struct Entry {
    ids: Arc<[TokenId]>,
    since: Instant,
    /// When it was used last, in `order`.
    turn: u64,
}

#[derive(Default)]
pub struct Cache {
    entries: HashMap<Digest, Entry>,
    order: BTreeMap<u64, Digest>,
    turn: u64,
    tokens: usize,
}

impl Cache {
    pub fn get(&mut self, digest: Digest, now: Instant) -> Option<Arc<[TokenId]>> {
        let entry = self.entries.get_mut(&digest)?;
        if now.duration_since(entry.since) >= LIFETIME {
            self.remove(digest);
            return None;
        }
        self.turn += 1;
        self.order.remove(&entry.turn);
        self.order.insert(self.turn, digest);
        entry.turn = self.turn;
        Some(entry.ids.clone())
    }

    pub fn put(&mut self, digest: Digest, ids: Arc<[TokenId]>, now: Instant) {
        self.remove(digest);
        if ids.len() > MAX_TOKENS {
            return;
        }
        self.turn += 1;
        self.tokens += ids.len();
        self.order.insert(self.turn, digest);
        self.entries.insert(digest, Entry { ids, since: now, turn: self.turn });
        while self.entries.len() > MAX_ENTRIES || self.tokens > MAX_TOKENS {
            let Some((_, oldest)) = self.order.first_key_value() else { break };
            self.remove(*oldest);
        }
    }

    fn remove(&mut self, digest: Digest) {
        if let Some(entry) = self.entries.remove(&digest) {
            self.order.remove(&entry.turn);
            self.tokens -= entry.ids.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(count: usize) -> Arc<[TokenId]> {
        vec![7; count].into()
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        for at in 0..MAX_ENTRIES as u64 {
            cache.put((at, 0), ids(1), now);
        }
        assert!(cache.get((0, 0), now).is_some());
        cache.put((9, 9), ids(1), now);
        assert!(cache.get((1, 0), now).is_none());
        assert!(cache.get((0, 0), now).is_some() && cache.get((9, 9), now).is_some());
        assert_eq!((cache.entries.len(), cache.order.len()), (MAX_ENTRIES, MAX_ENTRIES));
    }

    #[test]
    fn tokens_are_bounded_too() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        cache.put((1, 0), ids(MAX_TOKENS / 2), now);
        cache.put((2, 0), ids(MAX_TOKENS / 2), now);
        cache.put((2, 0), ids(MAX_TOKENS / 2), now);
        assert!(cache.get((1, 0), now).is_some(), "a prompt put again counts once");
        cache.put((3, 0), ids(1), now);
        assert!(cache.get((2, 0), now).is_none());
        assert!(cache.get((1, 0), now).is_some() && cache.get((3, 0), now).is_some());
        assert_eq!(cache.tokens, MAX_TOKENS / 2 + 1);
        cache.put((4, 0), ids(MAX_TOKENS + 1), now);
        assert!(cache.get((4, 0), now).is_none() && cache.get((1, 0), now).is_some());
    }

    #[test]
    fn an_entry_has_its_time() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        cache.put((1, 0), ids(1), now);
        assert!(cache.get((1, 0), now + LIFETIME - Duration::from_millis(1)).is_some());
        assert!(cache.get((1, 0), now + LIFETIME).is_none());
        assert_eq!((cache.entries.len(), cache.order.len(), cache.tokens), (0, 0, 0));
    }

    #[test]
    fn a_digest_is_of_model_api_and_body() {
        let digests = Digests::default();
        let api = |render| Api { render, tokenize: true };
        let digest = digests.of(1, api("/a"), b"x");
        assert_eq!(digest, digests.of(1, api("/a"), b"x"));
        for other in [(2, "/a", "x"), (1, "/b", "x"), (1, "/a", "y")] {
            assert_ne!(digest, digests.of(other.0, api(other.1), other.2.as_bytes()));
        }
        assert_ne!(digest.0, digest.1);
    }
}
