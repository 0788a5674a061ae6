//! Values as text: Python's `str` and `repr`, and `json.dumps`.

use std::fmt::{self, Write};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::jinja::unforeseen;
use super::python::{BigInt, Dict, Group, Json, View};

/// Containers nested deeper than this are an error, as Python has its own limit.
const MAX_DEPTH: usize = 400;

/// Whether Python prints a float without an exponent.
fn is_plain(value: f64) -> bool {
    value == 0.0 || (1e-4..1e16).contains(&value.abs())
}

/// Python's `repr` of a float.
pub(crate) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    if is_plain(value) {
        return format!("{value:?}");
    }
    let text = format!("{value:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

/// Python's `repr` of a string.
pub(crate) fn write_str(out: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => write!(out, "\\{c}")?,
            ' '..='~' => out.write_char(c)?,
            c if is_printable(c) => out.write_char(c)?,
            c if u32::from(c) < 0x100 => write!(out, "\\x{:02x}", u32::from(c))?,
            c if u32::from(c) < 0x10000 => write!(out, "\\u{:04x}", u32::from(c))?,
            c => write!(out, "\\U{:08x}", u32::from(c))?,
        }
    }
    out.write_char(quote)
}

/// Python and Rust derive this from the same Unicode categories. Past the first character of a
/// string Rust escapes for no other reason.
fn is_printable(c: char) -> bool {
    let mut buffer = [b'a'; 5];
    let len = c.encode_utf8(&mut buffer[1..]).len();
    let text = std::str::from_utf8(&buffer[..=len]).unwrap_or_default();
    text.escape_debug().nth(1) != Some('\\')
}

pub(crate) fn write_json(out: &mut impl Write, value: &Json) -> fmt::Result {
    match value {
        Json::Null => out.write_str("None"),
        Json::Bool(value) => out.write_str(if *value { "True" } else { "False" }),
        Json::Int(value) => write!(out, "{value}"),
        Json::Big(digits) => out.write_str(digits),
        Json::Float(value) => out.write_str(&float(*value)),
        Json::Str(text) => write_str(out, text),
        Json::List(list) => write_json_list(out, &list.0),
        Json::Dict(dict) => write_json_dict(out, dict),
    }
}

pub(crate) fn write_json_list(out: &mut impl Write, items: &[Json]) -> fmt::Result {
    out.write_char('[')?;
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.write_str(", ")?;
        }
        write_json(out, item)?;
    }
    out.write_char(']')
}

pub(crate) fn write_json_dict(out: &mut impl Write, dict: &Dict) -> fmt::Result {
    out.write_char('{')?;
    for (at, (key, value)) in dict.iter().enumerate() {
        if at > 0 {
            out.write_str(", ")?;
        }
        write_str(out, key)?;
        out.write_str(": ")?;
        write_json(out, value)?;
    }
    out.write_char('}')
}

/// A value in the shapes that matter for text.
enum Shape<'a> {
    Undefined,
    None,
    Bool(bool),
    Int(String),
    Float(f64),
    Str(&'a str),
    List,
    Tuple,
    Dict,
    View(&'static str),
    Other,
}

fn shape(value: &Value) -> Shape<'_> {
    if let Some(text) = value.as_str() {
        return Shape::Str(text);
    }
    match value.kind() {
        ValueKind::Undefined => Shape::Undefined,
        ValueKind::None => Shape::None,
        ValueKind::Bool => Shape::Bool(value.is_true()),
        ValueKind::Number if value.is_integer() => Shape::Int(value.to_string()),
        ValueKind::Number => f64::try_from(value.clone()).map_or(Shape::Other, Shape::Float),
        ValueKind::Seq if value.is_tuple() || value.downcast_object_ref::<Group>().is_some() => {
            Shape::Tuple
        }
        ValueKind::Map => Shape::Dict,
        ValueKind::Seq => Shape::List,
        // Two lists that were added come back as an iterable of known length.
        ValueKind::Iterable if value.len().is_some() => {
            value.downcast_object_ref::<View>().map_or(Shape::List, |view| Shape::View(view.name))
        }
        _ => match value.downcast_object_ref() {
            Some(BigInt(digits)) => Shape::Int(digits.to_string()),
            None => Shape::Other,
        },
    }
}

/// Python's `str`.
pub(crate) fn write_text(out: &mut impl Write, value: &Value) -> Result<(), Error> {
    match shape(value) {
        Shape::Undefined => Ok(()),
        Shape::Str(text) => Ok(out.write_str(text)?),
        _ => write_repr(out, value, 0),
    }
}

pub(crate) fn text(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_text(&mut out, value)?;
    Ok(out)
}

fn write_repr(out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
    check_depth(depth)?;
    match shape(value) {
        Shape::Undefined => out.write_str("Undefined")?,
        Shape::None => out.write_str("None")?,
        Shape::Bool(value) => out.write_str(if value { "True" } else { "False" })?,
        Shape::Int(digits) => out.write_str(&digits)?,
        Shape::Float(value) => out.write_str(&float(value))?,
        Shape::Str(text) if value.is_safe() => {
            out.write_str("Markup(")?;
            write_str(out, text)?;
            out.write_char(')')?;
        }
        Shape::Str(text) => write_str(out, text)?,
        Shape::List => {
            out.write_char('[')?;
            write_items(out, value, depth)?;
            out.write_char(']')?;
        }
        Shape::Tuple => {
            out.write_char('(')?;
            write_items(out, value, depth)?;
            out.write_str(if value.len() == Some(1) { ",)" } else { ")" })?;
        }
        Shape::Dict => {
            out.write_char('{')?;
            for (at, key) in value.try_iter()?.enumerate() {
                if at > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.write_char('}')?;
        }
        Shape::View(name) => {
            write!(out, "{name}([")?;
            write_items(out, value, depth)?;
            out.write_str("])")?;
        }
        Shape::Other => return Err(unprintable(value)),
    }
    Ok(())
}

fn write_items(out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
    for (at, item) in value.try_iter()?.enumerate() {
        if at > 0 {
            out.write_str(", ")?;
        }
        write_repr(out, &item, depth + 1)?;
    }
    Ok(())
}

fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "nested too deep"));
    }
    Ok(())
}

/// Python prints an object's address or the like here.
fn unprintable(value: &Value) -> Error {
    unforeseen(&format!("the text of a {}", value.kind()))
}

/// `json.dumps` with the settings that Hugging Face's `tojson` filter passes on.
pub(crate) struct Dumps {
    pub ascii: bool,
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
}

impl Default for Dumps {
    fn default() -> Dumps {
        let (item_separator, key_separator) = (", ".to_owned(), ": ".to_owned());
        Dumps { ascii: false, indent: None, item_separator, key_separator, sort_keys: false }
    }
}

impl Dumps {
    pub fn text(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(&mut out, value, 0)?;
        Ok(out)
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        match shape(value) {
            Shape::None => out.push_str("null"),
            Shape::Bool(value) => out.push_str(if value { "true" } else { "false" }),
            Shape::Int(digits) => out.push_str(&digits),
            Shape::Float(value) => out.push_str(&json_float(value)),
            Shape::Str(text) => self.write_str(out, text),
            Shape::List | Shape::Tuple => self.write_list(out, value, depth)?,
            Shape::Dict => self.write_dict(out, value, depth)?,
            Shape::Undefined | Shape::View(_) | Shape::Other => {
                let detail = format!("{} is not JSON serializable", value.kind());
                return Err(Error::new(ErrorKind::BadSerialization, detail));
            }
        }
        Ok(())
    }

    fn write_list(&self, out: &mut String, list: &Value, depth: usize) -> Result<(), Error> {
        out.push('[');
        let mut some = false;
        for item in list.try_iter()? {
            self.between(out, some, depth + 1);
            some = true;
            self.write(out, &item, depth + 1)?;
        }
        self.close(out, some, depth);
        out.push(']');
        Ok(())
    }

    fn write_dict(&self, out: &mut String, dict: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = dict.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        out.push('{');
        for (at, key) in keys.iter().enumerate() {
            self.between(out, at > 0, depth + 1);
            let text = match shape(key) {
                Shape::Str(text) => text.to_owned(),
                Shape::None => "null".to_owned(),
                Shape::Bool(value) => value.to_string(),
                Shape::Int(digits) => digits,
                Shape::Float(value) => json_float(value),
                _ => return Err(Error::new(ErrorKind::BadSerialization, "no such keys")),
            };
            self.write_str(out, &text);
            out.push_str(&self.key_separator);
            self.write(out, &dict.get_item(key)?, depth + 1)?;
        }
        self.close(out, !keys.is_empty(), depth);
        out.push('}');
        Ok(())
    }

    fn between(&self, out: &mut String, some: bool, depth: usize) {
        if some {
            out.push_str(&self.item_separator);
        }
        self.line(out, depth);
    }

    fn close(&self, out: &mut String, some: bool, depth: usize) {
        if some {
            self.line(out, depth);
        }
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_str(&self, out: &mut String, text: &str) {
        out.push('"');
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            if !(matches!(c, '"' | '\\' | '\0'..' ') || (self.ascii && c > '~')) {
                continue;
            }
            out.push_str(&text[plain..at]);
            plain = at + c.len_utf8();
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
            }
        }
        out.push_str(&text[plain..]);
        out.push('"');
    }
}

fn json_float(value: f64) -> String {
    match float(value).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        other => other.to_owned(),
    }
}
