//! What nginx reads from the loaded file.

use core::ffi::{CStr, c_char};
use core::ptr;

use nginx_sys::{NGX_HTTP_MODULE, ngx_http_module_t, ngx_module_t};

// Stands in for the nginx that unit tests do not have (build.rs).
#[cfg(test)]
#[link(name = "ngx_absent")]
unsafe extern "C" {}

static HTTP_MODULE: ngx_http_module_t = ngx_http_module_t {
    preconfiguration: None,
    postconfiguration: None,
    create_main_conf: None,
    init_main_conf: None,
    create_srv_conf: None,
    merge_srv_conf: None,
    create_loc_conf: None,
    merge_loc_conf: None,
};

// nginx writes the index, the signature's check reads the rest: one object for the process.
#[unsafe(no_mangle)]
pub static mut ngx_http_kvc_aware_module: ngx_module_t = ngx_module_t {
    ctx: ptr::from_ref(&HTTP_MODULE).cast_mut().cast(),
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
pub static ngx_modules: Table<ngx_module_t, 2> =
    Table([&raw const ngx_http_kvc_aware_module, ptr::null()]);

#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ngx_module_names: Table<c_char, 2> =
    Table([name(c"ngx_http_kvc_aware_module"), ptr::null()]);

/// nginx puts the module before the first of those named after it, so that its postconfiguration
/// runs before theirs. Handlers of a phase run in the reverse order of their registration: ours in
/// the access phase is the last, and nobody who is refused gets tokenized.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ngx_module_order: Table<c_char, 5> = Table([
    name(c"ngx_http_kvc_aware_module"),
    name(c"ngx_http_auth_request_module"),
    name(c"ngx_http_auth_basic_module"),
    name(c"ngx_http_access_module"),
    ptr::null(),
]);
