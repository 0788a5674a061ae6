//! One function for each directive. Each says in a line what is wrong; nginx adds file and line.

pub mod location;
pub mod main;
pub mod upstream;

use std::ffi::{c_char, c_void};
use std::ptr;

use nginx_sys::{ngx_conf_t, ngx_str_t};

use super::conf::Place;
use super::guard;
use super::log::log;

/// NGX_CONF_ERROR: the setter has logged what is wrong.
pub const CONF_ERROR: *mut c_char = ptr::without_provenance_mut(usize::MAX);
const CONF_OK: *mut c_char = ptr::null_mut();

#[derive(Debug, thiserror::Error)]
pub enum ConfError {
    #[error("\"{0}\" directive is duplicate")]
    Duplicate(String),
    #[error("invalid value \"{value}\" in \"{directive}\" directive, it must be {expected}")]
    Value { directive: String, value: String, expected: &'static str },
    #[error("invalid parameter \"{parameter}\" in \"{directive}\" directive")]
    Parameter { directive: String, parameter: String },
    #[error("{0}")]
    Text(String),
    /// nginx has logged it.
    #[error("")]
    Said,
}

pub type Set = Result<(), ConfError>;

/// A directive as it stands in the file.
pub struct Args {
    pub cf: *mut ngx_conf_t,
    words: Vec<String>,
}

impl Args {
    /// # Safety
    /// `cf` is what nginx hands to a setter.
    unsafe fn read(cf: *mut ngx_conf_t) -> Args {
        // SAFETY: cf->args is an array of ngx_str_t, the directive's name first.
        let words = unsafe {
            let args = &*(*cf).args;
            std::slice::from_raw_parts(args.elts.cast::<ngx_str_t>(), args.nelts)
        };
        let words = words
            .iter()
            .map(|word| String::from_utf8_lossy(word.as_bytes()).into_owned())
            .collect();
        Args { cf, words }
    }

    pub fn directive(&self) -> &str {
        &self.words[0]
    }

    /// Argument `n`, from 1.
    pub fn get(&self, n: usize) -> &str {
        &self.words[n]
    }

    pub fn after(&self, n: usize) -> impl Iterator<Item = &str> {
        self.words[n + 1..].iter().map(String::as_str)
    }

    pub fn place(&self) -> Place {
        // SAFETY: a setter runs while the file is read.
        unsafe {
            let file = (*self.cf).conf_file;
            let name = String::from_utf8_lossy((*file).file.name.as_bytes()).into_owned();
            Place { file: name, line: (*file).line }
        }
    }

    pub fn duplicate(&self) -> ConfError {
        ConfError::Duplicate(self.directive().to_owned())
    }

    pub fn value(&self, value: &str, expected: &'static str) -> ConfError {
        let directive = self.directive().to_owned();
        ConfError::Value { directive, value: value.to_owned(), expected }
    }

    pub fn parameter(&self, parameter: &str) -> ConfError {
        let directive = self.directive().to_owned();
        ConfError::Parameter { directive, parameter: parameter.to_owned() }
    }

    pub fn text(&self, text: impl std::fmt::Display) -> ConfError {
        ConfError::Text(text.to_string())
    }

    /// Sets what may be said once in a block.
    pub fn once<T>(&self, slot: &mut Option<T>, value: T) -> Set {
        if slot.is_some() {
            return Err(self.duplicate());
        }
        *slot = Some(value);
        Ok(())
    }

    pub fn flag(&self, value: &str) -> Result<bool, ConfError> {
        match value {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(self.value(value, "\"on\" or \"off\"")),
        }
    }

    /// A path as nginx understands it: relative to the folder of nginx.conf.
    pub fn path(&self, value: &str) -> Result<std::path::PathBuf, ConfError> {
        // SAFETY: cf->cycle is live; nginx leaves an absolute name and else makes one in the
        // pool, with a zero at its end.
        unsafe {
            let cycle = (*self.cf).cycle;
            let Some(mut name) =
                ngx_str_t::from_bytes((*self.cf).pool, format!("{value}\0").as_bytes())
            else {
                return Err(self.text("no memory"));
            };
            name.len -= 1;
            if nginx_sys::ngx_conf_full_name(cycle, &mut name, 1) != 0 {
                return Err(self.text("no memory"));
            }
            Ok(String::from_utf8_lossy(name.as_bytes()).into_owned().into())
        }
    }
}

/// Runs a setter on its configuration and reports what it says.
///
/// # Safety
/// The pointers are what nginx hands to a directive whose configuration is a `T`.
pub unsafe fn run<T>(
    cf: *mut ngx_conf_t,
    conf: *mut c_void,
    set: impl FnOnce(&Args, &mut T) -> Set,
) -> *mut c_char {
    guard(CONF_ERROR, || {
        // SAFETY: the caller's promise.
        let (args, conf) = unsafe { (Args::read(cf), &mut *conf.cast::<T>()) };
        match set(&args, conf) {
            Ok(()) => CONF_OK,
            Err(ConfError::Said) => CONF_ERROR,
            Err(error) => {
                log!(EMERG, conf cf, "{error}");
                CONF_ERROR
            }
        }
    })
}

/// Declares what nginx calls for a directive.
macro_rules! setters {
    ($conf:ty: $($name:ident => $set:ident),+ $(,)?) => {
        $(pub unsafe extern "C" fn $name(
            cf: *mut nginx_sys::ngx_conf_t,
            _command: *mut nginx_sys::ngx_command_t,
            conf: *mut std::ffi::c_void,
        ) -> *mut std::ffi::c_char {
            // SAFETY: the directive table pairs the directive with this configuration.
            unsafe { super::run::<$conf>(cf, conf, $set) }
        })+
    };
}
use setters;

/// `key=value`, or a bare word.
fn split(parameter: &str) -> (&str, Option<&str>) {
    match parameter.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (parameter, None),
    }
}
