//! `cycler` and `joiner`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest};
use minijinja::{Environment, Error, ErrorKind, State, Value};

pub(super) fn install(env: &mut Environment<'static>) {
    env.add_function("cycler", |items: Rest<Value>| -> Result<Value, Error> {
        if items.is_empty() {
            return Err(Error::new(ErrorKind::InvalidOperation, "nothing to cycle"));
        }
        Ok(Value::from_object(Cycler { items: items.0, at: AtomicUsize::new(0) }))
    });
    env.add_function("joiner", |separator: Option<Value>, kwargs: Kwargs| -> Result<_, Error> {
        let separator = separator.or(kwargs.get("sep")?).unwrap_or_else(|| Value::from(", "));
        kwargs.assert_all_used()?;
        Ok(Value::from_object(Joiner { separator, used: AtomicBool::new(false) }))
    });
}

#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = self.at.load(Ordering::Relaxed);
        if key.as_str() == Some("current") { self.items.get(at).cloned() } else { None }
    }

    fn call_method(
        self: &Arc<Self>,
        _state: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        let () = minijinja::value::from_args(args)?;
        let at = self.at.load(Ordering::Relaxed);
        match method {
            "next" => {
                self.at.store((at + 1) % self.items.len(), Ordering::Relaxed);
                Ok(self.items[at].clone())
            }
            "reset" => {
                self.at.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

#[derive(Debug)]
struct Joiner {
    separator: Value,
    used: AtomicBool,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let () = minijinja::value::from_args(args)?;
        let used = self.used.swap(true, Ordering::Relaxed);
        Ok(if used { self.separator.clone() } else { Value::from("") })
    }
}
