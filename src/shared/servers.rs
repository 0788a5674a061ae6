//! One row for each server: an address of an upstream's peer and a data-parallel rank.
//!
//! Rows are claimed by any process when it starts, without a lock; what a row says of the events
//! is written by the holder of the lease alone.

use std::sync::atomic::{AtomicU64, Ordering};

use super::trusted::{self, ModelKey, TrustRow};
use super::{Dropped, MAX_SERVERS, Mode, ServerError, SharedError};
use crate::types::ServerId;

const ROW_WORDS: usize = TRUST_AT + trusted::MODELS * trusted::WORDS;
pub(super) const WORDS: usize = ROW_WORDS * MAX_SERVERS;

const KEY: usize = 0;
/// Length of the name in the low half, the rank in the high half; set once the name is there.
const NAME_LEN: usize = 1;
const NAME: usize = 2;
const NAME_WORDS: usize = 32;
const FIELDS_AT: usize = NAME + NAME_WORDS;
const DROPPED_AT: usize = FIELDS_AT + 32;
const DROPPED_WORDS: usize = 24;
const TRUST_AT: usize = 96;
const _: () = assert!(DROPPED_AT + DROPPED_WORDS <= TRUST_AT);
const _: () = assert!(Dropped::ALL.len() <= DROPPED_WORDS);

/// Longest address that a row can hold, in bytes.
pub const MAX_ADDRESS: usize = NAME_WORDS * 8;

/// A word of a server's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum ServerField {
    /// A [`Mode`].
    Mode = 0,
    /// 1 while the event socket is connected.
    Connected = 1,
    /// Last applied sequence number plus one; 0 before the first.
    NextSeq = 2,
    /// Batches applied since the row was claimed.
    Batches = 3,
    Gaps = 4,
    Replays = 5,
    Restarts = 6,
    /// Tokens in a block as the events say; 0 until known.
    BlockSize = 7,
    /// A [`ServerError`].
    Error = 9,
    /// Unix time in milliseconds when the last batch was applied.
    LastEventMs = 10,
    /// Digest and timestamp of the last applied batch: what tells a restart from a gap.
    LastDigest = 11,
    LastTimestamp = 12,
    /// First sequence number that the replay had; above 0 the server is `partial`.
    ReplayedFrom = 13,
    /// Milliseconds of nginx's monotonic clock since the oldest queued prompt has been running.
    HeadSinceMs = 14,
    /// Turn of this server; ties go to the lowest, which is the least recently picked.
    Turn = 15,
    /// One more than the row of the model last routed here, 0 before any.
    Model = 16,
    /// Requests sent to this server, retries included.
    Requests = 17,
    /// 1 while a batch is being applied: found by the next holder of the lease, it says that the
    /// batch may be applied in part.
    Applying = 18,
    /// One more than the cache group whose blocks are credited, 0 until known.
    Group = 19,
    /// 1 once the model has shown layers without full attention: a hit there also needs what no
    /// event tells, so its overlap is not credited.
    Hybrid = 20,
    /// Doubts of a model's tokens that are as good as certain, of all models on this server; see
    /// [`crate::trust`].
    Distrust = 21,
}

#[derive(Clone, Copy, Debug)]
pub struct Servers<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Servers<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Servers<'a> {
        Servers { words }
    }

    pub fn row(&self, id: ServerId) -> ServerRow<'a> {
        let at = id.index() * ROW_WORDS;
        ServerRow { words: &self.words[at..at + ROW_WORDS] }
    }

    /// The row of this address and rank, claimed if there was none. Any process may ask.
    ///
    /// Two processes that claim one server at once try the free rows in the same order, so they
    /// meet at the same row, where the swap lets one through and shows the other its key. A row
    /// freed meanwhile could part them: whoever finds the key twice gives up the higher row.
    pub fn claim(&self, address: &str, rank: u32) -> Result<ServerId, SharedError> {
        let key = server_key(address, rank);
        loop {
            if let Some(id) = self.position(key) {
                return Ok(id);
            }
            let free = self.ids().find(|id| self.key_word(*id).load(Ordering::Relaxed) == 0);
            let Some(id) = free else { return Err(SharedError::ServersFull) };
            let won = self
                .key_word(id)
                .compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire)
                .is_ok();
            if won {
                self.row(id).set_name(address, rank);
                return Ok(self.drop_double(key, id));
            }
        }
    }

    pub fn find(&self, address: &str, rank: u32) -> Option<ServerId> {
        self.position(server_key(address, rank))
    }

    /// What tells whose row it is, 0 if nobody's: rows of servers that are gone go to others.
    pub fn key(&self, id: ServerId) -> u64 {
        self.key_word(id).load(Ordering::Acquire)
    }

    /// Frees a row. Only the holder of the lease calls this, once nothing is in flight there and
    /// its blocks are gone from the index.
    pub fn free(&self, id: ServerId) {
        let row = self.row(id);
        for word in &row.words[1..] {
            word.store(0, Ordering::Relaxed);
        }
        row.words[KEY].store(0, Ordering::Release);
    }

    /// All claimed rows.
    pub fn claimed(&self) -> impl Iterator<Item = (ServerId, ServerRow<'a>)> + '_ {
        self.ids().map(|id| (id, self.row(id))).filter(|(_, row)| row.name_len() > 0)
    }

    fn drop_double(&self, key: u64, mine: ServerId) -> ServerId {
        match self.position(key) {
            Some(first) if first < mine => {
                self.free(mine);
                first
            }
            _ => mine,
        }
    }

    fn position(&self, key: u64) -> Option<ServerId> {
        self.ids().find(|id| self.key_word(*id).load(Ordering::Acquire) == key)
    }

    fn key_word(&self, id: ServerId) -> &'a AtomicU64 {
        &self.words[id.index() * ROW_WORDS + KEY]
    }

    fn ids(&self) -> impl Iterator<Item = ServerId> + use<> {
        (0..MAX_SERVERS as u16).map(ServerId)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct ServerRow<'a> {
    words: &'a [AtomicU64],
}

impl<'a> ServerRow<'a> {
    /// The part that is about one model; taken if there was none. `None` if all are taken.
    pub fn trust(&self, model: ModelKey) -> Option<TrustRow<'a>> {
        self.trust_rows().find(|row| {
            let key = row.key();
            let known = key.compare_exchange(0, model.0, Ordering::AcqRel, Ordering::Acquire);
            known.is_ok() || known == Err(model.0)
        })
    }

    /// The parts that are about a model.
    pub fn trusts(&self) -> impl Iterator<Item = TrustRow<'a>> + use<'a> {
        self.trust_rows().filter(|row| row.model().0 != 0)
    }

    /// Forgets all that is known of models here: the engine may come back with another.
    pub fn forget_trust(&self) {
        for word in &self.words[TRUST_AT..] {
            word.store(0, Ordering::Relaxed);
        }
        self.set(ServerField::Distrust, 0);
    }

    fn trust_rows(&self) -> impl Iterator<Item = TrustRow<'a>> + use<'a> {
        self.words[TRUST_AT..].chunks_exact(trusted::WORDS).map(TrustRow::new)
    }

    /// The peer's address as nginx prints it, `""` while the row is being claimed.
    pub fn address(&self) -> String {
        let len = self.name_len();
        let bytes: Vec<u8> = self.words[NAME..NAME + NAME_WORDS]
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .take(len)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn rank(&self) -> u32 {
        (self.words[NAME_LEN].load(Ordering::Acquire) >> 32) as u32
    }

    pub fn get(&self, field: ServerField) -> u64 {
        self.words[FIELDS_AT + field as usize].load(Ordering::Relaxed)
    }

    pub fn set(&self, field: ServerField, value: u64) {
        self.words[FIELDS_AT + field as usize].store(value, Ordering::Relaxed);
    }

    /// Adds to a counter and tells what it was.
    pub fn add(&self, field: ServerField, n: u64) -> u64 {
        self.words[FIELDS_AT + field as usize].fetch_add(n, Ordering::Relaxed)
    }

    pub fn mode(&self) -> Mode {
        Mode::from_word(self.get(ServerField::Mode))
    }

    pub fn set_mode(&self, mode: Mode) {
        self.set(ServerField::Mode, mode as u64);
    }

    pub fn error(&self) -> ServerError {
        ServerError::from_word(self.get(ServerField::Error))
    }

    pub fn set_error(&self, error: ServerError) {
        self.set(ServerField::Error, error as u64);
    }

    pub fn dropped(&self, reason: Dropped) -> u64 {
        self.words[DROPPED_AT + reason as usize].load(Ordering::Relaxed)
    }

    pub fn add_dropped(&self, reason: Dropped, n: u64) {
        self.words[DROPPED_AT + reason as usize].fetch_add(n, Ordering::Relaxed);
    }

    fn name_len(&self) -> usize {
        (self.words[NAME_LEN].load(Ordering::Acquire) & 0xffff_ffff) as usize
    }

    fn set_name(&self, address: &str, rank: u32) {
        let bytes = &address.as_bytes()[..address.len().min(MAX_ADDRESS)];
        for (word, chunk) in self.words[NAME..].iter().zip(bytes.chunks(8)) {
            let mut le = [0; 8];
            le[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(le), Ordering::Relaxed);
        }
        let len = u64::from(rank) << 32 | bytes.len() as u64;
        self.words[NAME_LEN].store(len, Ordering::Release);
    }
}

fn server_key(address: &str, rank: u32) -> u64 {
    (super::name_key(address) ^ u64::from(rank).wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Vec<AtomicU64> {
        (0..WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_claim_is_the_same_row_each_time() {
        let words = words();
        let servers = Servers::new(&words);
        let a = servers.claim("10.0.0.1:8000", 0).unwrap();
        let b = servers.claim("10.0.0.1:8000", 1).unwrap();
        assert_ne!(a, b);
        assert_eq!(servers.claim("10.0.0.1:8000", 0), Ok(a));
        assert_eq!(servers.find("10.0.0.1:8000", 1), Some(b));
        assert_eq!(servers.find("10.0.0.2:8000", 0), None);
        assert_eq!(servers.row(b).address(), "10.0.0.1:8000");
        assert_eq!(servers.row(b).rank(), 1);
        assert_eq!(servers.claimed().count(), 2);
    }

    #[test]
    fn a_freed_row_is_clean_and_used_again() {
        let words = words();
        let servers = Servers::new(&words);
        let a = servers.claim("unix:/a", 0).unwrap();
        let b = servers.claim("unix:/b", 0).unwrap();
        servers.row(a).add_dropped(Dropped::Orphan, 3);
        servers.row(a).set_mode(Mode::Events);
        servers.free(a);
        assert_eq!(servers.find("unix:/b", 0), Some(b));
        assert_eq!(servers.claim("unix:/c", 0), Ok(a));
        assert_eq!(servers.row(a).dropped(Dropped::Orphan), 0);
        assert_eq!(servers.row(a).mode(), Mode::Approximate);
    }

    #[test]
    fn a_full_table_is_an_error() {
        let words = words();
        let servers = Servers::new(&words);
        for n in 0..MAX_SERVERS as u32 {
            servers.claim("a:1", n).unwrap();
        }
        assert_eq!(servers.claim("b:1", 0), Err(SharedError::ServersFull));
    }

    #[test]
    fn processes_that_claim_at_once_agree() {
        let words = words();
        let claim_all = || {
            let servers = Servers::new(&words);
            (0..50u32).map(|n| servers.claim("h:1", n).unwrap()).collect::<Vec<_>>()
        };
        let (a, b) = std::thread::scope(|scope| {
            let one = scope.spawn(claim_all);
            let two = scope.spawn(claim_all);
            (one.join().unwrap(), two.join().unwrap())
        });
        assert_eq!(a, b);
    }
}
