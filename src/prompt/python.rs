//! Python's values as a template sees them: dicts and lists that print, index and compare as
//! Python's do.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, ValueKind};

use super::repr;

/// An object of a few entries.
pub(crate) fn object<const N: usize>(entries: [(&str, Json); N]) -> Json {
    let mut dict = Dict::default();
    entries.into_iter().for_each(|(key, value)| dict.set(key, value));
    Json::dict(dict)
}

/// A value read from JSON. Cloning shares.
#[derive(Clone, Debug)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Int(i64),
    /// The digits of an integer beyond 64 bits.
    Big(Arc<str>),
    Float(f64),
    Str(Arc<str>),
    List(Arc<List>),
    Dict(Arc<Dict>),
}

impl Json {
    pub fn str(text: &str) -> Json {
        Json::Str(text.into())
    }

    pub fn list(items: Vec<Json>) -> Json {
        Json::List(Arc::new(List(items)))
    }

    pub fn dict(dict: Dict) -> Json {
        Json::Dict(Arc::new(dict))
    }

    pub fn as_str(&self) -> Option<&str> {
        if let Json::Str(text) = self { Some(text) } else { None }
    }

    pub fn as_list(&self) -> Option<&[Json]> {
        if let Json::List(list) = self { Some(&list.0) } else { None }
    }

    pub fn as_dict(&self) -> Option<&Dict> {
        if let Json::Dict(dict) = self { Some(dict) } else { None }
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Json::Null)
    }

    /// Python's truth value.
    pub fn is_true(&self) -> bool {
        match self {
            Json::Null => false,
            Json::Bool(value) => *value,
            Json::Int(value) => *value != 0,
            Json::Float(value) => *value != 0.0,
            Json::Big(_) => true,
            Json::Str(text) => !text.is_empty(),
            Json::List(list) => !list.0.is_empty(),
            Json::Dict(dict) => !dict.entries.is_empty(),
        }
    }

    pub fn to_value(&self) -> Value {
        match self {
            Json::Null => Value::from(()),
            Json::Bool(value) => Value::from(*value),
            Json::Int(value) => Value::from(*value),
            Json::Big(digits) => big(digits),
            Json::Float(value) => Value::from(*value),
            Json::Str(text) => Value::from(Arc::clone(text)),
            Json::List(list) => Value::from_dyn_object(Arc::clone(list)),
            Json::Dict(dict) => Value::from_dyn_object(Arc::clone(dict)),
        }
    }
}

fn big(digits: &Arc<str>) -> Value {
    match digits.parse::<i128>() {
        Ok(int) => Value::from(int),
        Err(_) => Value::from_object(BigInt(Arc::clone(digits))),
    }
}

/// An integer beyond 128 bits. It prints and equals its like; arithmetic on it is an error.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BigInt(pub Arc<str>);

impl Object for BigInt {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<std::cmp::Ordering> {
        let other = other.downcast_ref::<BigInt>()?;
        (**self == *other).then_some(std::cmp::Ordering::Equal)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What `d.items` without a call is: it is there, whatever keys the dict has, and no more is known.
#[derive(Debug)]
struct Method;

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// Methods of Python's dict.
const METHODS: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];

#[derive(Debug, Default)]
pub(crate) struct List(pub Vec<Json>);

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        // An attribute such as `.role` of a list is asked for by name.
        if key.kind() == ValueKind::Bool {
            return self.0.get(usize::from(key.is_true())).map(Json::to_value);
        }
        if key.kind() != ValueKind::Number {
            return None;
        }
        self.0.get(key.as_usize()?).map(Json::to_value)
    }

    fn get_value_by_str(self: &Arc<Self>, _key: &str) -> Option<Value> {
        None
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        repr::write_json_list(f, &self.0)
    }
}

/// Keys in the order of their first appearance.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dict {
    entries: Vec<(Arc<str>, Json)>,
    /// Places of the keys, once there are more than [`Dict::SCAN`].
    index: Option<HashMap<Arc<str>, usize>>,
}

impl Dict {
    /// Entries that are searched one by one.
    pub const SCAN: usize = 16;

    pub fn insert(&mut self, key: Arc<str>, value: Json) {
        if let Some(at) = self.find(&key) {
            self.entries[at].1 = value;
            return;
        }
        if let Some(index) = &mut self.index {
            index.insert(Arc::clone(&key), self.entries.len());
        }
        self.entries.push((key, value));
        if self.index.is_none() && self.entries.len() > Self::SCAN {
            let places = self.entries.iter().enumerate();
            let index = places.map(|(at, (key, _))| (Arc::clone(key), at)).collect();
            self.index = Some(index);
        }
    }

    pub fn set(&mut self, key: &str, value: Json) {
        self.insert(key.into(), value);
    }

    pub fn get(&self, key: &str) -> Option<&Json> {
        self.find(key).map(|at| &self.entries[at].1)
    }

    /// The value of a key, where it is there and not null.
    pub fn given(&self, key: &str) -> Option<&Json> {
        self.get(key).filter(|value| !value.is_null())
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Json)> {
        self.entries.iter().map(|(key, value)| (key, value))
    }

    pub fn shrink_to_fit(&mut self) {
        self.entries.shrink_to_fit();
    }

    fn find(&self, key: &str) -> Option<usize> {
        match &self.index {
            Some(index) => index.get(key).copied(),
            None => self.entries.iter().position(|(known, _)| **known == *key),
        }
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key.as_str()?).map(Json::to_value)
    }

    /// An attribute: methods come before keys.
    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        if METHODS.contains(&key) {
            return Some(Value::from_object(Method));
        }
        self.get(key).map(Json::to_value)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(
            self.entries.iter().map(|(key, _)| Value::from(Arc::clone(key))).collect(),
        )
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        repr::write_json_dict(f, self)
    }
}

/// What a dict's `keys`, `values` and `items` give: it has a length, but no places.
#[derive(Debug)]
pub(crate) struct View {
    /// Python's name of its type.
    pub name: &'static str,
    pub items: Vec<Value>,
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    /// Where there is none, the engine would count its items.
    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }
}

/// A group that the filter `groupby` made: a tuple whose two items have names.
#[derive(Debug)]
pub(crate) struct Group(pub [Value; 2]);

impl Object for Group {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = match key.as_str() {
            Some("grouper") => 0,
            Some("list") => 1,
            _ => key.as_usize()?,
        };
        self.0.get(at).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}
