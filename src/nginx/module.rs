//! What nginx reads from the loaded file.
//!
//! Two modules: the main one, and a body filter, which nginx must put at another place.

use core::ffi::{CStr, c_char};
use core::ptr;

use nginx_sys::{NGX_HTTP_MODULE, ngx_http_module_t, ngx_module_t};

use super::{conf, directives, filter, process, setup, variables};

// Stands in for the nginx that unit tests do not have (build.rs).
#[cfg(test)]
#[link(name = "ngx_absent")]
unsafe extern "C" {}

const NO_HTTP: ngx_http_module_t = ngx_http_module_t {
    preconfiguration: None,
    postconfiguration: None,
    create_main_conf: None,
    init_main_conf: None,
    create_srv_conf: None,
    merge_srv_conf: None,
    create_loc_conf: None,
    merge_loc_conf: None,
};

static HTTP_MODULE: ngx_http_module_t = ngx_http_module_t {
    preconfiguration: Some(variables::add),
    postconfiguration: Some(setup::postconfiguration),
    create_main_conf: Some(conf::create_main),
    create_srv_conf: Some(conf::create_upstream),
    create_loc_conf: Some(conf::create_location),
    merge_loc_conf: Some(conf::merge_location),
    ..NO_HTTP
};

static HTTP_FILTER: ngx_http_module_t =
    ngx_http_module_t { postconfiguration: Some(filter::postconfiguration), ..NO_HTTP };

// nginx writes the index, the signature's check reads the rest: one object for the process.
#[unsafe(no_mangle)]
pub static mut ngx_http_kvc_aware_module: ngx_module_t = ngx_module_t {
    ctx: ptr::from_ref(&HTTP_MODULE).cast_mut().cast(),
    commands: (&raw mut directives::COMMANDS).cast(),
    type_: NGX_HTTP_MODULE as _,
    init_process: Some(process::init),
    exit_process: Some(process::exit),
    ..ngx_module_t::default()
};

#[unsafe(no_mangle)]
pub static mut ngx_http_kvc_aware_filter_module: ngx_module_t = ngx_module_t {
    ctx: ptr::from_ref(&HTTP_FILTER).cast_mut().cast(),
    type_: NGX_HTTP_MODULE as _,
    ..ngx_module_t::default()
};

/// A table of pointers that nginx reads by name from the loaded file.
#[repr(transparent)]
pub struct Table<T, const N: usize>([*const T; N]);

// SAFETY: nginx reads the tables in its one main thread, while it loads the module.
unsafe impl<T, const N: usize> Sync for Table<T, N> {}

const fn name(name: &'static CStr) -> *const c_char {
    name.as_ptr()
}

#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ngx_modules: Table<ngx_module_t, 3> = Table([
    &raw const ngx_http_kvc_aware_module,
    &raw const ngx_http_kvc_aware_filter_module,
    ptr::null(),
]);

#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ngx_module_names: Table<c_char, 3> = Table([
    name(c"ngx_http_kvc_aware_module"),
    name(c"ngx_http_kvc_aware_filter_module"),
    ptr::null(),
]);

/// nginx puts each module before the first of those named after it.
///
/// The main module's postconfiguration so runs before those of the access modules. Handlers of a
/// phase run in the reverse order of their registration: ours in the access phase is the last, and
/// nobody who is refused gets tokenized. The filter stands where nginx's own optional body filters
/// do: it sees what the upstream sent, not what is compressed.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ngx_module_order: Table<c_char, 7> = Table([
    name(c"ngx_http_kvc_aware_module"),
    name(c"ngx_http_auth_request_module"),
    name(c"ngx_http_auth_basic_module"),
    name(c"ngx_http_access_module"),
    name(c"ngx_http_kvc_aware_filter_module"),
    name(c"ngx_http_copy_filter_module"),
    ptr::null(),
]);
