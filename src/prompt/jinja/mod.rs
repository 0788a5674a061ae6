//! A chat template: Jinja2 in Hugging Face's sandbox, on top of minijinja.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `rewrite` | changes to a template's text, so that its operators are Python's |
//! | `filters`, `predicates`, `methods` | those that differ, on top of `text` and `numbers` |
//! | `lazy`, `globals` | iterators; `cycler` and `joiner` |
//! | `format` | the form of content that a template wants |
//! | `names` | the variables that it takes from outside |
//! | `clock` | `strftime_now` |
//!
//! Only templates of the configuration are compiled, never one of a request.

#[cfg(test)]
mod checks;
mod clock;
#[cfg(test)]
mod differential;
mod filters;
mod format;
mod globals;
mod lazy;
mod methods;
mod names;
mod numbers;
mod predicates;
mod rewrite;
mod text;
mod tree;

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use minijinja::machinery::parse;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::python::{Json, object};
use super::{Job, Limits};
use crate::types::Skip;

pub(crate) use clock::Moment;
pub(crate) use format::ContentFormat;
pub(crate) use text::is_space;

const NAME: &str = "chat_template";

/// Instructions of one rendering, and what its values cost: some tenths of a second, and tens of
/// thousands of messages.
const FUEL: u64 = 5_000_000;

/// The variable that carries a rendering's own state to functions.
const RUN: &str = "__run";

pub(crate) struct Template {
    env: Environment<'static>,
    source: String,
    undeclared: HashSet<String>,
    /// A macro reads `varargs` or `kwargs`, which minijinja does not have.
    takes_any_arguments: bool,
    has_generation_blocks: bool,
    has_odd_else: bool,
    pub format: ContentFormat,
}

/// Something whose outcome in Python is not known here: the request is not reproduced, which is
/// another thing than one that the engine refuses.
#[derive(Debug, thiserror::Error)]
#[error("not reproduced")]
struct Unforeseen;

pub(crate) fn unforeseen(what: &str) -> Error {
    let detail = format!("{what} is not reproduced");
    Error::new(ErrorKind::InvalidOperation, detail).with_source(Unforeseen)
}

fn is_unforeseen(error: &Error) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        if error.is::<Unforeseen>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// What a rendering gave.
pub(crate) struct Rendered {
    pub text: String,
    /// Text is missing: there was more of it than wanted.
    pub cut: bool,
    /// The template asked for the time.
    pub dated: bool,
}

impl Template {
    pub fn compile(source: &str) -> Result<Template, String> {
        let mut syntax = SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|error| error.to_string())?;
        let normal = rewrite::normalize(source);
        let tree = parse(&normal, NAME, syntax.clone()).map_err(|error| format!("{error:#}"))?;
        let rewritten = rewrite::operators(&normal, &tree);
        let mut env = Environment::new();
        env.set_syntax(syntax);
        env.set_fuel(Some(FUEL));
        env.set_auto_escape_callback(|_| AutoEscape::None);
        filters::install(&mut env);
        lazy::install(&mut env);
        predicates::install(&mut env);
        globals::install(&mut env);
        env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
        });
        env.add_function("strftime_now", strftime_now);
        env.add_template_owned(NAME, rewritten).map_err(|error| format!("{error:#}"))?;
        Ok(Template {
            env,
            undeclared: names::undeclared(&tree),
            takes_any_arguments: names::takes_any_arguments(&tree),
            has_odd_else: names::has_odd_else(&tree),
            format: format::detect(&tree),
            has_generation_blocks: rewrite::has_generation_blocks(source),
            source: source.to_owned(),
        })
    }

    /// Whether the template takes this variable from outside.
    pub fn takes(&self, variable: &str) -> bool {
        self.undeclared.contains(variable)
    }

    pub fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// Whether the template takes a system message that is not the first. The engine tries this
    /// with plain Jinja2, which knows none of what Hugging Face adds.
    pub fn takes_late_system(&self) -> Result<bool, Skip> {
        if self.has_generation_blocks {
            return Ok(false);
        }
        let message = |role| object([("role", Json::str(role)), ("content", Json::str("t"))]);
        let roles = ["system", "user", "system", "user"];
        let messages = Json::list(roles.map(message).to_vec());
        let variables = vec![
            ("messages", messages.to_value()),
            ("add_generation_prompt", Value::from(false)),
            ("strftime_now", Value::UNDEFINED),
            ("raise_exception", Value::UNDEFINED),
        ];
        let limits = Limits { max_text: usize::MAX, deadline: None };
        match self.render(variables, &Job { limits, now: None }) {
            Ok(_) => Ok(true),
            Err(Skip::Refused) => Ok(false),
            Err(skip) => Err(skip),
        }
    }

    /// Renders at most `max_text` bytes.
    pub fn render(&self, variables: Vec<(&str, Value)>, job: &Job) -> Result<Rendered, Skip> {
        if self.takes_any_arguments || self.has_odd_else {
            return Err(Skip::Unsupported);
        }
        let run = Arc::new(Run {
            now: job.now.unwrap_or_else(Moment::now),
            dated: AtomicBool::new(false),
        });
        let own = (RUN, Value::from_dyn_object(Arc::clone(&run)));
        let template = self.env.get_template(NAME).map_err(|_| Skip::Failed)?;
        let mut sink =
            Sink { text: Vec::new(), limits: job.limits, writes: 0, state: SinkState::Open };
        let context = Value::from_pairs(variables.into_iter().chain([own]));
        let result = template.render_captured_to(context, &mut sink);
        match (sink.state, result) {
            (SinkState::Late, _) => return Err(Skip::Deadline),
            (SinkState::Full, _) | (_, Ok(_)) => {}
            (_, Err(error)) if error.kind() == ErrorKind::OutOfFuel => return Err(Skip::Deadline),
            (_, Err(error)) if is_unforeseen(&error) => return Err(Skip::Unsupported),
            (_, Err(_)) => return Err(Skip::Refused),
        }
        let cut = sink.state == SinkState::Full;
        let text = sink.into_text();
        Ok(Rendered { text, cut, dated: run.dated.load(Ordering::Relaxed) })
    }
}

/// A rendering's own state.
#[derive(Debug)]
struct Run {
    now: Moment,
    dated: AtomicBool,
}

impl minijinja::value::Object for Run {}

fn strftime_now(state: &minijinja::State<'_, '_>, format: &str) -> Result<String, Error> {
    let run = state.lookup(RUN);
    let run = run.as_ref().and_then(|run| run.downcast_object_ref::<Run>());
    let run = run.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "no time"))?;
    run.dated.store(true, Ordering::Relaxed);
    run.now.strftime(format)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SinkState {
    Open,
    Full,
    Late,
}

/// Takes text until there is enough of it or it is too late.
struct Sink {
    text: Vec<u8>,
    limits: Limits,
    writes: u32,
    state: SinkState,
}

impl Sink {
    /// What was taken, up to the last whole character.
    fn into_text(self) -> String {
        match String::from_utf8(self.text) {
            Ok(text) => text,
            Err(error) => {
                let valid = error.utf8_error().valid_up_to();
                let mut bytes = error.into_bytes();
                bytes.truncate(valid);
                String::from_utf8(bytes).unwrap_or_default()
            }
        }
    }
}

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.limits.max_text.saturating_sub(self.text.len());
        self.text.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.writes = self.writes.wrapping_add(1);
        if bytes.len() > room {
            self.state = SinkState::Full;
        } else if self.writes.is_multiple_of(256)
            && self.limits.deadline.is_some_and(|deadline| Instant::now() >= deadline)
        {
            self.state = SinkState::Late;
        } else {
            return Ok(bytes.len());
        }
        Err(io::Error::other("no more text is wanted"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
