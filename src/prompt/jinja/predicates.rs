//! Tests of Jinja2 where the template engine's own differ.

use minijinja::value::ValueKind;
use minijinja::{Environment, Value};

use super::{lazy, text};
use crate::prompt::python::BigInt;

pub(super) fn install(env: &mut Environment<'static>) {
    let is_float = |value: &Value| value.is_number() && !value.is_integer();
    let is_int =
        |value: &Value| value.is_integer() || value.downcast_object_ref::<BigInt>().is_some();
    let is_bool = |value: &Value| value.kind() == ValueKind::Bool;
    env.add_test("float", move |value: &Value| is_float(value));
    env.add_test("integer", move |value: &Value| is_int(value));
    env.add_test("number", move |value: &Value| is_float(value) || is_int(value) || is_bool(value));
    env.add_test("iterable", |value: &Value| {
        lazy::is_lazy(value) || value.is_undefined() || text::each(value).is_ok()
    });
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
            || value.is_undefined()
    });
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    env.add_test("true", |value: &Value| value.kind() == ValueKind::Bool && value.is_true());
    env.add_test("false", |value: &Value| value.kind() == ValueKind::Bool && !value.is_true());
}
