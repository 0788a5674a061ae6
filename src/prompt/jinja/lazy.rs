//! Iterators: what Python's generators are. Each item comes once, they are true though nothing may
//! come, and they have neither length, index nor a text that another process would print alike.

use std::cmp::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::vec;

use minijinja::value::{DynObject, Enumerator, Kwargs, Object, ObjectRepr, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

#[derive(Debug)]
pub(super) struct Lazy(Mutex<vec::IntoIter<Value>>);

impl Lazy {
    fn next(&self) -> Option<Value> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).next()
    }
}

impl Object for Lazy {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    /// Where there is none, the engine would count its items.
    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let items = Arc::clone(self);
        Enumerator::Iter(Box::new(std::iter::from_fn(move || items.next())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    /// It equals itself alone, and comparing takes nothing from it.
    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        let same = other.downcast_ref::<Lazy>().is_some_and(|other| std::ptr::eq(&**self, other));
        Some(if same { Ordering::Equal } else { Ordering::Less })
    }
}

pub(super) fn is_lazy(value: &Value) -> bool {
    value.downcast_object_ref::<Lazy>().is_some()
}

/// What is left of an iterator, for a loop.
pub(super) fn rest(value: &Value) -> Option<Value> {
    let lazy = value.downcast_object_ref::<Lazy>()?;
    Some(std::iter::from_fn(|| lazy.next()).collect())
}

pub(super) fn lazy(value: &Value) -> Result<Value, Error> {
    let items: Vec<Value> = value.try_iter()?.collect();
    Ok(Value::from_object(Lazy(Mutex::new(items.into_iter()))))
}

/// The filters of Jinja2 that give an iterator.
pub(super) fn install(env: &mut Environment<'static>) {
    env.add_filter("__batch", filters::batch);
    env.add_filter("__map", filters::map);
    env.add_filter("__reject", filters::reject);
    env.add_filter("__rejectattr", filters::rejectattr);
    env.add_filter("__reverse", filters::reverse);
    env.add_filter("__select", filters::select);
    env.add_filter("__selectattr", filters::selectattr);
    env.add_filter("__slice", filters::slice);
    env.add_filter("__unique", filters::unique);
    for (name, own, names) in [
        ("batch", "__batch", &[][..]),
        ("map", "__map", &[]),
        ("reject", "__reject", &[]),
        ("rejectattr", "__rejectattr", &[]),
        ("reverse", "__reverse", &[]),
        ("select", "__select", &[]),
        ("selectattr", "__selectattr", &[]),
        ("slice", "__slice", &[]),
        ("unique", "__unique", &["case_sensitive", "attribute"]),
    ] {
        env.add_filter(
            name,
            move |state: &mut State<'_, '_>, args: Rest<Value>, kwargs: Kwargs| {
                let value = apply(state, own, names, args, kwargs)?;
                // Of these only a string reversed is no iterator.
                if value.kind() == ValueKind::String { Ok(value) } else { lazy(&value) }
            },
        );
    }
}

/// Calls a filter that takes these arguments by name alone: those given by place are named.
pub(super) fn apply(
    state: &mut State<'_, '_>,
    filter: &str,
    names: &[&str],
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let by_place = if names.is_empty() { args.len() } else { args.len().min(1) };
    let mut all = args[..by_place].to_vec();
    let mut named: Vec<(String, Value)> = Vec::new();
    for (at, value) in args[by_place..].iter().enumerate() {
        let name = names.get(at).ok_or_else(|| Error::from(ErrorKind::TooManyArguments))?;
        named.push(((*name).to_owned(), value.clone()));
    }
    for name in kwargs.args() {
        named.push((name.to_owned(), kwargs.get(name)?));
    }
    if !named.is_empty() {
        all.push(Value::from(named.into_iter().collect::<Kwargs>()));
    }
    state.apply_filter(filter, &all)
}
