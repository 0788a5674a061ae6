//! `kvc_aware_index`: the state of the zone as JSON, and explain.

use nginx_sys::{
    NGX_DONE, NGX_ERROR, NGX_HTTP_GET, NGX_HTTP_HEAD, NGX_HTTP_INTERNAL_SERVER_ERROR,
    NGX_HTTP_NOT_ALLOWED, NGX_HTTP_OK, NGX_HTTP_POST, NGX_HTTP_SERVICE_UNAVAILABLE,
    NGX_HTTP_SPECIAL_RESPONSE, NGX_OK, ngx_buf_t, ngx_chain_t, ngx_create_temp_buf, ngx_http_arg,
    ngx_http_discard_request_body, ngx_http_output_filter, ngx_http_read_client_request_body,
    ngx_http_request_t, ngx_http_send_header, ngx_http_upstream_main_conf_t,
    ngx_http_upstream_module, ngx_int_t, ngx_str_t,
};
use serde_json::{Map, Value, json};

use super::conf::{Engine, UpstreamConf, balanced, location_conf, request_main_conf};
use super::peers;
use super::process::{self, Process};
use super::{explain, guard};
use crate::load::Rows;
use crate::lookup;
use crate::shared::{
    Counter, Difference, Dropped, MAX_SERVERS, Mode, ModelKey, ProcessId, Sample, ServerField,
    ServerRow, TrustField, TrustRow,
};
use crate::trust;
use crate::types::{ServerId, Skip, Tier};

const DEFAULT_LIMIT: usize = 32;

pub unsafe extern "C" fn handler(r: *mut ngx_http_request_t) -> ngx_int_t {
    // SAFETY: nginx gives a live request to the handler of its location.
    guard(NGX_HTTP_INTERNAL_SERVER_ERROR as ngx_int_t, || unsafe {
        let conf = location_conf(r).index.unwrap_or_default();
        match (*r).method as u32 {
            NGX_HTTP_GET | NGX_HTTP_HEAD => {
                let rc = ngx_http_discard_request_body(r);
                if rc != NGX_OK as ngx_int_t {
                    return rc;
                }
                match process::get() {
                    Some(process) => send(r, NGX_HTTP_OK, &state(r, process, conf.tokens)),
                    None => send_error(r, NGX_HTTP_SERVICE_UNAVAILABLE, "kvc_aware is not active"),
                }
            }
            NGX_HTTP_POST if conf.explain => {
                let rc = ngx_http_read_client_request_body(r, Some(explain::body_is_read));
                if rc >= NGX_HTTP_SPECIAL_RESPONSE as ngx_int_t {
                    rc
                } else {
                    NGX_DONE as ngx_int_t
                }
            }
            _ => NGX_HTTP_NOT_ALLOWED as ngx_int_t,
        }
    })
}

unsafe fn state(r: *mut ngx_http_request_t, process: &Process, tokens: bool) -> Value {
    let stats = process.index.stats();
    let zone = process.zone;
    let writer = zone.lease().holder().filter(|holder| holder.is_alive());
    // SAFETY: the request is live.
    let (main, wanted, limit) = unsafe {
        let limit = argument(r, "limit").and_then(|n| n.parse().ok()).unwrap_or(DEFAULT_LIMIT);
        (request_main_conf(r), argument(r, "upstream"), limit)
    };
    let name = main.zone.as_ref().map_or("", |zone| zone.name.as_str());
    let rows = Rows::held(zone);
    // SAFETY: as above.
    let upstreams = unsafe { upstreams(r) };
    let servers: Vec<Value> = upstreams
        .filter(|conf| wanted.as_ref().is_none_or(|wanted| *wanted == conf.name))
        .flat_map(|conf| {
            // SAFETY: the upstream is live.
            let names = unsafe { peers::names(conf.upstream) };
            names.into_iter().map(move |peer| (conf, peer))
        })
        .flat_map(|(conf, peer)| {
            let ids = process.servers(conf, peer.as_bytes());
            ids.iter().map(|id| server(process, &rows, conf, &peer, *id)).collect::<Vec<_>>()
        })
        .collect();
    let differences: Vec<Value> =
        zone.differences().newest().map(|found| difference(process, &found, tokens)).collect();
    let blocks: Vec<Value> =
        zone.samples().newest().take(limit).filter_map(|s| block(process, &s, tokens)).collect();
    json!({
        "status": if writer.is_some() { "active" } else { "no_writer" },
        "writer": { "pid": writer.map(ProcessId::pid), "changes": zone.lease().generation() },
        "block_count": stats.blocks,
        "models": process.models.names().collect::<Vec<_>>(),
        "zone": {
            "name": name,
            "size": zone.bytes(),
            "used": zone.fixed_bytes() as u64 + stats.used_bytes,
            "entries": stats.entries,
            "evicted": stats.evicted,
        },
        "requests": requests(process),
        "servers": servers,
        "differences": differences,
        "blocks": blocks,
    })
}

fn requests(process: &Process) -> Value {
    let counters = process.zone.counters();
    let skipped: Map<String, Value> = Skip::ALL
        .iter()
        .filter(|skip| counters.skips(**skip) > 0)
        .map(|skip| (skip.name().to_owned(), counters.skips(*skip).into()))
        .collect();
    json!({
        "balanced": counters.get(Counter::Balanced),
        "hit": counters.get(Counter::Hit),
        "miss": counters.get(Counter::Miss),
        "single": counters.get(Counter::Single),
        "prompt_tokens": counters.get(Counter::PromptTokens),
        "matched_tokens": counters.get(Counter::MatchedTokens),
        "retries": counters.get(Counter::Retries),
        "panics": counters.get(Counter::Panics),
        "shadow": counters.get(Counter::Shadow),
        "shadow_missed_tokens": counters.get(Counter::ShadowMissedTokens),
        "skipped": skipped,
    })
}

fn server(
    process: &Process,
    rows: &Rows<'_>,
    conf: &UpstreamConf,
    peer: &str,
    id: ServerId,
) -> Value {
    let row = process.zone.server(id);
    let load = rows.load(id);
    let dropped: Map<String, Value> = Dropped::ALL
        .iter()
        .filter(|reason| row.dropped(**reason) > 0)
        .map(|reason| (reason.name().to_owned(), row.dropped(*reason).into()))
        .collect();
    let mut counts = process.index.server_blocks(id);
    let mode = lookup::believed(&row, None);
    if mode == Mode::Approximate {
        counts = process.index.server_blocks(id.learned());
    }
    let blocks: Map<String, Value> = Tier::ALL
        .iter()
        .map(|tier| (tier.name().to_owned(), counts[*tier as usize].into()))
        .collect();
    let own = conf.server(peer);
    json!({
        "server": peer,
        "upstream": conf.name,
        "id": own.and_then(|server| server.id.as_deref()).unwrap_or(peer),
        "rank": row.rank(),
        "engine": own.map_or(Engine::default(), |server| server.engine).name(),
        "mode": mode.name(),
        "connected": row.get(ServerField::Connected) == 1,
        "last_seq": row.get(ServerField::NextSeq).checked_sub(1),
        "batches": row.get(ServerField::Batches),
        "gaps": row.get(ServerField::Gaps),
        "replays": row.get(ServerField::Replays),
        "restarts": row.get(ServerField::Restarts),
        "dropped": dropped,
        "block_size": row.get(ServerField::BlockSize),
        "blocks": blocks,
        "in_flight": load.in_flight,
        "queued_tokens": load.queued_tokens,
        "requests": row.get(ServerField::Requests),
        "polled": null,
        "trust": row.trusts().map(|trust| of_model(process, &row, &trust)).collect::<Vec<_>>(),
        "error": error(&row),
    })
}

/// What is known of one model's tokens on a server.
fn of_model(process: &Process, row: &ServerRow<'_>, trust: &TrustRow<'_>) -> Value {
    json!({
        "model": model_name(process, trust.model()),
        "trusted": trust::is_trusted(row, Some(trust.model())),
        "blocks": {
            "same": trust.get(TrustField::BlocksSame),
            "different": trust.get(TrustField::BlocksDiffer),
            "absent": trust.get(TrustField::BlocksAbsent),
        },
        "prompt_tokens": {
            "same": trust.get(TrustField::PromptSame),
            "different": trust.get(TrustField::PromptDiffers),
        },
        "cached_tokens": {
            "same": trust.get(TrustField::CachedSame),
            "more": trust.get(TrustField::CachedMore),
            "less": trust.get(TrustField::CachedLess),
        },
    })
}

fn model_name(process: &Process, key: ModelKey) -> &str {
    process.models.names().find(|name| ModelKey::of(name) == key).unwrap_or_default()
}

/// A block that an engine made of other tokens than were made here.
pub fn difference(process: &Process, found: &Difference, tokens: bool) -> Value {
    let mut shown = json!({
        "model": model_name(process, found.model),
        "server": process.zone.server(found.server).address(),
        "block": found.block,
        "block_size": found.block_size,
        "hash": format!("{:016x}", found.hash.0),
        "engine_hash": format!("{:016x}", found.engine_hash.0),
    });
    if tokens {
        shown["tokens"] = json!(found.tokens);
        shown["engine_tokens"] = json!(found.engine_tokens);
    }
    shown
}

pub const DISTRUSTED: &str = "the engine's prompt tokens are not those that are made here";
/// Why the overlap of a server with a hybrid model is not credited.
pub const HYBRID: &str = "the model has layers without full attention, its overlap is not credited";

pub fn error(row: &ServerRow<'_>) -> &'static str {
    match row.error().name() {
        _ if !trust::is_trusted(row, None) => DISTRUSTED,
        "" if row.get(ServerField::Hybrid) == 1 => HYBRID,
        name => name,
    }
}

/// A block that was stored lately, if anybody still holds it.
fn block(process: &Process, sample: &Sample, tokens: bool) -> Option<Value> {
    let mut holders = Vec::new();
    process.index.holders(sample.block, &mut holders).ok()?;
    // A sample comes from events; what was routed is believed elsewhere.
    holders.retain(|(id, _)| id.index() < MAX_SERVERS);
    let row = |id: ServerId| process.zone.server(id);
    let first = row(holders.first()?.0);
    let model = (first.get(ServerField::Model) as usize).checked_sub(1);
    let workers: Vec<String> = holders.iter().map(|(id, _)| row(*id).address()).collect();
    let mut shown = json!({
        "model": model.map_or("", |model| process.models.name(model)),
        "tier": holders[0].1.name(),
        "token_count": sample.token_count,
    });
    if tokens {
        shown["token_sample"] = json!(sample.tokens);
    }
    shown["workers"] = json!(workers);
    Some(shown)
}

/// All upstreams that the module balances.
///
/// # Safety
/// `r` is a live request.
pub unsafe fn upstreams<'a>(r: *mut ngx_http_request_t) -> impl Iterator<Item = &'a UpstreamConf> {
    // SAFETY: the upstream module has a main configuration in every http block.
    unsafe {
        let slot = ngx_http_upstream_module.ctx_index;
        balanced((*(*r).main_conf.add(slot)).cast::<ngx_http_upstream_main_conf_t>())
    }
}

/// An argument of the query, percent-decoded.
///
/// # Safety
/// `r` is a live request.
pub unsafe fn argument(r: *mut ngx_http_request_t, name: &str) -> Option<String> {
    let mut value = ngx_str_t::empty();
    // SAFETY: the request is live; nginx only reads the name.
    let bytes = unsafe {
        if ngx_http_arg(r, name.as_ptr().cast_mut(), name.len(), &mut value) != NGX_OK as ngx_int_t
        {
            return None;
        }
        value.as_bytes()
    };
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let [first, tail @ ..] = rest {
        let pair = tail.get(..2).filter(|_| *first == b'%');
        let byte =
            pair.and_then(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
        decoded.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8(decoded).ok()
}

/// # Safety
/// `r` is a live request whose answer has not begun.
pub unsafe fn send_error(r: *mut ngx_http_request_t, status: u32, cause: &str) -> ngx_int_t {
    // SAFETY: the caller's.
    unsafe { send(r, status, &json!({ "error": cause })) }
}

/// Answers with JSON.
///
/// # Safety
/// `r` is a live request whose answer has not begun.
pub unsafe fn send(r: *mut ngx_http_request_t, status: u32, body: &Value) -> ngx_int_t {
    const TYPE: &str = "application/json";
    let text = format!("{body}\n");
    // SAFETY: the caller's; the buffer and the chain live as long as the request.
    unsafe {
        let buf: *mut ngx_buf_t = ngx_create_temp_buf((*r).pool, text.len());
        let Some(out) = buf.as_mut() else { return NGX_ERROR as ngx_int_t };
        out.last.copy_from_nonoverlapping(text.as_ptr(), text.len());
        out.last = out.last.add(text.len());
        out.set_last_buf(1);
        out.set_last_in_chain(1);
        (*r).headers_out.status = status as usize;
        (*r).headers_out.content_length_n = text.len() as _;
        (*r).headers_out.content_type =
            ngx_str_t { len: TYPE.len(), data: TYPE.as_ptr().cast_mut() };
        (*r).headers_out.content_type_len = TYPE.len();
        let rc = ngx_http_send_header(r);
        if rc != NGX_OK as ngx_int_t || (*r).header_only() == 1 {
            return rc;
        }
        let mut chain = ngx_chain_t { buf, next: std::ptr::null_mut() };
        ngx_http_output_filter(r, &mut chain)
    }
}
