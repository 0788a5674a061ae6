//! What Python does with text and with iteration, where Rust or the template engine differ.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// `strip`, `lstrip` and `rstrip`.
pub(super) fn strip<'a>(s: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let unwanted = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let s = if start { s.trim_start_matches(unwanted) } else { s };
    if end { s.trim_end_matches(unwanted) } else { s }
}

/// `split()` without a separator.
pub(super) fn split_space(s: &str, max: Option<usize>, from_right: bool) -> Vec<&str> {
    let mut items = Vec::new();
    let mut rest = strip(s, None, true, true);
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(cut) = cut.filter(|_| max.is_none_or(|max| items.len() < max)) else {
            items.push(rest);
            break;
        };
        if from_right {
            let width = rest[cut..].chars().next().map_or(0, char::len_utf8);
            items.push(&rest[cut + width..]);
            rest = rest[..cut].trim_end_matches(is_space);
        } else {
            items.push(&rest[..cut]);
            rest = rest[cut..].trim_start_matches(is_space);
        }
    }
    if from_right {
        items.reverse();
    }
    items
}

/// `splitlines`.
pub(super) fn lines(s: &str, keep_ends: bool) -> Vec<&str> {
    let is_end =
        |c| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = s;
    while let Some(at) = rest.find(is_end) {
        let width = rest[at..].chars().next().map_or(0, char::len_utf8);
        let end = at + if rest[at..].starts_with("\r\n") { 2 } else { width };
        lines.push(&rest[..if keep_ends { end } else { at }]);
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Ends a rendering that puts together a text or a list of more than so many bytes or items: fuel
/// alone does not see how much one step of a doubling loop makes.
pub(super) fn bounded(len: usize) -> Result<(), Error> {
    const MOST: usize = 16 << 20;
    if len <= MOST { Ok(()) } else { Err(Error::from(ErrorKind::OutOfFuel)) }
}

pub(super) fn count(s: &str, what: &str) -> usize {
    if what.is_empty() { s.chars().count() + 1 } else { s.matches(what).count() }
}

/// `str.replace`, paid for before it grows.
pub(super) fn replace(
    state: &State<'_, '_>,
    s: &str,
    old: &str,
    new: &str,
    count: Option<usize>,
) -> Result<String, Error> {
    let times = self::count(s, old).min(count.unwrap_or(usize::MAX));
    bounded(s.len().saturating_add(times.saturating_mul(new.len())))?;
    state.consume_fuel(times.saturating_mul(new.len()) as u64 / 16)?;
    Ok(s.replacen(old, new, times))
}

/// `str.title`: a letter after one that is no letter begins a word.
pub(super) fn title(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    let mut inside = false;
    for c in s.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.push_str(&titlecase(c))
        }
        inside = c.is_uppercase() || c.is_lowercase();
    }
    out
}

/// The first character as a title has it, the others lower: whether a sigma is a final one depends
/// on what is before it.
pub(super) fn capitalize(s: &str) -> String {
    let Some(first) = s.chars().next() else { return String::new() };
    let lower = s.to_lowercase();
    let mut out = titlecase(first);
    out.extend(lower.chars().skip(first.to_lowercase().count()));
    out
}

/// Unicode's title case. It differs from upper case where that is several letters, and in digraphs,
/// Greek letters with a subscript, and Georgian, which has no capitals in titles.
fn titlecase(c: char) -> String {
    let single = |code| char::from_u32(code).unwrap_or(c).to_string();
    match c {
        '\u{1c4}'..='\u{1cc}' => single((u32::from(c) - 0x1c4) / 3 * 3 + 0x1c5),
        '\u{1f1}'..='\u{1f3}' => single(0x1f2),
        '\u{10d0}'..='\u{10ff}' => c.to_string(),
        '\u{1f80}'..='\u{1faf}' => single(u32::from(c) | 8),
        '\u{1fb3}' | '\u{1fc3}' | '\u{1ff3}' => single(u32::from(c) + 9),
        '\u{1fbc}' | '\u{1fcc}' | '\u{1ffc}' => c.to_string(),
        '\u{149}' => c.to_uppercase().collect(),
        '\u{1fb2}' | '\u{1fb4}' | '\u{1fb7}' | '\u{1fc2}' | '\u{1fc4}' | '\u{1fc7}'
        | '\u{1ff2}' | '\u{1ff4}' | '\u{1ff7}' => {
            c.to_uppercase().map(|c| if c == '\u{399}' { '\u{345}' } else { c }).collect()
        }
        c => {
            let mut upper = c.to_uppercase();
            let first = upper.next().into_iter();
            first.chain(upper.flat_map(char::to_lowercase)).collect()
        }
    }
}

pub(super) fn swapcase(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    for c in s.chars() {
        if c.is_uppercase() { out.extend(c.to_lowercase()) } else { out.extend(c.to_uppercase()) }
    }
    out
}

/// The key-value tuples of a dict.
pub(super) fn items(dict: &Value) -> Result<Value, Error> {
    let pair = |key: Value| {
        let value = dict.get_item(&key)?;
        Ok(Value::from(Tuple::from([key, value])))
    };
    dict.try_iter()?.map(pair).collect()
}

/// What a loop goes over: strings by character; what Python does not iterate is an error.
pub(super) fn each(value: &Value) -> Result<Value, Error> {
    if let Some(rest) = super::lazy::rest(value) {
        return Ok(rest);
    }
    if let Some(text) = value.to_str() {
        let len = text.chars().count();
        return Ok(Value::from_object(Chars { text, len }));
    }
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Plain => {
            let detail = format!("{} is not iterable", value.kind());
            Err(Error::new(ErrorKind::InvalidOperation, detail))
        }
        _ => Ok(value.clone()),
    }
}

/// The characters of a string.
#[derive(Debug)]
struct Chars {
    text: Arc<str>,
    len: usize,
}

impl Object for Chars {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let (text, mut at) = (Arc::clone(&self.text), 0);
        let chars = std::iter::from_fn(move || {
            let c = text.get(at..)?.chars().next()?;
            at += c.len_utf8();
            Some(Value::from(c))
        });
        Enumerator::Iter(Box::new(Sized { chars, left: self.len }))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.len)
    }
}

/// An iterator that knows its length.
struct Sized<I> {
    chars: I,
    left: usize,
}

impl<I: Iterator> Iterator for Sized<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        self.left = self.left.saturating_sub(1);
        self.chars.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}
