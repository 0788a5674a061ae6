//! Token ids → chained block hashes: our own keyed hash, the same for every engine and version.
//!
//! A block's hash covers its tokens, everything before them, the block size, the LoRA name and the
//! extra keys that the engine puts into its own hash. The key is random per zone, so that nobody
//! outside can construct two prompts whose blocks collide.
#![forbid(unsafe_code)]

use crate::types::{BlockHash, TokenId};

/// The zone's random key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HashKey(pub [u64; 2]);

/// What an engine hashes into a block besides its tokens; the LoRA name is in [`root`] instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra<'a> {
    /// `cache_salt`, block 0 only.
    Salt(&'a str),
    /// A multimodal item and where in the block it starts; may be negative.
    Media { hash: &'a str, offset: i64 },
    /// Digest of prompt embeddings.
    Embeds(&'a [u8]),
}

// Odd constants with 32 set bits each; the key is mixed into each of them.
const LANES: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xa24b_aed4_963e_e407, 0x8cb9_2ba7_2f3d_8dd7];

/// 64 × 64 → 128 bits, both halves folded. The operands are xored in again, so that a zero on one
/// side does not erase the other.
#[inline(always)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64 ^ a).wrapping_add((product >> 64) as u64 ^ b)
}

#[inline(always)]
fn pair(tokens: &[TokenId], at: usize) -> u64 {
    u64::from(tokens[at]) | u64::from(tokens[at + 1]) << 32
}

impl HashKey {
    fn bytes(&self, seed: u64, bytes: &[u8]) -> u64 {
        let mut hash = fold(seed ^ self.0[0], bytes.len() as u64 ^ LANES[0] ^ self.0[1]);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            hash =
                fold(hash ^ self.0[0] ^ LANES[1], u64::from_le_bytes(word) ^ self.0[1] ^ LANES[2]);
        }
        hash
    }

    fn extra(&self, seed: u64, extra: &Extra<'_>) -> u64 {
        match extra {
            Extra::Salt(salt) => self.bytes(seed ^ 1, salt.as_bytes()),
            Extra::Media { hash, offset } => {
                self.bytes(fold(seed ^ 2, *offset as u64 ^ LANES[3] ^ self.0[0]), hash.as_bytes())
            }
            Extra::Embeds(digest) => self.bytes(seed ^ 3, digest),
        }
    }
}

/// Hash 0 means "none" in the index.
fn never_zero(hash: u64) -> BlockHash {
    BlockHash(if hash == 0 { LANES[0] } else { hash })
}

/// The start of a chain: the parent of a prompt's first block.
pub fn root(key: &HashKey, block_size: u32, lora: Option<&str>) -> BlockHash {
    let start = fold(u64::from(block_size) ^ key.0[0] ^ LANES[2], key.0[1] ^ LANES[3]);
    never_zero(match lora {
        None => start,
        Some(name) => key.bytes(!start, name.as_bytes()),
    })
}

/// The hash of the block of `tokens` that follows `parent`. `extra` is empty for plain text; its
/// order matters.
#[inline]
pub fn child(
    key: &HashKey,
    parent: BlockHash,
    tokens: &[TokenId],
    extra: &[Extra<'_>],
) -> BlockHash {
    let [k0, k1] = key.0;
    let mut hash = parent.0 ^ k0;
    for item in extra {
        hash = key.extra(hash, item);
    }
    // Four independent multiplications for 16 tokens, then one for the chain: short latency.
    let mut stretches = tokens.chunks_exact(16);
    for stretch in &mut stretches {
        let a = fold(pair(stretch, 0) ^ k0 ^ LANES[0], pair(stretch, 2) ^ k1 ^ LANES[1]);
        let b = fold(pair(stretch, 4) ^ k0 ^ LANES[1], pair(stretch, 6) ^ k1 ^ LANES[2]);
        let c = fold(pair(stretch, 8) ^ k0 ^ LANES[2], pair(stretch, 10) ^ k1 ^ LANES[3]);
        let d = fold(pair(stretch, 12) ^ k0 ^ LANES[3], pair(stretch, 14) ^ k1 ^ LANES[0]);
        let left = a.wrapping_add(b.rotate_left(29));
        let right = c.wrapping_add(d.rotate_left(29));
        hash = fold(hash ^ left, right ^ hash.rotate_left(32) ^ k1);
    }
    for rest in stretches.remainder().chunks(4) {
        let mut four = [0; 4];
        four[..rest.len()].copy_from_slice(rest);
        let word = fold(pair(&four, 0) ^ k0 ^ LANES[0], pair(&four, 2) ^ k1 ^ LANES[1]);
        hash = fold(hash ^ word, hash.rotate_left(32) ^ LANES[2] ^ k1);
    }
    never_zero(fold(hash ^ tokens.len() as u64, LANES[3] ^ k1))
}

/// The hashes of the blocks of a prompt that can be credited: floor((tokens - 1) / block_size), as
/// in the engine, which always computes the last token itself. Replaces what `out` holds.
/// `block_size` 0 gives none.
pub fn hash_prompt(
    key: &HashKey,
    block_size: u32,
    lora: Option<&str>,
    salt: Option<&str>,
    tokens: &[TokenId],
    out: &mut Vec<BlockHash>,
) {
    let reused = &tokens[..tokens.len().saturating_sub(1)];
    hash_whole(key, block_size, lora, salt, reused, out);
}

/// The hashes of all whole blocks of a prompt: what is cached once it is computed. Replaces what
/// `out` holds. `block_size` 0 gives none.
pub fn hash_whole(
    key: &HashKey,
    block_size: u32,
    lora: Option<&str>,
    salt: Option<&str>,
    tokens: &[TokenId],
    out: &mut Vec<BlockHash>,
) {
    out.clear();
    let size = block_size as usize;
    let Some(blocks) = tokens.len().checked_div(size) else { return };
    out.reserve(blocks);
    let mut parent = root(key, block_size, lora);
    let first = salt.map(Extra::Salt);
    for (index, block) in tokens.chunks_exact(size).enumerate() {
        let extra = if index == 0 { first.as_slice() } else { &[] };
        parent = child(key, parent, block, extra);
        out.push(parent);
    }
}
