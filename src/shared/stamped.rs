//! A row of words that one process changes while others read it.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Changes a row. Only the holder of the lease calls this.
///
/// The row's first word is its stamp, odd while the row changes, as in a seqlock: the release fence
/// keeps the row's stores behind the odd stamp, the last store's release keeps them before the
/// even one. A writer that died in between leaves an odd stamp, which the next change passes on.
pub(super) fn write(row: &[AtomicU64], change: impl FnOnce(&[AtomicU64])) {
    let Some((stamp, words)) = row.split_first() else { return };
    let odd = stamp.load(Ordering::Relaxed) | 1;
    stamp.store(odd, Ordering::Relaxed);
    fence(Ordering::Release);
    change(words);
    stamp.store(odd.wrapping_add(1), Ordering::Release);
}

/// What `look` makes of a row's words; `None` if it was never written, or changes meanwhile.
pub(super) fn read<T>(
    row: &[AtomicU64],
    look: impl FnOnce(&[AtomicU64]) -> Option<T>,
) -> Option<T> {
    let (stamp, words) = row.split_first()?;
    let before = stamp.load(Ordering::Acquire);
    if before == 0 || before & 1 == 1 {
        return None;
    }
    let seen = look(words)?;
    fence(Ordering::Acquire);
    (stamp.load(Ordering::Relaxed) == before).then_some(seen)
}

/// Keeps token ids, two in a word; those that find no room are left out.
pub(super) fn set_tokens(words: &[AtomicU64], tokens: &[u32]) {
    for (word, pair) in words.iter().zip(tokens.chunks(2)) {
        let high = pair.get(1).copied().unwrap_or(0);
        word.store(u64::from(high) << 32 | u64::from(pair[0]), Ordering::Relaxed);
    }
}

/// So many of the token ids that [`set_tokens`] kept.
pub(super) fn tokens(words: &[AtomicU64], count: usize) -> Vec<u32> {
    let pair = |word: &AtomicU64| {
        let pair = word.load(Ordering::Relaxed);
        [pair as u32, (pair >> 32) as u32]
    };
    words.iter().flat_map(pair).take(count).collect()
}
