//! A reader of msgpack over a slice: no allocation, no recursion, never past the end.

/// One item; of an array or a map only its head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Item<'a> {
    Nil,
    Bool(bool),
    Uint(u64),
    /// Always negative.
    Int(i64),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(usize),
    /// Number of pairs.
    Map(usize),
    Ext(&'a [u8]),
}

/// Not msgpack, or cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

#[derive(Clone, Copy)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, at: 0 }
    }

    /// The bytes from `start`'s position to this one's.
    pub fn since(&self, start: &Reader<'a>) -> &'a [u8] {
        &self.bytes[start.at..self.at]
    }

    pub fn item(&mut self) -> Result<Item<'a>, Malformed> {
        let [tag] = self.fixed()?;
        Ok(match tag {
            0x00..=0x7f => Item::Uint(u64::from(tag)),
            0x80..=0x8f => self.map(usize::from(tag & 0x0f))?,
            0x90..=0x9f => self.array(usize::from(tag & 0x0f))?,
            0xa0..=0xbf => Item::Str(self.take(usize::from(tag & 0x1f))?),
            0xc0 => Item::Nil,
            0xc1 => return Err(Malformed),
            0xc2 => Item::Bool(false),
            0xc3 => Item::Bool(true),
            0xc4..=0xc6 => Item::Bin(self.sized(tag - 0xc4)?),
            0xc7..=0xc9 => self.ext(tag - 0xc7)?,
            0xca => Item::Float(f64::from(f32::from_be_bytes(self.fixed()?))),
            0xcb => Item::Float(f64::from_be_bytes(self.fixed()?)),
            0xcc..=0xcf => Item::Uint(self.uint(tag - 0xcc)?),
            0xd0..=0xd3 => signed(self.int(tag - 0xd0)?),
            0xd4..=0xd8 => Item::Ext(self.take(1 + (1 << (tag - 0xd4)))?),
            0xd9..=0xdb => Item::Str(self.sized(tag - 0xd9)?),
            0xdc | 0xdd => {
                let count = self.uint(tag - 0xdc + 1)?;
                self.array(count as usize)?
            }
            0xde | 0xdf => {
                let count = self.uint(tag - 0xde + 1)?;
                self.map(count as usize)?
            }
            0xe0..=0xff => Item::Int(i64::from(tag as i8)),
        })
    }

    /// Passes over one item with all that it holds.
    pub fn skip(&mut self) -> Result<(), Malformed> {
        let mut left = 1usize;
        while left > 0 {
            left -= 1;
            // Each head was held against the bytes that are left, so the sum cannot overflow.
            left += match self.item()? {
                Item::Array(count) => count,
                Item::Map(pairs) => 2 * pairs,
                _ => 0,
            };
        }
        Ok(())
    }

    /// Each element takes a byte at least: a longer array is a lie, and nobody should reserve
    /// memory for it.
    fn array(&self, count: usize) -> Result<Item<'a>, Malformed> {
        if count <= self.left() { Ok(Item::Array(count)) } else { Err(Malformed) }
    }

    fn map(&self, pairs: usize) -> Result<Item<'a>, Malformed> {
        if pairs <= self.left() / 2 { Ok(Item::Map(pairs)) } else { Err(Malformed) }
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at.checked_add(len).ok_or(Malformed)?;
        let taken = self.bytes.get(self.at..end).ok_or(Malformed)?;
        self.at = end;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    /// A big-endian number of `1 << width` bytes.
    fn uint(&mut self, width: u8) -> Result<u64, Malformed> {
        let bytes = self.take(1 << width)?;
        Ok(bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn int(&mut self, width: u8) -> Result<i64, Malformed> {
        let unused = 64 - (8u32 << width);
        Ok((self.uint(width)? << unused) as i64 >> unused)
    }

    fn sized(&mut self, width: u8) -> Result<&'a [u8], Malformed> {
        let len = self.uint(width)?;
        self.take(len as usize)
    }

    fn ext(&mut self, width: u8) -> Result<Item<'a>, Malformed> {
        let len = self.uint(width)?;
        Ok(Item::Ext(self.take(len as usize + 1)?))
    }
}

fn signed(value: i64) -> Item<'static> {
    if value < 0 { Item::Int(value) } else { Item::Uint(value as u64) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// The value that starts at the reader, made with another decoder's types.
    fn value(reader: &mut Reader<'_>) -> Value {
        match reader.item().unwrap() {
            Item::Nil => Value::Null,
            Item::Bool(value) => json!(value),
            Item::Uint(value) => json!(value),
            Item::Int(value) => json!(value),
            Item::Float(value) => json!(value),
            Item::Str(text) => json!(std::str::from_utf8(text).unwrap()),
            Item::Array(count) => (0..count).map(|_| value(reader)).collect(),
            Item::Map(pairs) => (0..pairs)
                .map(|_| {
                    let key = value(reader).as_str().unwrap().to_owned();
                    (key, value(reader))
                })
                .collect::<serde_json::Map<_, _>>()
                .into(),
            other => panic!("{other:?}"),
        }
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(|v| json!(v)),
            any::<u64>().prop_map(|v| json!(v)),
            any::<i64>().prop_map(|v| json!(v)),
            (0u32..64).prop_flat_map(|bits| any::<u64>().prop_map(move |v| json!(v >> bits))),
            (0u32..64).prop_flat_map(|bits| any::<i64>().prop_map(move |v| json!(v >> bits))),
            (-1e300f64..1e300).prop_map(|v| json!(v)),
            ".{0,40}".prop_map(|v| json!(v)),
            "[a-z]{250,270}".prop_map(|v| json!(v)),
        ];
        leaf.prop_recursive(4, 64, 20, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..20).prop_map(Value::Array),
                proptest::collection::vec((".{0,8}", inner), 0..20)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn reads_what_another_encoder_wrote(expected in values()) {
            let bytes = rmp_serde::to_vec(&expected).unwrap();
            let mut reader = Reader::new(&bytes);
            prop_assert_eq!(value(&mut reader), expected);
            prop_assert_eq!(reader.left(), 0);
            let mut skipping = Reader::new(&bytes);
            prop_assert_eq!(skipping.skip(), Ok(()));
            prop_assert_eq!(skipping.left(), 0);
        }

        #[test]
        fn a_cut_is_malformed(expected in values(), cut in 1usize..50) {
            let bytes = rmp_serde::to_vec(&expected).unwrap();
            let kept = bytes.len().saturating_sub(cut);
            prop_assert_eq!(Reader::new(&bytes[..kept]).skip(), Err(Malformed));
        }

        #[test]
        fn any_bytes_end(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Reader::new(&bytes).skip();
        }
    }

    #[test]
    fn heads_that_promise_too_much_are_malformed() {
        for bytes in [
            &[0xdd, 0xff, 0xff, 0xff, 0xff, 0xc0][..],
            &[0xdf, 0x7f, 0xff, 0xff, 0xff, 0xc0, 0xc0],
            &[0xc6, 0xff, 0xff, 0xff, 0xff, 1],
            &[0xc9, 0xff, 0xff, 0xff, 0xff, 1, 1],
            &[0x92, 0xc0],
        ] {
            assert_eq!(Reader::new(bytes).skip(), Err(Malformed), "{bytes:?}");
        }
    }

    #[test]
    fn binary_and_extensions_are_read() {
        assert_eq!(Reader::new(&[0xc4, 2, 7, 8]).item(), Ok(Item::Bin(&[7, 8])));
        assert_eq!(Reader::new(&[0xd5, 9, 1, 2]).item(), Ok(Item::Ext(&[9, 1, 2])));
        assert_eq!(Reader::new(&[0xc7, 1, 9, 1]).item(), Ok(Item::Ext(&[9, 1])));
        assert_eq!(Reader::new(&[0xca, 0x3f, 0x80, 0, 0]).item(), Ok(Item::Float(1.0)));
    }
}
