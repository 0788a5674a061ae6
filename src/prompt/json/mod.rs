//! JSON as Python's `json` module reads it, into [`Json`] values.
//!
//! Beside the standard: `NaN` and `Infinity` are accepted, integers are of any size, of two equal
//! keys the first gives the place and the last the value.

mod string;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::sync::Arc;

use super::python::{Dict, Json, List};
use string::{hex, plain_len, unescape};

/// Values nested deeper than this are not read; Python's own limit is near 1,000.
const MAX_DEPTH: usize = 128;

/// What values may take in memory: so much for each byte of text, and so much beyond that.
const ROOM_OF_BYTE: usize = 4;
const ROOM: usize = 2 << 20;

/// What a value takes in a list or dict that has just grown, and what it takes beside that.
const ITEM: usize = 2 * size_of::<Json>();
const ENTRY: usize = 2 * size_of::<(Arc<str>, Json)>();
const STRING: usize = 32;
const LIST: usize = 16 + size_of::<List>();
const DICT: usize = 16 + size_of::<Dict>();

/// Python refuses to read integers of more digits.
const MAX_INT_DIGITS: usize = 4300;

/// Why a text cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Syntax,
    /// Nested deeper than [`MAX_DEPTH`].
    Depth,
    /// A string with half a surrogate pair, which Python keeps and Rust cannot.
    Surrogate,
    /// So many small values that reading them would take many times the text's memory.
    Dense,
}

/// The text of each wanted field of the object that is `text`, the last of equal names. The whole
/// text is checked; nothing is copied.
pub(crate) fn fields<'a, const N: usize>(
    text: &'a str,
    wanted: &[&str; N],
) -> Result<[Option<&'a str>; N], Fault> {
    let mut found = [None; N];
    let mut reader = Reader::new(text);
    reader.space();
    reader.expect(b'{')?;
    reader.space();
    if !reader.eat(b'}') {
        loop {
            let key = reader.key()?;
            let start = reader.at;
            reader.skip(1)?;
            if let Some(index) = wanted.iter().position(|name| *name == key) {
                found[index] = Some(&text[start..reader.at]);
            }
            reader.space();
            if !reader.eat(b',') {
                break;
            }
            reader.space();
        }
        reader.expect(b'}')?;
    }
    reader.end()?;
    Ok(found)
}

/// Reads one whole text.
pub(crate) fn parse(text: &str) -> Result<Json, Fault> {
    Room::default().parse(text)
}

/// What the values of several texts may take together beside what each is given for its length.
pub(crate) struct Room(usize);

impl Default for Room {
    fn default() -> Room {
        Room(ROOM)
    }
}

impl Room {
    /// Reads one whole text.
    pub fn parse(&mut self, text: &str) -> Result<Json, Fault> {
        let mut reader = Reader::new(text);
        reader.room += self.0;
        reader.space();
        let value = reader.value(0)?;
        reader.end()?;
        self.0 = self.0.min(reader.room);
        Ok(value)
    }
}

/// Reads a list of non-negative integers below 2^32 without a value for each.
pub(crate) fn parse_ids(text: &str) -> Option<Vec<u32>> {
    let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?;
    if inner.trim().is_empty() {
        return Some(Vec::new());
    }
    let digits = |item: &str| item.bytes().all(|byte| byte.is_ascii_digit());
    inner
        .split(',')
        .map(str::trim)
        .map(|item| digits(item).then(|| item.parse().ok()).flatten())
        .collect()
}

struct Reader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    /// Bytes that values may still take.
    room: usize,
    /// Short strings met lately: keys and roles repeat.
    recent: [Option<Arc<str>>; 64],
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Reader<'a> {
        let room = text.len().saturating_mul(ROOM_OF_BYTE);
        Reader { text, bytes: text.as_bytes(), at: 0, room, recent: [const { None }; 64] }
    }

    fn take(&mut self, bytes: usize) -> Result<(), Fault> {
        self.room = self.room.checked_sub(bytes).ok_or(Fault::Dense)?;
        Ok(())
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), Fault> {
        if self.eat(byte) { Ok(()) } else { Err(Fault::Syntax) }
    }

    fn word(&mut self, word: &str) -> Result<(), Fault> {
        if self.bytes[self.at..].starts_with(word.as_bytes()) {
            self.at += word.len();
            return Ok(());
        }
        Err(Fault::Syntax)
    }

    fn end(&mut self) -> Result<(), Fault> {
        self.space();
        if self.at == self.bytes.len() { Ok(()) } else { Err(Fault::Syntax) }
    }

    /// A key with the colon and the space after it.
    fn key(&mut self) -> Result<Cow<'a, str>, Fault> {
        let start = self.at + 1;
        let escapes = self.skip_string()?;
        let raw = &self.text[start..self.at - 1];
        self.colon()?;
        // A key with half a surrogate pair is none that is wanted.
        Ok(if escapes { unescape(raw).unwrap_or_default().into() } else { raw.into() })
    }

    fn colon(&mut self) -> Result<(), Fault> {
        self.space();
        self.expect(b':')?;
        self.space();
        Ok(())
    }

    /// Moves past one value.
    fn skip(&mut self, depth: usize) -> Result<(), Fault> {
        match self.peek().ok_or(Fault::Syntax)? {
            b'"' => self.skip_string().map(|_| ()),
            open @ (b'[' | b'{') => {
                if depth >= MAX_DEPTH {
                    return Err(Fault::Depth);
                }
                self.at += 1;
                let close = if open == b'[' { b']' } else { b'}' };
                self.space();
                if self.eat(close) {
                    return Ok(());
                }
                loop {
                    if open == b'{' {
                        self.skip_string()?;
                        self.colon()?;
                    }
                    self.skip(depth + 1)?;
                    self.space();
                    if !self.eat(b',') {
                        return self.expect(close);
                    }
                    self.space();
                }
            }
            _ => self.scalar().map(|_| ()),
        }
    }

    fn value(&mut self, depth: usize) -> Result<Json, Fault> {
        match self.peek().ok_or(Fault::Syntax)? {
            b'"' => Ok(Json::Str(self.shared_string()?)),
            b'[' | b'{' if depth >= MAX_DEPTH => Err(Fault::Depth),
            b'[' => self.list(depth),
            b'{' => self.dict(depth),
            _ => self.scalar(),
        }
    }

    fn list(&mut self, depth: usize) -> Result<Json, Fault> {
        let mut items = Vec::new();
        self.take(LIST)?;
        self.at += 1;
        self.space();
        if !self.eat(b']') {
            loop {
                self.take(ITEM)?;
                items.push(self.value(depth + 1)?);
                self.space();
                if !self.eat(b',') {
                    break;
                }
                self.space();
            }
            self.expect(b']')?;
        }
        items.shrink_to_fit();
        Ok(Json::List(Arc::new(List(items))))
    }

    fn dict(&mut self, depth: usize) -> Result<Json, Fault> {
        let mut dict = Dict::default();
        self.take(DICT)?;
        self.at += 1;
        self.space();
        if !self.eat(b'}') {
            loop {
                let key = self.shared_string()?;
                self.colon()?;
                let value = self.value(depth + 1)?;
                let before = dict.len();
                dict.insert(key, value);
                if dict.len() > before {
                    self.take(if dict.len() > Dict::SCAN { 2 * ENTRY } else { ENTRY })?;
                }
                self.space();
                if !self.eat(b',') {
                    break;
                }
                self.space();
            }
            self.expect(b'}')?;
        }
        dict.shrink_to_fit();
        Ok(Json::Dict(Arc::new(dict)))
    }

    fn scalar(&mut self) -> Result<Json, Fault> {
        match self.peek().ok_or(Fault::Syntax)? {
            b'n' => self.word("null").map(|()| Json::Null),
            b't' => self.word("true").map(|()| Json::Bool(true)),
            b'f' => self.word("false").map(|()| Json::Bool(false)),
            b'N' => self.word("NaN").map(|()| Json::Float(f64::NAN)),
            b'I' => self.word("Infinity").map(|()| Json::Float(f64::INFINITY)),
            b'-' if self.bytes.get(self.at + 1) == Some(&b'I') => {
                self.word("-Infinity").map(|()| Json::Float(f64::NEG_INFINITY))
            }
            _ => self.number(),
        }
    }

    fn number(&mut self) -> Result<Json, Fault> {
        let start = self.at;
        self.eat(b'-');
        let digits = self.digits();
        let first = self.bytes.get(self.at.wrapping_sub(digits));
        if digits == 0 || (digits > 1 && first == Some(&b'0')) {
            return Err(Fault::Syntax);
        }
        let mut float = false;
        if self.peek() == Some(b'.') {
            self.at += 1;
            float = true;
            if self.digits() == 0 {
                return Err(Fault::Syntax);
            }
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            float = true;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            if self.digits() == 0 {
                return Err(Fault::Syntax);
            }
        }
        let text = &self.text[start..self.at];
        if float {
            return text.parse().map(Json::Float).map_err(|_| Fault::Syntax);
        }
        match text.parse() {
            Ok(int) => Ok(Json::Int(int)),
            Err(_) if digits > MAX_INT_DIGITS => Err(Fault::Syntax),
            Err(_) => Ok(Json::Big(text.into())),
        }
    }

    fn digits(&mut self) -> usize {
        let rest = &self.bytes[self.at..];
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        count
    }

    /// Moves past a string; tells whether it holds escapes.
    fn skip_string(&mut self) -> Result<bool, Fault> {
        self.expect(b'"')?;
        let mut escapes = false;
        loop {
            self.at += plain_len(&self.bytes[self.at..]);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(escapes);
                }
                Some(b'\\') => {
                    escapes = true;
                    self.at += 1;
                    match self.peek().ok_or(Fault::Syntax)? {
                        b'u' => {
                            hex(self.text, self.at + 1).ok_or(Fault::Syntax)?;
                            self.at += 5;
                        }
                        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 1,
                        _ => return Err(Fault::Syntax),
                    }
                }
                _ => return Err(Fault::Syntax),
            }
        }
    }

    fn string(&mut self) -> Result<Cow<'a, str>, Fault> {
        let start = self.at + 1;
        if !self.skip_string()? {
            return Ok(Cow::Borrowed(&self.text[start..self.at - 1]));
        }
        unescape(&self.text[start..self.at - 1]).map(Cow::Owned)
    }

    fn shared_string(&mut self) -> Result<Arc<str>, Fault> {
        let string = self.string()?;
        if string.len() > 24 {
            self.take(STRING + string.len())?;
            return Ok(Arc::from(&*string));
        }
        let (first, last) = (string.bytes().next(), string.bytes().last());
        let slot = string.len() * 7
            + usize::from(first.unwrap_or_default()) * 31
            + usize::from(last.unwrap_or_default());
        let recent = self.recent[slot % 64].as_ref();
        if let Some(shared) = recent.filter(|shared| ***shared == *string) {
            return Ok(Arc::clone(shared));
        }
        self.take(STRING + string.len())?;
        let shared: Arc<str> = Arc::from(&*string);
        self.recent[slot % 64] = Some(Arc::clone(&shared));
        Ok(shared)
    }
}
