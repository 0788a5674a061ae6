//! What is checked and hooked once the whole configuration is read.

use std::sync::Arc;

use nginx_sys::{
    NGX_ERROR, NGX_OK, ngx_array_push, ngx_conf_t, ngx_http_conf_ctx_t, ngx_http_core_main_conf_t,
    ngx_http_core_module, ngx_http_handler_pt, ngx_http_phases,
    ngx_http_phases_NGX_HTTP_ACCESS_PHASE, ngx_http_phases_NGX_HTTP_PRECONTENT_PHASE,
    ngx_http_upstream_main_conf_t, ngx_http_upstream_module, ngx_int_t, ngx_module_t,
};

use super::access;
use super::conf::{EventsConf, MainConf, Place, RemoteConf, UpstreamConf, balanced, main_conf};
use super::following::endpoint_of;
use super::guard;
use super::log::log;
use crate::prompt::Models;

pub unsafe extern "C" fn postconfiguration(cf: *mut ngx_conf_t) -> ngx_int_t {
    guard(NGX_ERROR as ngx_int_t, || {
        // SAFETY: nginx calls this at the end of the http block.
        let done = unsafe { hook(cf) }.and_then(|()| unsafe { check(cf) });
        match done {
            Ok(()) => NGX_OK as ngx_int_t,
            Err(cause) => {
                // SAFETY: the log of a configuration that is being read.
                log!(EMERG, unsafe { (*cf).log }, "{cause}");
                NGX_ERROR as ngx_int_t
            }
        }
    })
}

/// The main configuration of one of nginx's own http modules.
unsafe fn main_of<T>(cf: *mut ngx_conf_t, module: *const ngx_module_t) -> *mut T {
    // SAFETY: inside http each module that creates a main configuration has its slot filled.
    unsafe {
        let ctx = (*cf).ctx.cast::<ngx_http_conf_ctx_t>();
        (*(*ctx).main_conf.add((*module).ctx_index)).cast()
    }
}

unsafe fn hook(cf: *mut ngx_conf_t) -> Result<(), String> {
    // SAFETY: phases are arrays of handlers, open until all modules have been asked.
    unsafe {
        let core: *mut ngx_http_core_main_conf_t = main_of(cf, &raw const ngx_http_core_module);
        for (phase, handler) in [
            (ngx_http_phases_NGX_HTTP_ACCESS_PHASE, access::handler as _),
            (ngx_http_phases_NGX_HTTP_PRECONTENT_PHASE, access::precontent as _),
        ] as [(ngx_http_phases, unsafe extern "C" fn(_) -> _); 2]
        {
            let slot = ngx_array_push(&mut (*core).phases[phase as usize].handlers);
            if slot.is_null() {
                return Err("no memory".to_owned());
            }
            *slot.cast::<ngx_http_handler_pt>() = Some(handler);
        }
    }
    Ok(())
}

unsafe fn check(cf: *mut ngx_conf_t) -> Result<(), String> {
    // SAFETY: in http, at its end; nothing else holds the configurations now.
    let (main, upstreams) = unsafe {
        let list: *mut ngx_http_upstream_main_conf_t =
            main_of(cf, &raw const ngx_http_upstream_module);
        (main_conf(cf), balanced(list))
    };
    finish_models(main);
    let upstreams: Vec<&UpstreamConf> = upstreams.collect();
    for upstream in &upstreams {
        check_upstream(main, upstream)?;
    }
    for remote in &mut main.remotes {
        // SAFETY: the log of a configuration that is being read.
        finish_remote(remote, &upstreams, |text| log!(WARN, unsafe { (*cf).log }, "{text}"))?;
    }
    check_shared(&upstreams)
}

/// Finds the servers that are asked for a model's tokens. A server on a unix socket is not asked.
fn finish_remote(
    remote: &mut RemoteConf,
    upstreams: &[&UpstreamConf],
    warn: impl Fn(String),
) -> Result<(), String> {
    let (model, place) = (&remote.model, at(&remote.place));
    let upstream = match (&remote.upstream, upstreams) {
        (Some(name), _) => {
            upstreams.iter().find(|upstream| upstream.name == *name).ok_or_else(|| {
                format!(
                    "no upstream \"{name}\" with \"kvc_aware\" for remote model \"{model}\" {place}"
                )
            })?
        }
        (None, [one]) => one,
        (None, []) => {
            return Err(format!(
                "no upstream with \"kvc_aware\" for remote model \"{model}\" {place}"
            ));
        }
        (None, _) => {
            return Err(format!(
                "\"kvc_aware_model\" needs \"upstream=\" for remote model \"{model}\", there are \
                 several with \"kvc_aware\" {place}"
            ));
        }
    };
    for peer in upstream.peers() {
        if peer.starts_with("unix:") {
            warn(format!(
                "server \"{peer}\" cannot be asked for the tokens of remote model \"{model}\" {place}"
            ));
        } else {
            remote.servers.push(peer.clone());
        }
    }
    let name = upstream.name.clone();
    if remote.servers.is_empty() {
        return Err(format!(
            "upstream \"{name}\" has no server with a port for remote model \"{model}\" {place}"
        ));
    }
    remote.upstream = Some(name);
    Ok(())
}

fn finish_models(main: &mut MainConf) {
    let named = |name: &str| {
        main.specs.iter().any(|spec| {
            spec.name == name || spec.aliases.iter().chain(&spec.loras).any(|other| other == name)
        })
    };
    let folders: Vec<_> = main.folders.iter().filter(|spec| !named(&spec.name)).cloned().collect();
    let specs = main.specs.iter().cloned().chain(folders).collect();
    main.models = Some(Arc::new(Models::new(specs)));
}

fn at(place: &Place) -> String {
    format!("in {}:{}", place.file, place.line)
}

fn check_upstream(main: &MainConf, upstream: &UpstreamConf) -> Result<(), String> {
    let zone = upstream.zone.as_deref().unwrap_or_default();
    if main.zone.as_ref().is_none_or(|known| known.name != zone) {
        return Err(format!("unknown kvc_aware_zone \"{zone}\" {}", at(&upstream.place)));
    }
    if upstream.peers.is_none() {
        return Err(format!(
            "load balancing method of upstream \"{}\" is set again after \"kvc_aware\" {}",
            upstream.name,
            at(&upstream.place)
        ));
    }
    for server in &upstream.servers {
        if !upstream.peers().iter().any(|peer| server.names.contains(peer)) {
            return Err(format!(
                "\"kvc_aware_server\" \"{}\" matches no server of upstream \"{}\" {}",
                server.address,
                upstream.name,
                at(&server.place)
            ));
        }
    }
    let ports = matches!(upstream.events, Some(EventsConf::Ports { .. }));
    let unix = upstream.peers().iter().find(|peer| {
        let own = upstream.server(peer).is_some_and(|server| server.events.is_some());
        peer.starts_with("unix:") && !own
    });
    match unix {
        Some(peer) if ports => Err(format!(
            "server \"{peer}\" needs a \"kvc_aware_server\" with \"events=\" {}",
            at(&upstream.place)
        )),
        _ => Ok(()),
    }
}

/// One address in two upstreams is one server: it publishes at one place, in one block size.
fn check_shared(upstreams: &[&UpstreamConf]) -> Result<(), String> {
    let mut seen: Vec<(&str, &UpstreamConf)> = Vec::new();
    for upstream in upstreams {
        for peer in upstream.peers() {
            let Some((_, other)) = seen.iter().find(|(name, _)| name == peer) else {
                seen.push((peer, upstream));
                continue;
            };
            let differs = if endpoint_of(other, peer) != endpoint_of(upstream, peer) {
                "other events"
            } else if other.block_size() != upstream.block_size() {
                "another block size"
            } else {
                continue;
            };
            return Err(format!(
                "server \"{peer}\" has {differs} in upstream \"{}\" {}",
                other.name,
                at(&upstream.place)
            ));
        }
    }
    Ok(())
}
