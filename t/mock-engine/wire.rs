//! Events → msgpack, in the layouts of several versions of the engine.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::cache::{BlockKey, Event};

/// How an event is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A map with its name under `type`, since 0.24.
    Map,
    /// An array that starts with its name, as in 0.23.
    Array,
    /// The shorter one of 0.11: no adapter's name, no extra keys.
    ArrayOld,
}

/// How a replayed message is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// With its topic, since 0.28.
    New,
    Old,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashKind {
    Int,
    /// 32 bytes, the last 8 of which are the integer.
    Bytes,
}

impl Format {
    /// The framing of the versions that have this layout.
    pub fn framing(self) -> Framing {
        if self == Format::Map { Framing::New } else { Framing::Old }
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Format, String> {
        match text {
            "map" => Ok(Format::Map),
            "array" => Ok(Format::Array),
            "array-old" => Ok(Format::ArrayOld),
            _ => Err(format!("unknown format \"{text}\"")),
        }
    }
}

impl FromStr for Framing {
    type Err = String;

    fn from_str(text: &str) -> Result<Framing, String> {
        match text {
            "new" => Ok(Framing::New),
            "old" => Ok(Framing::Old),
            _ => Err(format!("unknown framing \"{text}\"")),
        }
    }
}

impl FromStr for HashKind {
    type Err = String;

    fn from_str(text: &str) -> Result<HashKind, String> {
        match text {
            "int" => Ok(HashKind::Int),
            "bytes" => Ok(HashKind::Bytes),
            _ => Err(format!("unknown hash \"{text}\"")),
        }
    }
}

/// How one engine encodes its batches.
#[derive(Clone, Debug)]
pub struct Wire {
    pub format: Format,
    pub hash: HashKind,
    pub block_size: usize,
    pub rank: u32,
    pub loras: Vec<String>,
}

impl Wire {
    /// `[time, events, rank]`; the time in Unix seconds.
    pub fn batch(&self, time: f64, events: &[Event]) -> Result<Vec<u8>, String> {
        let events = events.iter().map(|event| self.event(event)).collect();
        let batch =
            Value::Array(vec![Value::Float(time), Value::Array(events), int(u64::from(self.rank))]);
        rmp_serde::to_vec(&batch).map_err(|error| error.to_string())
    }

    fn event(&self, event: &Event) -> Value {
        let (name, fields) = match event {
            Event::Stored { keys, parent, tokens, extra, lora } => {
                ("BlockStored", self.stored(keys, *parent, tokens, extra, lora.as_deref()))
            }
            Event::Removed(key) => {
                let hashes = Value::Array(vec![self.hash(*key)]);
                let mut fields = vec![("block_hashes", hashes), ("medium", text("GPU"))];
                if self.format != Format::ArrayOld {
                    fields.push(("group_idx", int(0)));
                }
                ("BlockRemoved", fields)
            }
            Event::Cleared => ("AllBlocksCleared", Vec::new()),
        };
        match self.format {
            Format::Map => Value::Map([("type", text(name))].into_iter().chain(fields).collect()),
            Format::Array | Format::ArrayOld => Value::Array(
                [text(name)]
                    .into_iter()
                    .chain(fields.into_iter().map(|(_, value)| value))
                    .collect(),
            ),
        }
    }

    fn stored(
        &self,
        keys: &[BlockKey],
        parent: Option<BlockKey>,
        tokens: &[u32],
        extra: &[Vec<String>],
        lora: Option<&str>,
    ) -> Vec<(&'static str, Value)> {
        let lora_id = lora
            .and_then(|lora| self.loras.iter().position(|name| name == lora))
            .map_or(Value::Nil, |at| int(at as u64 + 1));
        let mut fields = vec![
            ("block_hashes", Value::Array(keys.iter().map(|&key| self.hash(key)).collect())),
            ("parent_block_hash", parent.map_or(Value::Nil, |key| self.hash(key))),
            ("token_ids", Value::Array(tokens.iter().map(|&id| int(u64::from(id))).collect())),
            ("block_size", int(self.block_size as u64)),
            ("lora_id", lora_id),
            ("medium", text("GPU")),
        ];
        if self.format != Format::ArrayOld {
            let list = |keys: &Vec<String>| match keys.as_slice() {
                [] => Value::Nil,
                keys => Value::Array(keys.iter().map(|key| text(key)).collect()),
            };
            fields.push(("lora_name", lora.map_or(Value::Nil, text)));
            fields.push(("extra_keys", Value::Array(extra.iter().map(list).collect())));
            fields.push(("group_idx", int(0)));
            fields.push(("kv_cache_spec_kind", text("full_attention")));
        }
        if self.format == Format::Array {
            fields.push(("kv_cache_spec_sliding_window", Value::Nil));
        }
        fields
    }

    fn hash(&self, key: BlockKey) -> Value {
        if self.hash == HashKind::Int {
            return int(key);
        }
        let mut bytes = Vec::with_capacity(32);
        for lane in 0..3u8 {
            let mut hasher = DefaultHasher::new();
            (key, lane).hash(&mut hasher);
            bytes.extend(hasher.finish().to_be_bytes());
        }
        bytes.extend(key.to_be_bytes());
        Value::Bytes(bytes)
    }
}

enum Value {
    Nil,
    Int(u64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    Array(Vec<Value>),
    Map(Vec<(&'static str, Value)>),
}

fn int(value: u64) -> Value {
    Value::Int(value)
}

fn text(value: &str) -> Value {
    Value::Text(value.to_owned())
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Value::Nil => serializer.serialize_unit(),
            Value::Int(value) => serializer.serialize_u64(*value),
            Value::Float(value) => serializer.serialize_f64(*value),
            Value::Text(value) => serializer.serialize_str(value),
            Value::Bytes(value) => serializer.serialize_bytes(value),
            Value::Array(items) => serializer.collect_seq(items),
            Value::Map(fields) => serializer.collect_map(fields.iter().map(|(k, v)| (k, v))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(format: Format, hash: HashKind) -> Wire {
        Wire { format, hash, block_size: 2, rank: 3, loras: vec!["a".to_owned(), "b".to_owned()] }
    }

    fn stored() -> Event {
        Event::Stored {
            keys: vec![1, 2],
            parent: None,
            tokens: vec![5, 6, 7, 300],
            extra: vec![vec!["b".to_owned(), "salt".to_owned()], Vec::new()],
            lora: Some("b".to_owned()),
        }
    }

    /// The bytes as a reader that knows no types of ours sees them.
    fn read(bytes: &[u8]) -> serde_json::Value {
        rmp_serde::from_slice(bytes).unwrap()
    }

    #[test]
    fn a_map_event_has_the_fields_of_the_newest_version_in_order() {
        let batch = wire(Format::Map, HashKind::Int).batch(1.5, &[stored(), Event::Cleared]);
        let expected = serde_json::json!([1.5, [
            {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null,
             "token_ids": [5, 6, 7, 300], "block_size": 2, "lora_id": 2, "medium": "GPU",
             "lora_name": "b", "extra_keys": [["b", "salt"], null], "group_idx": 0,
             "kv_cache_spec_kind": "full_attention"},
            {"type": "AllBlocksCleared"}], 3]);
        assert_eq!(read(&batch.unwrap()).to_string(), expected.to_string());
    }

    #[test]
    fn an_array_event_is_as_long_as_its_version_makes_it() {
        let events = [stored(), Event::Removed(9)];
        let batch = wire(Format::Array, HashKind::Int).batch(0.0, &events).unwrap();
        let expected = serde_json::json!([
            0.0,
            [
                [
                    "BlockStored",
                    [1, 2],
                    null,
                    [5, 6, 7, 300],
                    2,
                    2,
                    "GPU",
                    "b",
                    [["b", "salt"], null],
                    0,
                    "full_attention",
                    null
                ],
                ["BlockRemoved", [9], "GPU", 0]
            ],
            3
        ]);
        assert_eq!(read(&batch), expected);
        let batch = wire(Format::ArrayOld, HashKind::Int).batch(0.0, &events).unwrap();
        let expected = serde_json::json!([
            0.0,
            [
                ["BlockStored", [1, 2], null, [5, 6, 7, 300], 2, 2, "GPU"],
                ["BlockRemoved", [9], "GPU"]
            ],
            3
        ]);
        assert_eq!(read(&batch), expected);
    }

    #[test]
    fn a_hash_of_bytes_ends_in_the_integer() {
        let key = 0x0102_0304_0506_0708;
        let batch =
            wire(Format::Array, HashKind::Bytes).batch(0.0, &[Event::Removed(key)]).unwrap();
        let bin = batch.windows(2).position(|head| head == [0xc4, 32]).unwrap();
        assert_eq!(batch[bin + 2 + 24..bin + 2 + 32], key.to_be_bytes());
    }
}
