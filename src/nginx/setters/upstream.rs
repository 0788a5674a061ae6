//! `kvc_aware`, `kvc_aware_events`, `kvc_aware_server`, `kvc_aware_block_size`,
//! `kvc_aware_policy`, `kvc_aware_weights`.

use std::mem;

use nginx_sys::{
    NGX_HTTP_UPSTREAM_BACKUP, NGX_HTTP_UPSTREAM_CREATE, NGX_HTTP_UPSTREAM_DOWN,
    NGX_HTTP_UPSTREAM_FAIL_TIMEOUT, NGX_HTTP_UPSTREAM_MAX_CONNS, NGX_HTTP_UPSTREAM_MAX_FAILS,
    NGX_HTTP_UPSTREAM_WEIGHT, NGX_OK, ngx_addr_t, ngx_http_conf_ctx_t, ngx_http_upstream_module,
    ngx_http_upstream_srv_conf_t, ngx_parse_url, ngx_str_t, ngx_url_t,
};

use super::{Args, ConfError, Set, setters, split};
use crate::nginx::balancer;
use crate::nginx::conf::{Engine, EventsConf, ServerConf, UpstreamConf};
use crate::select::{Policy, Weights};

setters!(UpstreamConf: balance => set_balance, events => set_events, server => set_server,
    block_size => set_block_size, policy => set_policy, weights => set_weights);

const MAX_BLOCK_SIZE: u32 = 1 << 16;
const MAX_RANKS: u32 = 64;

fn set_balance(args: &Args, conf: &mut UpstreamConf) -> Set {
    if conf.zone.is_some() {
        return Err(args.duplicate());
    }
    // SAFETY: the context of a directive in an upstream block holds the upstream's configuration.
    let upstream = unsafe {
        let ctx = (*args.cf).ctx.cast::<ngx_http_conf_ctx_t>();
        let slot = ngx_http_upstream_module.ctx_index;
        &mut *(*(*ctx).srv_conf.add(slot)).cast::<ngx_http_upstream_srv_conf_t>()
    };
    if upstream.peer.init_upstream.is_some() {
        return Err(args.text(format_args!(
            "\"{}\" must come before \"keepalive\" and is no addition to another balancing method",
            args.directive()
        )));
    }
    upstream.peer.init_upstream = Some(balancer::init_upstream);
    upstream.flags = flags() as usize;
    conf.zone = Some(args.get(1).to_owned());
    conf.place = args.place();
    conf.name = String::from_utf8_lossy(upstream.host.as_bytes()).into_owned();
    conf.upstream = upstream;
    Ok(())
}

/// What a `server` line of the upstream may say.
const fn flags() -> u32 {
    let flags = NGX_HTTP_UPSTREAM_CREATE
        | NGX_HTTP_UPSTREAM_WEIGHT
        | NGX_HTTP_UPSTREAM_MAX_CONNS
        | NGX_HTTP_UPSTREAM_MAX_FAILS
        | NGX_HTTP_UPSTREAM_FAIL_TIMEOUT
        | NGX_HTTP_UPSTREAM_DOWN
        | NGX_HTTP_UPSTREAM_BACKUP;
    #[cfg(nginx_1_27_3)]
    let flags = flags | nginx_sys::NGX_HTTP_UPSTREAM_MODIFY;
    flags
}

fn set_events(args: &Args, conf: &mut UpstreamConf) -> Set {
    if conf.events.is_some() {
        return Err(args.duplicate());
    }
    if args.get(1) == "off" && args.after(1).next().is_none() {
        conf.events = Some(EventsConf::Off);
        return Ok(());
    }
    let (mut port, mut replay_port, mut topic, mut ranks) = (None, None, String::new(), 1);
    for parameter in args.after(0) {
        match split(parameter) {
            ("port", Some(value)) => port = Some(parse_port(args, value)?),
            ("replay_port", Some(value)) => replay_port = Some(parse_port(args, value)?),
            ("ranks", Some(value)) => ranks = parse_ranks(args, value)?,
            ("topic", Some(value)) => topic = value.to_owned(),
            _ => return Err(args.parameter(parameter)),
        }
    }
    let Some(port) = port else {
        let directive = args.directive();
        return Err(args.text(format_args!("\"{directive}\" needs \"port=\" or \"off\"")));
    };
    for first in [Some(port), replay_port].into_iter().flatten() {
        if u32::from(first) + ranks - 1 > u32::from(u16::MAX) {
            return Err(args.text(format_args!("no ports for {ranks} ranks after {first}")));
        }
    }
    conf.events = Some(EventsConf::Ports { port, replay_port, topic, ranks });
    Ok(())
}

fn parse_port(args: &Args, value: &str) -> Result<u16, ConfError> {
    let port = value.parse().ok().filter(|port| *port > 0);
    port.ok_or_else(|| args.value(value, "a port from 1 to 65535"))
}

fn parse_ranks(args: &Args, value: &str) -> Result<u32, ConfError> {
    let ranks = value.parse().ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks));
    ranks.ok_or_else(|| args.value(value, "a number of ranks from 1 to 64"))
}

fn set_server(args: &Args, conf: &mut UpstreamConf) -> Set {
    let address = args.get(1);
    let mut server = ServerConf {
        address: address.to_owned(),
        names: resolve(args, address)?,
        id: None,
        events: None,
        replay: None,
        ranks: None,
        engine: Engine::default(),
        place: args.place(),
    };
    if conf.servers.iter().any(|other| other.names.iter().any(|name| server.names.contains(name))) {
        let directive = args.directive();
        return Err(args.text(format_args!("duplicate \"{directive}\" for \"{address}\"")));
    }
    for parameter in args.after(1) {
        match split(parameter) {
            ("events", Some(value)) => server.events = Some(endpoint(args, value)?),
            ("replay", Some(value)) => server.replay = Some(endpoint(args, value)?),
            ("id", Some(value)) if !value.is_empty() => server.id = Some(value.to_owned()),
            ("ranks", Some(value)) => server.ranks = Some(parse_ranks(args, value)?),
            ("engine", Some(value)) => {
                let known = Engine::ALL.into_iter().find(|engine| engine.name() == value);
                server.engine = known.ok_or_else(|| args.value(value, "\"vllm\" or \"sglang\""))?;
            }
            _ => return Err(args.parameter(parameter)),
        }
    }
    if server.replay.is_some() && server.events.is_none() {
        return Err(args.text(format_args!("\"replay=\" needs \"events=\" for \"{address}\"")));
    }
    let ranks = server.ranks.unwrap_or(1);
    for endpoint in [&server.events, &server.replay].into_iter().flatten() {
        let last = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
        let last = last.and_then(|(_, port)| Some(port.parse::<u32>().ok()? + ranks - 1));
        if ranks > 1 && last.is_none_or(|port| port > u32::from(u16::MAX)) {
            return Err(args.text(format_args!("no ports for {ranks} ranks after \"{endpoint}\"")));
        }
    }
    conf.servers.push(server);
    Ok(())
}

fn endpoint(args: &Args, value: &str) -> Result<String, ConfError> {
    let (scheme, rest) = value.split_once("://").unwrap_or(("", ""));
    let valid = match scheme {
        "tcp" => rest.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && host != "*" && port.parse::<u16>().is_ok_and(|port| port > 0)
        }),
        "ipc" => !rest.is_empty(),
        _ => false,
    };
    if valid {
        Ok(value.to_owned())
    } else {
        Err(args.value(value, "tcp://host:port or ipc://path"))
    }
}

/// The names that nginx gives to the peers of a `server` line with this address.
fn resolve(args: &Args, address: &str) -> Result<Vec<String>, ConfError> {
    // SAFETY: cf is live; nginx resolves into its pool, as for a `server` line.
    unsafe {
        let pool = (*args.cf).pool;
        let mut url: ngx_url_t = mem::zeroed();
        url.url = ngx_str_t::from_bytes(pool, address.as_bytes())
            .ok_or_else(|| args.text("no memory"))?;
        url.default_port = 80;
        if ngx_parse_url(pool, &mut url) != NGX_OK as isize {
            let cause = match url.err.is_null() {
                true => "cannot be resolved".into(),
                false => std::ffi::CStr::from_ptr(url.err).to_string_lossy(),
            };
            return Err(args.text(format_args!("{cause} in server \"{address}\"")));
        }
        let addresses = std::slice::from_raw_parts(url.addrs.cast::<ngx_addr_t>(), url.naddrs);
        Ok(addresses
            .iter()
            .map(|a| String::from_utf8_lossy(a.name.as_bytes()).into_owned())
            .collect())
    }
}

fn set_block_size(args: &Args, conf: &mut UpstreamConf) -> Set {
    let value = args.get(1);
    let size = match value {
        "auto" => None,
        number => Some(
            number
                .parse()
                .ok()
                .filter(|n| (1..=MAX_BLOCK_SIZE).contains(n))
                .ok_or_else(|| args.value(value, "\"auto\" or a number of tokens"))?,
        ),
    };
    args.once(&mut conf.block_size, size)
}

fn set_policy(args: &Args, conf: &mut UpstreamConf) -> Set {
    let policy = match args.get(1) {
        "cost" => Policy::Cost,
        "weighted" => Policy::Weighted(Weights::default()),
        other => return Err(args.value(other, "\"cost\" or \"weighted\"")),
    };
    args.once(&mut conf.named_policy, policy)
}

fn set_weights(args: &Args, conf: &mut UpstreamConf) -> Set {
    let mut weights = Weights::default();
    for parameter in args.after(0) {
        let (key, value) = split(parameter);
        let slot = match key {
            "cache" => &mut weights.cache,
            "tier" => &mut weights.tier,
            "load" => &mut weights.load,
            _ => return Err(args.parameter(parameter)),
        };
        *slot = value
            .and_then(|value| value.parse().ok())
            .filter(|weight| (0.0..=1.0).contains(weight))
            .ok_or_else(|| args.value(parameter, "a number from 0 to 1"))?;
    }
    args.once(&mut conf.weights, weights)
}
