//! One macro for all log lines.

use std::ptr::NonNull;

use nginx_sys::ngx_log_t;

/// Lines of the module itself go to the cycle's log, those about a request to its connection's.
pub fn cycle_log() -> *mut ngx_log_t {
    let log: NonNull<ngx_log_t> = ngx::log::ngx_cycle_log();
    log.as_ptr()
}

/// `log!(level, target, "…")`: `level` is the tail of an `NGX_LOG_…` name.
macro_rules! log {
    (EMERG, conf $cf:expr, $($arg:tt)+) => {{
        ngx::ngx_conf_log_error!(nginx_sys::NGX_LOG_EMERG, $cf, $($arg)+);
    }};
    (WARN, conf $cf:expr, $($arg:tt)+) => {{
        ngx::ngx_conf_log_error!(nginx_sys::NGX_LOG_WARN, $cf, $($arg)+);
    }};
    (DEBUG, $log:expr, $($arg:tt)+) => {{
        ngx::ngx_log_debug!(mask: ngx::log::DebugMask::Http, $log, $($arg)+);
    }};
    (EMERG, $log:expr, $($arg:tt)+) => { log!(@ nginx_sys::NGX_LOG_EMERG, $log, $($arg)+) };
    (ERR, $log:expr, $($arg:tt)+) => { log!(@ nginx_sys::NGX_LOG_ERR, $log, $($arg)+) };
    (WARN, $log:expr, $($arg:tt)+) => { log!(@ nginx_sys::NGX_LOG_WARN, $log, $($arg)+) };
    (NOTICE, $log:expr, $($arg:tt)+) => { log!(@ nginx_sys::NGX_LOG_NOTICE, $log, $($arg)+) };
    (@ $level:expr, $log:expr, $($arg:tt)+) => {{
        ngx::ngx_log_error!($level, $log, $($arg)+);
    }};
}
pub(super) use log;
