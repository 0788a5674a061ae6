//! Filters and tests of Jinja2 where the template engine's own differ, Hugging Face's `tojson`, and
//! the operators that [`super::rewrite`] turns into filters.

use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

use super::{lazy, methods, numbers, text, unforeseen};
use crate::prompt::python::Group;
use crate::prompt::repr::{self, Dumps};

pub(super) const ADD: &str = "__add";
pub(super) const CONCAT: &str = "__concat";
pub(super) const MOD: &str = "__mod";
pub(super) const EACH: &str = "__each";

/// Filters of Jinja2 that are not here.
const UNFORESEEN: [&str; 13] = [
    "attr",
    "center",
    "filesizeformat",
    "forceescape",
    "pprint",
    "random",
    "striptags",
    "truncate",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

pub(super) fn install(env: &mut Environment<'static>) {
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _state, value| repr::write_text(out, value));
    env.add_filter(ADD, numbers::add);
    env.add_filter(CONCAT, |left: &Value, right: &Value| -> Result<String, Error> {
        let mut out = repr::text(left)?;
        text::bounded(out.len() + right.as_str().map_or(0, str::len))?;
        repr::write_text(&mut out, right)?;
        Ok(out)
    });
    env.add_filter(MOD, numbers::modulo);
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
    env.add_filter("indent", indent);
    env.add_filter("int", numbers::to_int);
    env.add_filter("float", numbers::to_float);
    env.add_filter("round", numbers::round);
    env.add_filter("format", format);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("last", last);
    env.add_filter("__dictsort", filters::dictsort);
    env.add_filter("__groupby", filters::groupby);
    env.add_filter("__max", filters::max);
    env.add_filter("__min", filters::min);
    env.add_filter("__sort", filters::sort);
    env.add_filter("groupby", groupby);
    for (name, own, names) in [
        ("dictsort", "__dictsort", &["case_sensitive", "by", "reverse"][..]),
        ("max", "__max", &["case_sensitive", "attribute"]),
        ("min", "__min", &["case_sensitive", "attribute"]),
        ("sort", "__sort", &["reverse", "case_sensitive", "attribute"]),
    ] {
        env.add_filter(
            name,
            move |state: &mut State<'_, '_>, args: Rest<Value>, kwargs: Kwargs| {
                lazy::apply(state, own, names, args, kwargs)
            },
        );
    }
    for name in UNFORESEEN {
        env.add_filter(name, move |_: &Value, _: Rest<Value>| -> Result<Value, Error> {
            Err(unforeseen(name))
        });
    }
}

fn not_text() -> Error {
    Error::new(ErrorKind::InvalidOperation, "a string is wanted")
}

/// One argument of a filter, given by place or by name; none where it is none.
fn argument(
    args: &Rest<Value>,
    kwargs: &Kwargs,
    at: usize,
    name: &str,
) -> Result<Option<Value>, Error> {
    let named = kwargs.get::<Option<Value>>(name)?;
    Ok(args.get(at).cloned().or(named).filter(|value| !value.is_none()))
}

/// A text, or that many spaces.
fn indentation(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(value.as_usize().unwrap_or(0).min(1024)),
    }
}

/// Takes its arguments in the order of Hugging Face's filter.
fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |at, name| argument(&args, &kwargs, at, name);
    let ascii = argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = argument(1, "indent")?.as_ref().map(indentation);
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
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let separator = args.first().cloned().map_or_else(|| kwargs.get("d"), |d| Ok(Some(d)))?;
    let attribute = argument(&args, &kwargs, 1, "attribute")?;
    kwargs.assert_all_used()?;
    let separator = separator.map_or(Ok(String::new()), |d: Value| repr::text(&d))?;
    let mut out = String::new();
    for (at, item) in text::each(items)?.try_iter()?.enumerate() {
        if at > 0 {
            out.push_str(&separator);
        }
        match &attribute {
            Some(path) => match path.as_str() {
                Some(path) => repr::write_text(&mut out, &at_path(item, path)?)?,
                None => repr::write_text(&mut out, &item.get_item(path)?)?,
            },
            None => repr::write_text(&mut out, &item)?,
        }
        text::bounded(out.len())?;
        state.consume_fuel(separator.len() as u64 / 64)?;
    }
    Ok(out)
}

/// What is at a path of names and places with dots between them.
fn at_path(item: Value, path: &str) -> Result<Value, Error> {
    path.split('.').try_fold(item, |item, step| match step.parse::<usize>() {
        Ok(at) => item.get_item_by_index(at),
        Err(_) => item.get_item(&Value::from(step)),
    })
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

/// Takes what a `%` takes, in a list.
fn format(pattern: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    if kwargs.args().next().is_some() {
        return Err(unforeseen("a format with names"));
    }
    numbers::formatted(FormatStyle::Printf, &repr::text(pattern)?, args.0)
}

fn default(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let given = |at, name| -> Result<Option<Value>, Error> {
        Ok(args.get(at).cloned().or(if kwargs.has(name) { Some(kwargs.get(name)?) } else { None }))
    };
    let other = given(0, "default_value")?.unwrap_or_else(|| Value::from(""));
    let falsy = given(1, "boolean")?.is_some_and(|falsy| falsy.is_true());
    kwargs.assert_all_used()?;
    if args.len() > 2 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    Ok(if value.is_undefined() || (falsy && !value.is_true()) { other } else { value.clone() })
}

fn groupby(state: &mut State<'_, '_>, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let names = ["attribute", "default", "case_sensitive"];
    let groups = lazy::apply(state, "__groupby", &names, args, kwargs)?;
    let group = |group: Value| -> Result<Value, Error> {
        let pair = [group.get_item_by_index(0)?, group.get_item_by_index(1)?];
        Ok(Value::from_object(Group(pair)))
    };
    groups.try_iter()?.map(group).collect()
}

fn last(value: Value) -> Result<Value, Error> {
    if lazy::is_lazy(&value) {
        return Err(Error::new(ErrorKind::InvalidOperation, "an iterator has no last item"));
    }
    filters::last(value)
}

fn trim(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let chars = argument(&args, &kwargs, 0, "chars")?;
    kwargs.assert_all_used()?;
    let chars = chars.as_ref().map(|chars| chars.as_str().ok_or_else(not_text)).transpose()?;
    let trimmed = |text: &str| text::strip(text, chars, true, true).to_owned();
    match value.as_str() {
        Some(text) if value.is_safe() => Ok(Value::from_safe_string(trimmed(text))),
        Some(text) => Ok(trimmed(text).into()),
        None => repr::text(value).map(|text| trimmed(&text).into()),
    }
}

fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => lazy::lazy(&Value::from(Vec::<Value>::new())),
        ValueKind::Map => lazy::lazy(&text::items(value)?),
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

fn indent(
    state: &State<'_, '_>,
    value: &Value,
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let argument = |at, name| argument(&args, &kwargs, at, name);
    let by = argument(0, "width")?.as_ref().map_or_else(|| " ".repeat(4), indentation);
    let first = argument(1, "first")?.is_some_and(|first| first.is_true());
    let blank = argument(2, "blank")?.is_some_and(|blank| blank.is_true());
    kwargs.assert_all_used()?;
    let whole = value.as_str().ok_or_else(not_text)?.to_owned() + "\n";
    let lines = text::lines(&whole, false);
    state.consume_fuel((lines.len() * (by.len() + 1)) as u64 / 16)?;
    let mut out = String::with_capacity(whole.len() + lines.len() * by.len());
    for (at, line) in lines.into_iter().enumerate() {
        if at > 0 {
            out.push('\n');
        }
        if if at == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&by);
        }
        out.push_str(line);
    }
    Ok(out)
}
