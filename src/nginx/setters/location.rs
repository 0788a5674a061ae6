//! `kvc_aware_route`, `kvc_aware_max_text`, `kvc_aware_deadline`, `kvc_aware_priority`,
//! `kvc_aware_priority_header`, `kvc_aware_index`.

use std::mem;

use nginx_sys::{
    NGX_ERROR, NGX_OK, ngx_http_compile_complex_value, ngx_http_compile_complex_value_t,
    ngx_http_complex_value_t, ngx_http_conf_ctx_t, ngx_http_core_loc_conf_t, ngx_http_core_module,
    ngx_parse_size, ngx_parse_time, ngx_pcalloc, ngx_str_t,
};

use super::{Args, ConfError, Set, setters, split};
use crate::nginx::conf::{IndexConf, LocationConf, Route};
use crate::nginx::index_page;

setters!(LocationConf: route => set_route, max_text => set_max_text, deadline => set_deadline,
    priority => set_priority, priority_header => set_priority_header, index => set_index);

fn set_route(args: &Args, conf: &mut LocationConf) -> Set {
    let route = match args.get(1) {
        "on" => Route::On,
        "off" => Route::Off,
        "shadow" => Route::Shadow,
        other => return Err(args.value(other, "\"on\", \"off\" or \"shadow\"")),
    };
    args.once(&mut conf.route, route)
}

fn set_max_text(args: &Args, conf: &mut LocationConf) -> Set {
    let value = args.get(1);
    let mut word = ngx_str_t { len: value.len(), data: value.as_ptr().cast_mut() };
    // SAFETY: nginx only reads the word.
    let size = unsafe { ngx_parse_size(&mut word) };
    if size == NGX_ERROR as isize || size == 0 {
        return Err(args.value(value, "a size above 0"));
    }
    args.once(&mut conf.max_text, size.unsigned_abs())
}

fn set_deadline(args: &Args, conf: &mut LocationConf) -> Set {
    let value = args.get(1);
    let mut word = ngx_str_t { len: value.len(), data: value.as_ptr().cast_mut() };
    // SAFETY: nginx only reads the word.
    let time = unsafe { ngx_parse_time(&mut word, 0) };
    if time == NGX_ERROR as isize || time == 0 {
        return Err(args.value(value, "a time above 0"));
    }
    args.once(&mut conf.deadline, time.unsigned_abs())
}

fn set_priority(args: &Args, conf: &mut LocationConf) -> Set {
    if conf.priority.is_some() {
        return Err(args.duplicate());
    }
    // SAFETY: cf is live while the file is read; the compiled value lives in its pool, as long
    // as the configuration.
    unsafe {
        let value = ngx_pcalloc((*args.cf).pool, mem::size_of::<ngx_http_complex_value_t>())
            .cast::<ngx_http_complex_value_t>();
        if value.is_null() {
            return Err(args.text("no memory"));
        }
        let words = (*(*args.cf).args).elts.cast::<ngx_str_t>();
        let mut compile: ngx_http_compile_complex_value_t = mem::zeroed();
        compile.cf = args.cf;
        compile.value = words.add(1);
        compile.complex_value = value;
        if ngx_http_compile_complex_value(&mut compile) != NGX_OK as isize {
            return Err(ConfError::Said);
        }
        conf.priority = Some(value);
    }
    Ok(())
}

fn set_priority_header(args: &Args, conf: &mut LocationConf) -> Set {
    args.once(&mut conf.priority_header, args.flag(args.get(1))?)
}

fn set_index(args: &Args, conf: &mut LocationConf) -> Set {
    let mut index = IndexConf::default();
    for parameter in args.after(0) {
        match split(parameter) {
            ("explain", Some(value)) => index.explain = args.flag(value)?,
            ("tokens", Some(value)) => index.tokens = args.flag(value)?,
            _ => return Err(args.parameter(parameter)),
        }
    }
    args.once(&mut conf.index, index)?;
    // SAFETY: the context of a directive in a location holds the core module's configuration.
    unsafe {
        let ctx = (*args.cf).ctx.cast::<ngx_http_conf_ctx_t>();
        let slot = ngx_http_core_module.ctx_index;
        let core = (*(*ctx).loc_conf.add(slot)).cast::<ngx_http_core_loc_conf_t>();
        (*core).handler = Some(index_page::handler);
    }
    Ok(())
}
