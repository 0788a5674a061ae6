//! Python's operators, and what Jinja2's filters do with numbers.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::{text, unforeseen};
use crate::prompt::python::{BigInt, View};
use crate::prompt::repr;

/// Python's `+`: no string with anything else, and safe text escapes what it meets.
pub(super) fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        text::bounded(a.len() + b.len())?;
        return Ok(match (left.is_safe(), right.is_safe()) {
            (false, false) => Value::from([a, b].concat()),
            (a_safe, b_safe) => Value::from_safe_string(escape(a, a_safe) + &escape(b, b_safe)),
        });
    }
    if let (Some(a), Some(b)) = (int(left), int(right)) {
        return a.checked_add(b).map(Value::from).ok_or_else(|| unforeseen("so large a number"));
    }
    if let (Some(a), Some(b)) = (float(left), float(right)) {
        return Ok((a + b).into());
    }
    let lists = [left, right].map(|value| match value.kind() {
        ValueKind::Seq => true,
        ValueKind::Iterable => {
            value.len().is_some() && value.downcast_object_ref::<View>().is_none()
        }
        _ => false,
    });
    if lists == [true; 2] && left.is_tuple() == right.is_tuple() {
        // A list's item takes a few dozen bytes.
        text::bounded((left.len().unwrap_or(0) + right.len().unwrap_or(0)).saturating_mul(32))?;
        let items: Vec<Value> = left.try_iter()?.chain(right.try_iter()?).collect();
        return Ok(if left.is_tuple() {
            Value::from(Tuple::from(items))
        } else {
            Value::from(items)
        });
    }
    Err(operands("+", left, right))
}

/// Python's `%`: of numbers, or formatting.
pub(super) fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(pattern) = left.as_str() {
        let args = if right.is_tuple() { right.try_iter()?.collect() } else { vec![right.clone()] };
        return formatted(FormatStyle::Printf, pattern, args);
    }
    if let (Some(a), Some(b)) = (int(left), int(right)) {
        let remainder = a.checked_rem(b).ok_or_else(|| operands("%", left, right))?;
        let wraps = remainder != 0 && (remainder < 0) != (b < 0);
        return Ok(Value::from(if wraps { remainder + b } else { remainder }));
    }
    match (float(left), float(right)) {
        (Some(a), Some(b)) if b != 0.0 => Ok((a - b * (a / b).floor()).into()),
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
    match value.kind() {
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        _ => None,
    }
}

/// A format. Python has more of them than the formatter: what that does not take is not reproduced.
pub(super) fn formatted(
    style: FormatStyle,
    pattern: &str,
    args: Vec<Value>,
) -> Result<Value, Error> {
    let args = printable(args)?;
    format(style, pattern, &args).map(Value::from).map_err(|_| unforeseen("this format"))
}

/// Arguments of a format: what the formatter would print in another way than Python is text.
fn printable(args: Vec<Value>) -> Result<Vec<Value>, Error> {
    let is_plain = |value: &Value| value.as_str().is_some() || value.is_integer();
    let text = |value: Value| match float(&value) {
        _ if is_plain(&value) => Ok(value),
        Some(number) if value.is_number() && (1e-4..1e16).contains(&number.abs()) => Ok(value),
        _ => repr::text(&value).map(Value::from),
    };
    args.into_iter().map(text).collect()
}

/// The filter `int`.
pub(super) fn to_int(
    value: &Value,
    default: Option<Value>,
    base: Option<i64>,
) -> Result<Value, Error> {
    if base.is_some_and(|base| base != 10) {
        return Err(unforeseen("int with a base"));
    }
    if let Some(int) = int(value) {
        return Ok(int.into());
    }
    let parsed = match value.as_str() {
        Some(text) => {
            let text = text::strip(text, None, true, true);
            if let Ok(int) = text.parse::<i128>() {
                return Ok(int.into());
            }
            text.parse::<f64>().ok()
        }
        None => float(value),
    };
    match parsed.map(f64::trunc) {
        Some(whole) if whole.abs() < 1e38 => Ok((whole as i128).into()),
        _ => Ok(default.unwrap_or_else(|| 0.into())),
    }
}

/// The filter `float`.
pub(super) fn to_float(value: &Value, default: Option<Value>) -> Value {
    let parsed = match value.as_str() {
        Some(text) => text::strip(text, None, true, true).parse::<f64>().ok(),
        None => float(value),
    };
    parsed.map_or_else(|| default.unwrap_or_else(|| Value::from(0.0)), Value::from)
}

/// The filter `round`, which gives a float; halves go to the even side.
pub(super) fn round(
    value: &Value,
    precision: Option<usize>,
    method: Option<&str>,
) -> Result<Value, Error> {
    let number = float(value).ok_or_else(|| operands("round", value, value))?;
    let digits = precision.unwrap_or(0).min(300);
    let scale = 10f64.powi(i32::try_from(digits).unwrap_or(0));
    Ok(match method.unwrap_or("common") {
        "common" if int(value).is_some() => int(value).map_or(Value::UNDEFINED, Value::from),
        "common" => format!("{number:.digits$}").parse::<f64>().unwrap_or(number).into(),
        "ceil" => ((number * scale).ceil() / scale).into(),
        "floor" => ((number * scale).floor() / scale).into(),
        _ => return Err(operands("round", value, value)),
    })
}

fn operands(operator: &str, left: &Value, right: &Value) -> Error {
    let is_big = |value: &Value| value.downcast_object_ref::<BigInt>().is_some();
    if is_big(left) || is_big(right) {
        return unforeseen("so large a number");
    }
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
