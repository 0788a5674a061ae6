//! What engines send, in the shapes of all their versions → [`Batch`].
//!
//! Accepted: events as arrays that start with their name and as maps, hashes as signed or unsigned
//! integers and as bytes, missing and extra trailing fields, replay frames with and without a
//! topic. Anything else is a [`Dropped`] reason: of the message if its batch cannot be read, of one
//! event if only that cannot.

mod event;
mod msgpack;

use std::hash::Hasher;

use crate::shared::Dropped;
pub use event::{Attention, KvEvent, Removed, Stored};
use msgpack::{Item, Reader};

/// Largest payload in bytes that is looked at.
pub const MAX_PAYLOAD: usize = 16 << 20;
/// Most events of one batch.
const MAX_EVENTS: usize = 1 << 16;
const END_OF_REPLAY: u64 = u64::MAX;

/// One batch of an engine's step, borrowing from the message.
#[derive(Debug, PartialEq)]
pub struct Batch<'a> {
    /// Unix time in seconds, by the engine's clock.
    pub timestamp: f64,
    /// The data-parallel rank that the batch claims.
    pub rank: Option<u64>,
    pub events: Vec<Result<KvEvent<'a>, Dropped>>,
}

/// A numbered payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbered<'a> {
    pub seq: u64,
    pub payload: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    Batch(Numbered<'a>),
    End,
}

/// The frames of a published message: topic, sequence number, payload.
pub fn live<F: AsRef<[u8]>>(frames: &[F]) -> Result<Numbered<'_>, Dropped> {
    let [_, seq, payload] = frames else { return Err(Dropped::BadFrames) };
    let numbered = numbered(seq.as_ref(), payload.as_ref())?;
    if numbered.seq == END_OF_REPLAY { Err(Dropped::BadFrames) } else { Ok(numbered) }
}

/// The frames of a replay's reply, as a DEALER gets them: an empty one, maybe the topic, the
/// sequence number, the payload; the end has all bits of the number set.
pub fn reply<F: AsRef<[u8]>>(frames: &[F]) -> Result<Reply<'_>, Dropped> {
    let (seq, payload) = match frames {
        [empty, seq, payload] | [empty, _, seq, payload] if empty.as_ref().is_empty() => {
            (seq.as_ref(), payload.as_ref())
        }
        _ => return Err(Dropped::BadFrames),
    };
    let numbered = numbered(seq, payload)?;
    Ok(if numbered.seq == END_OF_REPLAY { Reply::End } else { Reply::Batch(numbered) })
}

/// The frames that ask for a replay from `start` on.
pub fn replay_request(start: u64) -> [Vec<u8>; 2] {
    [Vec::new(), start.to_be_bytes().to_vec()]
}

/// What tells two batches of the same number apart.
pub fn digest(payload: &[u8]) -> u64 {
    // Without random keys: another process compares it after a reload. Should the function differ
    // there, the engine counts as restarted and its blocks are learned again.
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(payload);
    hasher.finish()
}

/// Reads a payload.
pub fn batch(payload: &[u8]) -> Result<Batch<'_>, Dropped> {
    read_batch(payload, one_event)
}

/// What a batch says of itself: its timestamp and rank. An error here is one of [`batch`] too.
pub fn outline(payload: &[u8]) -> Result<(f64, Option<u64>), Dropped> {
    let pass = |reader: &mut Reader<'_>| {
        reader.skip().map_err(|_| Dropped::BadPayload)?;
        Ok(Err(Dropped::BadEvent))
    };
    let batch = read_batch(payload, pass)?;
    Ok((batch.timestamp, batch.rank))
}

fn read_batch<'a>(
    payload: &'a [u8],
    mut event: impl FnMut(&mut Reader<'a>) -> Result<Result<KvEvent<'a>, Dropped>, Dropped>,
) -> Result<Batch<'a>, Dropped> {
    if payload.len() > MAX_PAYLOAD {
        return Err(Dropped::TooLarge);
    }
    let mut reader = Reader::new(payload);
    let fields = match reader.item() {
        Ok(Item::Array(fields)) if fields >= 2 => fields,
        _ => return Err(Dropped::BadPayload),
    };
    let timestamp = match reader.item() {
        Ok(Item::Float(seconds)) if seconds.is_finite() => seconds,
        Ok(Item::Uint(seconds)) => seconds as f64,
        _ => return Err(Dropped::BadPayload),
    };
    let Ok(Item::Array(count)) = reader.item() else { return Err(Dropped::BadPayload) };
    if count > MAX_EVENTS {
        return Err(Dropped::TooLarge);
    }
    let events = (0..count).map(|_| event(&mut reader)).collect::<Result<_, _>>()?;
    let rank = match (fields > 2).then(|| reader.item()) {
        Some(Ok(Item::Uint(rank))) => Some(rank),
        Some(Err(_)) => return Err(Dropped::BadPayload),
        _ => None,
    };
    Ok(Batch { timestamp, rank, events })
}

/// The outer error: the batch ends here, where the next event starts is not known.
fn one_event<'a>(reader: &mut Reader<'a>) -> Result<Result<KvEvent<'a>, Dropped>, Dropped> {
    let mut ahead = *reader;
    let event = event::read(&mut ahead);
    if event.is_ok() {
        *reader = ahead;
    } else {
        reader.skip().map_err(|_| Dropped::BadPayload)?;
    }
    Ok(event)
}

fn numbered<'a>(seq: &[u8], payload: &'a [u8]) -> Result<Numbered<'a>, Dropped> {
    let seq = seq.try_into().map_err(|_| Dropped::BadFrames)?;
    Ok(Numbered { seq: u64::from_be_bytes(seq), payload })
}

#[cfg(test)]
mod tests;
