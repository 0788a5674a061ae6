//! The prefix cache: physical blocks, found by a chained hash of their tokens.
//!
//! It behaves like vLLM's block pool, as far as events tell: a block that nobody uses stays cached
//! in the free queue until it is taken for something else; a request's blocks are freed from its
//! tail; a hash may be held by several physical blocks, and each eviction tells of one.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

pub type BlockId = usize;

/// The engine's name for a block and everything before it.
pub type BlockKey = u64;

/// What the engine tells of its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Stored {
        keys: Vec<BlockKey>,
        parent: Option<BlockKey>,
        tokens: Vec<u32>,
        /// What is hashed besides the tokens, for each block: adapter, then salt.
        extra: Vec<Vec<String>>,
        lora: Option<String>,
    },
    Removed(BlockKey),
    Cleared,
}

#[derive(Default)]
struct Block {
    key: Option<BlockKey>,
    users: u32,
    /// Place in the free queue while nobody uses it.
    stamp: u64,
}

pub struct Cache {
    blocks: Vec<Block>,
    /// By the time of freeing: the first is taken first.
    free: BTreeMap<u64, BlockId>,
    cached: HashMap<BlockKey, Vec<BlockId>>,
    clock: u64,
    events: Vec<Event>,
}

impl Cache {
    /// One of the blocks is the null block of the engine and never used.
    pub fn new(blocks: usize) -> Cache {
        let mut cache = Cache {
            blocks: Vec::new(),
            free: BTreeMap::new(),
            cached: HashMap::new(),
            clock: 0,
            events: Vec::new(),
        };
        cache.blocks.resize_with(blocks.saturating_sub(1), Block::default);
        for id in 0..cache.blocks.len() {
            cache.enqueue(id);
        }
        cache
    }

    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn used(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    /// Distinct hashes that a prompt can hit.
    pub fn cached(&self) -> usize {
        self.cached.len()
    }

    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// The longest cached start of a chain, one block for each key.
    pub fn lookup(&self, keys: &[BlockKey]) -> Vec<BlockId> {
        keys.iter().map_while(|key| self.cached.get(key)?.first().copied()).collect()
    }

    /// Takes the hit blocks and `fresh` others, which may evict; None, and no change, where there
    /// are not enough.
    pub fn allocate(&mut self, hit: &[BlockId], fresh: usize) -> Option<Vec<BlockId>> {
        let idle = hit.iter().filter(|&&id| self.blocks[id].users == 0).count();
        if fresh + idle > self.free.len() {
            return None;
        }
        for &id in hit {
            let block = &mut self.blocks[id];
            if block.users == 0 {
                self.free.remove(&block.stamp);
            }
            block.users += 1;
        }
        let mut taken = Vec::with_capacity(fresh);
        while taken.len() < fresh {
            let (_, id) = self.free.pop_first()?;
            self.evict(id);
            self.blocks[id].users = 1;
            taken.push(id);
        }
        Some(taken)
    }

    /// Makes blocks that are now full findable and tells of it.
    pub fn store(&mut self, ids: &[BlockId], chain: &Chain, first: usize, tokens: &[u32]) {
        let keys = &chain.keys[first..first + ids.len()];
        for (&id, &key) in ids.iter().zip(keys) {
            self.blocks[id].key = Some(key);
            self.cached.entry(key).or_default().push(id);
        }
        self.events.push(Event::Stored {
            keys: keys.to_vec(),
            parent: first.checked_sub(1).map(|parent| chain.keys[parent]),
            tokens: tokens.to_vec(),
            extra: (first..first + ids.len()).map(|block| chain.extra(block)).collect(),
            lora: chain.lora.clone(),
        });
    }

    /// Gives back a request's blocks, the tail first, so that it is evicted first.
    pub fn release(&mut self, ids: &[BlockId]) {
        for &id in ids.iter().rev() {
            self.blocks[id].users -= 1;
            if self.blocks[id].users == 0 {
                self.enqueue(id);
            }
        }
    }

    /// Forgets all hashes; refused while a block is in use.
    pub fn clear(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        for block in &mut self.blocks {
            block.key = None;
        }
        self.cached.clear();
        self.events.push(Event::Cleared);
        true
    }

    fn enqueue(&mut self, id: BlockId) {
        self.clock += 1;
        self.blocks[id].stamp = self.clock;
        self.free.insert(self.clock, id);
    }

    fn evict(&mut self, id: BlockId) {
        let Some(key) = self.blocks[id].key.take() else { return };
        if let Some(holders) = self.cached.get_mut(&key) {
            holders.retain(|&holder| holder != id);
            if holders.is_empty() {
                self.cached.remove(&key);
            }
        }
        self.events.push(Event::Removed(key));
    }
}

/// The keys of one request's full blocks.
#[derive(Clone, Debug)]
pub struct Chain {
    pub keys: Vec<BlockKey>,
    block_size: usize,
    seed: u64,
    lora: Option<String>,
    salt: Option<String>,
}

impl Chain {
    /// `seed` makes the names of one engine mean nothing to another.
    pub fn new(block_size: usize, seed: u64, lora: Option<String>, salt: Option<String>) -> Chain {
        Chain { keys: Vec::new(), block_size, seed, lora, salt }
    }

    /// Adds the keys of the blocks that `tokens` fill by now.
    pub fn extend(&mut self, tokens: &[u32]) {
        let done = self.keys.len() * self.block_size;
        for block in tokens[done..].chunks_exact(self.block_size) {
            let mut hasher = DefaultHasher::new();
            self.seed.hash(&mut hasher);
            self.keys.last().hash(&mut hasher);
            block.hash(&mut hasher);
            self.extra(self.keys.len()).hash(&mut hasher);
            self.keys.push(hasher.finish());
        }
    }

    fn extra(&self, block: usize) -> Vec<String> {
        let salt = self.salt.as_ref().filter(|_| block == 0);
        self.lora.iter().chain(salt).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 4;

    fn chain(tokens: &[u32], salt: Option<&str>, lora: Option<&str>) -> Chain {
        let mut chain = Chain::new(SIZE, 7, lora.map(str::to_owned), salt.map(str::to_owned));
        chain.extend(tokens);
        chain
    }

    /// A request that comes, prefills all of its prompt and goes: the blocks it hit.
    fn serve(cache: &mut Cache, tokens: &[u32]) -> usize {
        let chain = chain(tokens, None, None);
        let hit = cache.lookup(&chain.keys[..(tokens.len() - 1) / SIZE]);
        let fresh = tokens.len().div_ceil(SIZE) - hit.len();
        let mut ids = hit.clone();
        ids.extend(cache.allocate(&hit, fresh).unwrap());
        let full = tokens.len() / SIZE;
        if full > hit.len() {
            let span = hit.len() * SIZE..full * SIZE;
            cache.store(&ids[hit.len()..full], &chain, hit.len(), &tokens[span]);
        }
        cache.release(&ids);
        hit.len()
    }

    #[test]
    fn a_repeated_prompt_hits_all_but_the_block_of_its_last_token() {
        let mut cache = Cache::new(9);
        let tokens: Vec<u32> = (0..12).collect();
        assert_eq!(serve(&mut cache, &tokens), 0);
        assert_eq!(serve(&mut cache, &tokens), 2);
        assert_eq!(serve(&mut cache, &tokens[..11]), 2);
        let longer: Vec<u32> = (0..13).collect();
        assert_eq!(serve(&mut cache, &longer), 3);
    }

    #[test]
    fn a_hash_stored_twice_is_removed_twice() {
        let mut cache = Cache::new(5);
        let tokens: Vec<u32> = (0..4).collect();
        serve(&mut cache, &tokens);
        serve(&mut cache, &tokens);
        let key = chain(&tokens, None, None).keys[0];
        let stored = |event: &Event| matches!(event, Event::Stored { keys, .. } if keys == &[key]);
        assert_eq!(cache.take_events().iter().filter(|event| stored(event)).count(), 2);
        // The free queue is [unused, unused, first copy, second copy].
        cache.allocate(&[], 3).unwrap();
        assert_eq!(cache.take_events(), [Event::Removed(key)]);
        assert_eq!(cache.lookup(&[key]).len(), 1);
        cache.allocate(&[], 1).unwrap();
        assert_eq!(cache.take_events(), [Event::Removed(key)]);
        assert_eq!(cache.lookup(&[key]).len(), 0);
    }

    #[test]
    fn the_tail_is_evicted_first_and_a_hit_is_kept() {
        let mut cache = Cache::new(4);
        let tokens: Vec<u32> = (0..12).collect();
        serve(&mut cache, &tokens);
        let keys = chain(&tokens, None, None).keys;
        cache.take_events();
        let hit = cache.lookup(&keys[..1]);
        cache.allocate(&hit, 1).unwrap();
        assert_eq!(cache.take_events(), [Event::Removed(keys[2])]);
        assert_eq!(cache.allocate(&[], 2), None, "one is in use, one was taken");
        assert!(cache.take_events().is_empty());
        assert_eq!(cache.lookup(&keys).len(), 2);
    }

    #[test]
    fn salt_marks_the_first_block_and_an_adapter_every_block() {
        let tokens: Vec<u32> = (0..8).collect();
        let plain = chain(&tokens, None, None);
        let both = chain(&tokens, Some("s"), Some("a"));
        assert_eq!(both.extra(0), ["a", "s"]);
        assert_eq!(both.extra(1), ["a"]);
        for other in [both, chain(&tokens, Some("s"), None), chain(&tokens, None, Some("a"))] {
            assert!(plain.keys.iter().all(|key| !other.keys.contains(key)));
        }
    }

    #[test]
    fn clearing_waits_until_nothing_is_in_use() {
        let mut cache = Cache::new(4);
        let tokens: Vec<u32> = (0..8).collect();
        serve(&mut cache, &tokens);
        let taken = cache.allocate(&[], 1).unwrap();
        assert!(!cache.clear());
        cache.release(&taken);
        cache.take_events();
        assert!(cache.clear());
        assert_eq!(cache.take_events(), [Event::Cleared]);
        assert_eq!(cache.cached(), 0);
    }
}
