//! Methods of Python's `str`, `dict` and `list`. What changes its object is not among them: the
//! engine's sandbox refuses those too.

use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::{numbers, text, unforeseen};
use crate::prompt::python::View;
use crate::prompt::repr;

/// Methods of Python's str that are not here.
const UNFORESEEN: [&str; 9] = [
    "casefold",
    "encode",
    "expandtabs",
    "format_map",
    "isidentifier",
    "isprintable",
    "istitle",
    "maketrans",
    "translate",
];

/// Methods that may be told where in the string to begin and to end.
const RANGED: [&str; 7] = ["count", "endswith", "find", "index", "rfind", "rindex", "startswith"];

pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(string) = value.as_str() {
        // Each method reads its string, and some write one of its size.
        state.consume_fuel(string.len() as u64 / 8)?;
        return of_str(state, string, method, args);
    }
    match value.kind() {
        ValueKind::Map => of_dict(value, method, args),
        ValueKind::Seq => of_list(value, method, args),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn of_str(state: &State<'_, '_>, s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let chars = || -> Result<Option<&str>, Error> { Ok(from_args::<(Option<&str>,)>(args)?.0) };
    let one = || -> Result<&str, Error> { Ok(from_args::<(&str,)>(args)?.0) };
    let none = || from_args::<()>(args);
    if RANGED.contains(&method) && args.len() > 1 {
        return Err(unforeseen("a part of a string"));
    }
    Ok(match method {
        "strip" => text::strip(s, chars()?, true, true).into(),
        "lstrip" => text::strip(s, chars()?, true, false).into(),
        "rstrip" => text::strip(s, chars()?, false, true).into(),
        "split" | "rsplit" => split(s, method == "rsplit", args)?,
        "splitlines" => splitlines(s, args)?,
        "startswith" => affix(s, args, |s, affix| s.starts_with(affix))?.into(),
        "endswith" => affix(s, args, |s, affix| s.ends_with(affix))?.into(),
        "removeprefix" => s.strip_prefix(one()?).unwrap_or(s).into(),
        "removesuffix" => s.strip_suffix(one()?).unwrap_or(s).into(),
        "replace" => replace(state, s, args)?,
        "join" => join(state, s, args)?,
        "find" | "rfind" | "index" | "rindex" => find(s, method, one()?)?,
        "count" => text::count(s, one()?).into(),
        "partition" => partition(s, one()?, s.find(one()?), false)?,
        "rpartition" => partition(s, one()?, s.rfind(one()?), true)?,
        "format" => numbers::formatted(FormatStyle::StrFormat, s, args.to_vec())?,
        "zfill" => zfill(state, s, args)?,
        "ljust" | "rjust" | "center" => pad(state, s, method, args)?,
        _ => {
            if !UNFORESEEN.contains(&method) {
                none()?;
            }
            return plain(s, method);
        }
    })
}

/// The methods without arguments.
fn plain(s: &str, method: &str) -> Result<Value, Error> {
    let every = |test: fn(char) -> bool| !s.is_empty() && s.chars().all(test);
    let cased = |c: char| c.is_uppercase() || c.is_lowercase();
    Ok(match method {
        "upper" => s.to_uppercase().into(),
        "lower" => s.to_lowercase().into(),
        "title" => text::title(s).into(),
        "capitalize" => text::capitalize(s).into(),
        "swapcase" => text::swapcase(s).into(),
        "isspace" => every(text::is_space).into(),
        "isdigit" | "isdecimal" | "isnumeric" => is_number(s, method)?.into(),
        "isalnum" => every(char::is_alphanumeric).into(),
        "isalpha" => every(char::is_alphabetic).into(),
        "isascii" => s.is_ascii().into(),
        "islower" => (s.chars().any(cased) && !s.chars().any(char::is_uppercase)).into(),
        "isupper" => (s.chars().any(cased) && !s.chars().any(char::is_lowercase)).into(),
        name if UNFORESEEN.contains(&name) => return Err(unforeseen(name)),
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

/// Which numerals that are no ASCII digits count differs from method to method.
fn is_number(s: &str, method: &str) -> Result<bool, Error> {
    if s.is_empty() || s.chars().any(|c| !c.is_numeric() && (c.is_ascii() || !c.is_alphabetic())) {
        return Ok(false);
    }
    if s.is_ascii() { Ok(true) } else { Err(unforeseen(method)) }
}

fn split(s: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (sep, max, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let sep = sep.or(kwargs.get::<Option<Value>>("sep")?).filter(|sep| !sep.is_none());
    let max = max.or(kwargs.get("maxsplit")?).and_then(|max| usize::try_from(max).ok());
    kwargs.assert_all_used()?;
    let items: Vec<&str> = match &sep {
        None => text::split_space(s, max, from_right),
        Some(sep) => {
            let sep = sep.as_str().filter(|sep| !sep.is_empty()).ok_or_else(wrong_argument)?;
            let max = max.map_or(usize::MAX, |max| max.saturating_add(1));
            if from_right {
                let mut items: Vec<_> = s.rsplitn(max, sep).collect();
                items.reverse();
                items
            } else {
                s.splitn(max, sep).collect()
            }
        }
    };
    Ok(items.into_iter().map(Value::from).collect())
}

fn splitlines(s: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.or(kwargs.get("keepends")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    Ok(text::lines(s, keep).into_iter().map(Value::from).collect())
}

/// `startswith` and `endswith`: one string or a tuple of them.
fn affix(s: &str, args: &[Value], test: fn(&str, &str) -> bool) -> Result<bool, Error> {
    let (affix,): (&Value,) = from_args(args)?;
    if let Some(affix) = affix.as_str() {
        return Ok(test(s, affix));
    }
    if !affix.is_tuple() {
        return Err(wrong_argument());
    }
    for affix in affix.try_iter()? {
        if test(s, affix.as_str().ok_or_else(wrong_argument)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn replace(state: &State<'_, '_>, s: &str, args: &[Value]) -> Result<Value, Error> {
    let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
    text::replace(state, s, old, new, count.and_then(|count| usize::try_from(count).ok()))
        .map(Value::from)
}

fn join(state: &State<'_, '_>, s: &str, args: &[Value]) -> Result<Value, Error> {
    let (items,): (&Value,) = from_args(args)?;
    let mut out = String::new();
    for (at, item) in text::each(items)?.try_iter()?.enumerate() {
        if at > 0 {
            out.push_str(s);
        }
        out.push_str(item.as_str().ok_or_else(wrong_argument)?);
        text::bounded(out.len())?;
        state.consume_fuel((s.len() + 64) as u64 / 64)?;
    }
    Ok(out.into())
}

fn find(s: &str, method: &str, what: &str) -> Result<Value, Error> {
    let found = if method.starts_with('r') { s.rfind(what) } else { s.find(what) };
    match found {
        Some(at) => Ok(s[..at].chars().count().into()),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
    }
}

fn partition(s: &str, sep: &str, at: Option<usize>, right: bool) -> Result<Value, Error> {
    if sep.is_empty() {
        return Err(wrong_argument());
    }
    let parts = match at {
        Some(at) => [&s[..at], sep, &s[at + sep.len()..]],
        None if right => ["", "", s],
        None => [s, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from).to_vec())))
}

fn zfill(state: &State<'_, '_>, s: &str, args: &[Value]) -> Result<Value, Error> {
    let (width,): (usize,) = from_args(args)?;
    let missing = width.saturating_sub(s.chars().count());
    state.consume_fuel(missing as u64)?;
    let (sign, digits) = s.split_at(usize::from(s.starts_with(['+', '-'])));
    Ok(format!("{sign}{}{digits}", "0".repeat(missing)).into())
}

fn pad(state: &State<'_, '_>, s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<char>) = from_args(args)?;
    let fill = fill.unwrap_or(' ').to_string();
    let missing = width.saturating_sub(s.chars().count());
    state.consume_fuel(missing as u64)?;
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        // Python gives the odd one to the left where the width is odd.
        _ => missing / 2 + (missing & width & 1),
    };
    Ok(format!("{}{s}{}", fill.repeat(left), fill.repeat(missing - left)).into())
}

fn of_dict(dict: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let object = dict.as_object().ok_or_else(|| Error::from(ErrorKind::UnknownMethod))?;
    match method {
        "get" => {
            let (key, default): (&Value, Option<Value>) = from_args(args)?;
            Ok(object.get_value(key).unwrap_or_else(|| default.unwrap_or_else(|| ().into())))
        }
        "items" | "keys" | "values" | "copy" => {
            let () = from_args(args)?;
            Ok(match method {
                "items" => view("dict_items", text::items(dict)?.try_iter()?.collect()),
                "values" => {
                    let values = dict.try_iter()?.map(|key| dict.get_item(&key));
                    view("dict_values", values.collect::<Result<_, _>>()?)
                }
                "keys" => view("dict_keys", dict.try_iter()?.collect()),
                _ => dict.clone(),
            })
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn view(name: &'static str, items: Vec<Value>) -> Value {
    Value::from_object(View { name, items })
}

fn of_list(list: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "count" => {
            let (what,): (&Value,) = from_args(args)?;
            Ok(list.try_iter()?.filter(|item| item == what).count().into())
        }
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            list.try_iter()?.position(|item| item == *what).map(Value::from).ok_or_else(|| {
                let what = repr::text(what).unwrap_or_default();
                Error::new(ErrorKind::InvalidOperation, format!("{what} is not in list"))
            })
        }
        "copy" => from_args::<()>(args).map(|()| list.clone()),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn wrong_argument() -> Error {
    Error::new(ErrorKind::InvalidOperation, "argument of a wrong type or value")
}
