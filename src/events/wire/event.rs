//! One event, as an array or as a map.

use std::borrow::Cow;

use super::msgpack::{Item, Malformed, Reader};
use crate::blocks::Extra;
use crate::shared::Dropped;
use crate::types::{EngineHash, Tier, TokenId};

#[derive(Debug, PartialEq)]
pub enum KvEvent<'a> {
    Stored(Stored<'a>),
    Removed(Removed),
    Cleared,
}

/// Whether the blocks of a group are positions of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    Full,
    /// A window, a state, another prompt: no prefix can be read from it.
    Other,
    /// Versions that do not say.
    Unstated,
}

#[derive(Debug, PartialEq)]
pub struct Stored<'a> {
    pub hashes: Vec<EngineHash>,
    /// The block before the first; `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// Empty, with block size 0, if a connector knows blocks by their hashes alone.
    pub tokens: Vec<TokenId>,
    pub block_size: u32,
    pub tier: Tier,
    pub lora: Option<Cow<'a, str>>,
    /// Extra keys of each block; empty if no block has any.
    pub extras: Vec<Vec<Extra<'a>>>,
    pub group: Option<u64>,
    pub attention: Attention,
    /// The engine says that it only announces again what it has.
    pub reused: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Removed {
    pub hashes: Vec<EngineHash>,
    pub tier: Tier,
    pub group: Option<u64>,
}

/// Fields as they come, before the event's name need be known.
#[derive(Default)]
struct Fields<'a> {
    name: Option<&'a str>,
    hashes: Vec<EngineHash>,
    parent: Option<EngineHash>,
    tokens: Vec<TokenId>,
    block_size: u64,
    lora_id: Option<Cow<'a, str>>,
    lora_name: Option<&'a str>,
    medium: Option<&'a str>,
    keys: Vec<Vec<Key<'a>>>,
    group: Option<u64>,
    kind: Option<&'a str>,
    remote: bool,
    reused: bool,
}

/// One extra key as it comes.
enum Key<'a> {
    Text(&'a str),
    Media(&'a str, i64),
    /// Its bytes, whatever they are: a block that has it matches no prompt of ours.
    Other(&'a [u8]),
}

// In the order of the array form, which grew at its end from version to version.
const STORED: [&str; 13] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
];
const REMOVED: [&str; 4] = ["block_hashes", "medium", "group_idx", "locality"];

/// Reads one event. After an error the reader is somewhere within it.
pub fn read<'a>(reader: &mut Reader<'a>) -> Result<KvEvent<'a>, Dropped> {
    let mut fields = Fields::default();
    let read = match reader.item() {
        Ok(Item::Array(count)) if count > 0 => fields.read_array(reader, count - 1),
        Ok(Item::Map(pairs)) => fields.read_map(reader, pairs),
        _ => Err(Malformed),
    };
    read.map_err(|Malformed| Dropped::BadEvent)?;
    match fields.name {
        Some("BlockStored" | "block_stored" | "stored") => fields.stored().map(KvEvent::Stored),
        Some("BlockRemoved" | "block_removed" | "removed") => {
            fields.removed().map(KvEvent::Removed)
        }
        Some("AllBlocksCleared" | "all_blocks_cleared" | "cleared") => Ok(KvEvent::Cleared),
        Some(_) => Err(Dropped::UnknownEvent),
        None => Err(Dropped::BadEvent),
    }
}

impl<'a> Fields<'a> {
    fn read_array(&mut self, reader: &mut Reader<'a>, count: usize) -> Result<(), Malformed> {
        self.name = text(reader)?;
        let names: &[&str] = match self.name {
            Some("BlockStored") => &STORED,
            Some("BlockRemoved") => &REMOVED,
            _ => &[],
        };
        for position in 0..count {
            match names.get(position) {
                Some(name) => self.read_field(reader, name)?,
                None => reader.skip()?,
            }
        }
        Ok(())
    }

    fn read_map(&mut self, reader: &mut Reader<'a>, pairs: usize) -> Result<(), Malformed> {
        for _ in 0..pairs {
            let key = text(reader)?.ok_or(Malformed)?;
            self.read_field(reader, key)?;
        }
        Ok(())
    }

    fn read_field(&mut self, reader: &mut Reader<'a>, name: &str) -> Result<(), Malformed> {
        match name {
            "type" | "event_type" => self.name = text(reader)?,
            "block_hashes" | "seq_hashes" => {
                self.hashes = list(reader, |item| hash(item).ok_or(Malformed))?;
            }
            "parent_block_hash" | "parent_hash" => {
                self.parent = match reader.item()? {
                    Item::Nil => None,
                    item => Some(hash(item).ok_or(Malformed)?),
                }
            }
            "token_ids" => self.tokens = list(reader, token)?,
            "block_size" => self.block_size = number(reader)?.unwrap_or(0),
            "lora_id" => self.lora_id = lora_id(reader)?,
            "lora_name" => self.lora_name = text(reader)?.filter(|name| !name.is_empty()),
            "medium" => self.medium = text(reader)?.filter(|medium| !medium.is_empty()),
            "extra_keys" => self.keys = keys(reader)?,
            "group_idx" => self.group = number(reader)?,
            "kv_cache_spec_kind" => self.kind = text(reader)?,
            "locality" => self.remote = text(reader)?.is_some_and(|at| at == "REMOTE"),
            "origin" => self.reused = text(reader)?.is_some_and(|origin| origin == "REUSED"),
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn stored(self) -> Result<Stored<'a>, Dropped> {
        let tier = self.tier()?;
        // An adapter without a name must not pass for the base model. No client can write this
        // name, so its blocks match nothing.
        let lora = match (self.lora_name, self.lora_id) {
            (Some(name), _) => Some(Cow::Borrowed(name)),
            (None, Some(id)) => Some(Cow::Owned(format!("\0id={id}"))),
            (None, None) => None,
        };
        let attention = match self.kind {
            None => Attention::Unstated,
            Some("full_attention" | "mla_attention" | "sink_full_attention") => Attention::Full,
            Some(_) => Attention::Other,
        };
        let extras = if self.keys.iter().all(|keys| keys.is_empty()) {
            Vec::new()
        } else if self.keys.len() != self.hashes.len() {
            return Err(Dropped::Shape);
        } else {
            let starts = self.parent.is_none();
            let keys = self.keys.into_iter().enumerate();
            keys.map(|(at, keys)| extras(keys, self.lora_name, starts && at == 0)).collect()
        };
        Ok(Stored {
            hashes: self.hashes,
            parent: self.parent,
            tokens: self.tokens,
            block_size: u32::try_from(self.block_size).map_err(|_| Dropped::Shape)?,
            tier,
            lora,
            extras,
            group: self.group,
            attention,
            reused: self.reused,
        })
    }

    fn removed(self) -> Result<Removed, Dropped> {
        let tier = self.tier()?;
        Ok(Removed { hashes: self.hashes, tier, group: self.group })
    }

    fn tier(&self) -> Result<Tier, Dropped> {
        let tier = Tier::from_medium(self.medium).ok_or(Dropped::UnknownMedium)?;
        Ok(if self.remote { Tier::Remote } else { tier })
    }
}

/// The adapter's name comes first and is part of the chain's root already; in the first block of
/// a prompt any other text is the salt.
fn extras<'a>(keys: Vec<Key<'a>>, lora: Option<&str>, first: bool) -> Vec<Extra<'a>> {
    let mut keys = keys.into_iter().peekable();
    keys.next_if(|key| matches!(key, Key::Text(text) if lora == Some(text)));
    keys.map(|key| match key {
        Key::Text(salt) if first => Extra::Salt(salt),
        Key::Text(hash) => Extra::Media { hash, offset: 0 },
        Key::Media(hash, offset) => Extra::Media { hash, offset },
        Key::Other(bytes) => Extra::Embeds(bytes),
    })
    .collect()
}

fn list<'a, T>(
    reader: &mut Reader<'a>,
    mut element: impl FnMut(Item<'a>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    match reader.item()? {
        Item::Nil => Ok(Vec::new()),
        Item::Array(count) => (0..count).map(|_| element(reader.item()?)).collect(),
        _ => Err(Malformed),
    }
}

/// Integers keep their 64 bits; of bytes the last eight count, as in the engine's own integers.
fn hash(item: Item<'_>) -> Option<EngineHash> {
    match item {
        Item::Uint(bits) => Some(EngineHash(bits)),
        Item::Int(value) => Some(EngineHash(value as u64)),
        Item::Bin(bytes) if !bytes.is_empty() => {
            let low = &bytes[bytes.len().saturating_sub(8)..];
            Some(EngineHash(low.iter().fold(0, |bits, byte| bits << 8 | u64::from(*byte))))
        }
        _ => None,
    }
}

fn token(item: Item<'_>) -> Result<TokenId, Malformed> {
    let Item::Uint(id) = item else { return Err(Malformed) };
    TokenId::try_from(id).map_err(|_| Malformed)
}

fn number(reader: &mut Reader<'_>) -> Result<Option<u64>, Malformed> {
    match reader.item()? {
        Item::Nil => Ok(None),
        Item::Uint(number) => Ok(Some(number)),
        _ => Err(Malformed),
    }
}

fn text<'a>(reader: &mut Reader<'a>) -> Result<Option<&'a str>, Malformed> {
    match reader.item()? {
        Item::Nil => Ok(None),
        Item::Str(bytes) => std::str::from_utf8(bytes).map(Some).map_err(|_| Malformed),
        _ => Err(Malformed),
    }
}

fn lora_id<'a>(reader: &mut Reader<'a>) -> Result<Option<Cow<'a, str>>, Malformed> {
    match reader.item()? {
        Item::Nil => Ok(None),
        Item::Uint(id) => Ok(Some(Cow::Owned(id.to_string()))),
        Item::Int(id) => Ok(Some(Cow::Owned(id.to_string()))),
        Item::Str(id) => {
            std::str::from_utf8(id).map(|id| Some(Cow::Borrowed(id))).map_err(|_| Malformed)
        }
        _ => Err(Malformed),
    }
}

fn keys<'a>(reader: &mut Reader<'a>) -> Result<Vec<Vec<Key<'a>>>, Malformed> {
    let blocks = match reader.item()? {
        Item::Nil => return Ok(Vec::new()),
        Item::Array(blocks) => blocks,
        _ => return Err(Malformed),
    };
    (0..blocks)
        .map(|_| match reader.item()? {
            Item::Nil => Ok(Vec::new()),
            Item::Array(count) => (0..count).map(|_| key(reader)).collect(),
            _ => Err(Malformed),
        })
        .collect()
}

fn key<'a>(reader: &mut Reader<'a>) -> Result<Key<'a>, Malformed> {
    let start = *reader;
    if let Ok(Some(text)) = text(reader) {
        return Ok(Key::Text(text));
    }
    *reader = start;
    if let Some((hash, offset)) = media(reader) {
        return Ok(Key::Media(hash, offset));
    }
    *reader = start;
    if let Item::Bin(bytes) = reader.item()? {
        return Ok(Key::Other(bytes));
    }
    *reader = start;
    reader.skip()?;
    Ok(Key::Other(reader.since(&start)))
}

fn media<'a>(reader: &mut Reader<'a>) -> Option<(&'a str, i64)> {
    let Ok(Item::Array(2)) = reader.item() else { return None };
    let hash = text(reader).ok()??;
    match reader.item().ok()? {
        Item::Uint(offset) => Some((hash, i64::try_from(offset).ok()?)),
        Item::Int(offset) => Some((hash, offset)),
        _ => None,
    }
}
