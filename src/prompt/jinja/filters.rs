//! Filters and tests of Jinja2 where the template engine's own differ, Hugging Face's `tojson`, and
//! the operators that [`super::rewrite`] turns into filters.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::{methods, text};
use crate::prompt::python::OddNumber;
use crate::prompt::repr::{self, Dumps};

pub(super) const ADD: &str = "__add";
pub(super) const CONCAT: &str = "__concat";
pub(super) const MOD: &str = "__mod";
pub(super) const EACH: &str = "__each";

pub(super) fn install(env: &mut Environment<'static>) {
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _state, value| repr::write_text(out, value));
    env.add_filter(ADD, add);
    env.add_filter(CONCAT, |left: &Value, right: &Value| -> Result<String, Error> {
        let mut out = repr::text(left)?;
        repr::write_text(&mut out, right)?;
        Ok(out)
    });
    env.add_filter(MOD, modulo);
    env.add_filter(EACH, text::each);
    env.add_filter("tojson", tojson);
    env.add_filter("string", string);
    env.add_filter("join", join);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("trim", trim);
    env.add_filter("items", items);
    env.add_filter("list", |value: &Value| -> Result<Value, Error> {
        Ok(text::each(value)?.try_iter()?.collect())
    });
    env.add_filter("upper", |value: &Value| repr::text(value).map(|text| text.to_uppercase()));
    env.add_filter("lower", |value: &Value| repr::text(value).map(|text| text.to_lowercase()));
    env.add_filter("capitalize", |value: &Value| {
        repr::text(value).map(|text| text::capitalize(&text))
    });
    env.add_filter("replace", replace);
    install_tests(env);
}

fn install_tests(env: &mut Environment<'static>) {
    let is_float = |value: &Value| {
        (value.is_number() && !value.is_integer())
            || matches!(value.downcast_object_ref(), Some(OddNumber::Float(_)))
    };
    let is_int = |value: &Value| {
        value.is_integer() || matches!(value.downcast_object_ref(), Some(OddNumber::Int(_)))
    };
    let is_bool = |value: &Value| value.kind() == ValueKind::Bool;
    env.add_test("float", move |value: &Value| is_float(value));
    env.add_test("integer", move |value: &Value| is_int(value));
    env.add_test("number", move |value: &Value| is_float(value) || is_int(value) || is_bool(value));
    env.add_test("iterable", |value: &Value| {
        !value.is_undefined() && text::each(value).is_ok() || value.is_undefined()
    });
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
            || value.is_undefined()
    });
    env.add_test("true", |value: &Value| value.kind() == ValueKind::Bool && value.is_true());
    env.add_test("false", |value: &Value| value.kind() == ValueKind::Bool && !value.is_true());
}

/// Python's `+`: no string with anything else, and safe text escapes what it meets.
fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        return Ok(match (left.is_safe(), right.is_safe()) {
            (false, false) => Value::from([a, b].concat()),
            (a_safe, b_safe) => Value::from_safe_string(escape(a, a_safe) + &escape(b, b_safe)),
        });
    }
    if let (Some(a), Some(b)) = (int(left), int(right)) {
        return a.checked_add(b).map(Value::from).ok_or_else(|| operands("+", left, right));
    }
    if let (Some(a), Some(b)) = (float(left), float(right)) {
        return Ok(number(a + b));
    }
    let lists =
        [left, right].map(|value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable));
    if lists == [true; 2] && left.is_tuple() == right.is_tuple() {
        let items: Vec<Value> = left.try_iter()?.chain(right.try_iter()?).collect();
        return Ok(if left.is_tuple() {
            Value::from(minijinja::value::Tuple::from(items))
        } else {
            Value::from(items)
        });
    }
    Err(operands("+", left, right))
}

/// Python's `%`: of numbers, or formatting.
fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(pattern) = left.as_str() {
        let args: Vec<Value> =
            if right.is_tuple() { right.try_iter()?.collect() } else { vec![right.clone()] };
        return format(FormatStyle::Printf, pattern, &args).map(Value::from);
    }
    if let (Some(a), Some(b)) = (int(left), int(right)) {
        let remainder = a.checked_rem(b).ok_or_else(|| operands("%", left, right))?;
        let wraps = remainder != 0 && (remainder < 0) != (b < 0);
        return Ok(Value::from(if wraps { remainder + b } else { remainder }));
    }
    match (float(left), float(right)) {
        (Some(a), Some(b)) if b != 0.0 => Ok(number(a - b * (a / b).floor())),
        _ => Err(operands("%", left, right)),
    }
}

fn int(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

fn float(value: &Value) -> Option<f64> {
    match (value.kind(), value.downcast_object_ref()) {
        (ValueKind::Number, _) => f64::try_from(value.clone()).ok(),
        (ValueKind::Bool, _) => Some(f64::from(u8::from(value.is_true()))),
        (_, Some(OddNumber::Float(value))) => Some(*value),
        _ => None,
    }
}

fn number(value: f64) -> Value {
    if repr::is_plain(value) { value.into() } else { Value::from_object(OddNumber::Float(value)) }
}

fn operands(operator: &str, left: &Value, right: &Value) -> Error {
    let detail =
        format!("unsupported operands for {operator}: {} and {}", left.kind(), right.kind());
    Error::new(ErrorKind::InvalidOperation, detail)
}

/// Markup's escaping.
fn escape(text: &str, safe: bool) -> String {
    if safe {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// Arguments of [`tojson`] in the order in which Hugging Face's filter takes them.
fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let named = kwargs.get::<Option<Value>>(name)?;
        Ok(args.get(at).cloned().or(named).filter(|value| !value.is_none()))
    };
    let ascii = argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = argument(1, "indent")?.map(|indent| match indent.as_str() {
        Some(indent) => indent.to_owned(),
        None => " ".repeat(indent.as_usize().unwrap_or(0).min(64)),
    });
    let separators = argument(2, "separators")?;
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    let (item_separator, key_separator) = match separators {
        Some(pair) => {
            let part = |at| pair.get_item_by_index(at).map(|part| part.to_string());
            (part(0)?, part(1)?)
        }
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    Dumps { ascii, indent, item_separator, key_separator, sort_keys }.text(value)
}

fn string(value: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() { Ok(value.clone()) } else { repr::text(value).map(Value::from) }
}

fn join(
    state: &State<'_, '_>,
    items: &Value,
    separator: Option<&Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let attribute: Option<Value> = kwargs.get("attribute")?;
    let named: Option<Value> = kwargs.get("d")?;
    kwargs.assert_all_used()?;
    let separator = separator.cloned().or(named).map_or(Ok(String::new()), |d| repr::text(&d))?;
    let mut out = String::new();
    for (at, item) in text::each(items)?.try_iter()?.enumerate() {
        if at > 0 {
            out.push_str(&separator);
        }
        match &attribute {
            Some(attribute) => repr::write_text(&mut out, &item.get_item(attribute)?)?,
            None => repr::write_text(&mut out, &item)?,
        }
        state.consume_fuel(separator.len() as u64 / 64)?;
    }
    Ok(out)
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| {
        let detail = format!("{} has no length", value.kind());
        Error::new(ErrorKind::InvalidOperation, detail)
    })
}

fn trim(value: &Value, chars: Option<&str>) -> Result<Value, Error> {
    let trimmed = |text: &str| text::strip(text, chars, true, true).to_owned();
    match value.as_str() {
        Some(text) if value.is_safe() => Ok(Value::from_safe_string(trimmed(text))),
        Some(text) => Ok(trimmed(text).into()),
        None => repr::text(value).map(|text| trimmed(&text).into()),
    }
}

fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => text::items(value),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "can only get item pairs from a mapping")),
    }
}

fn replace(
    state: &State<'_, '_>,
    value: &Value,
    old: &Value,
    new: &Value,
    count: Option<usize>,
) -> Result<String, Error> {
    let (old, new) = (repr::text(old)?, repr::text(new)?);
    text::replace(state, &repr::text(value)?, &old, &new, count)
}
