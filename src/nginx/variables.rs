//! `$kvc_aware_*`.

use nginx_sys::{
    NGX_ERROR, NGX_HTTP_VAR_NOCACHEABLE, NGX_OK, ngx_conf_t, ngx_http_add_variable,
    ngx_http_complex_value, ngx_http_request_t, ngx_http_variable_value_t, ngx_int_t, ngx_pnalloc,
    ngx_str_t,
};

use super::conf::location_conf;
use super::context::{Context, Stage};
use super::{choice, guard, process};
use crate::prompt::Tokens;
use crate::types::Skip;

/// What a variable is made from.
struct Source {
    request: *mut ngx_http_request_t,
}

impl Source {
    fn context(&self) -> Option<&Context> {
        // SAFETY: the request is live, and nothing else refers to its state while this does.
        unsafe { Context::find(self.request) }.map(|context| &*context)
    }
}

type Value = fn(&Source) -> Option<String>;

/// The variables; a test holds README against the names.
const VARIABLES: &[(&str, Value)] = &[
    ("kvc_aware_model", |s| s.context()?.model_name()),
    ("kvc_aware_status", |s| s.context()?.status()),
    ("kvc_aware_server", |s| Some(s.context()?.picked.as_ref()?.name.clone())),
    ("kvc_aware_rank", |s| {
        let rank = match s.context().and_then(|context| context.picked.as_ref()) {
            Some(picked) => picked.rank,
            // SAFETY: the source's request is live, and nothing refers to its state here.
            None => unsafe { choice::rank_for_headers(s.request) },
        };
        Some(rank?.to_string())
    }),
    ("kvc_aware_exact", |s| match s.context()?.looked_at()? {
        Ok(tokens) => Some(tokens.exact.to_string()),
        Err(skip) => Some(skip.name().to_owned()),
    }),
    ("kvc_aware_mode", |s| Some(s.context()?.picked.as_ref()?.mode.name().to_owned())),
    ("kvc_aware_matched_blocks", |s| Some(s.context()?.matched()?.matched_blocks.to_string())),
    ("kvc_aware_matched_tokens", |s| Some(s.context()?.matched()?.matched_tokens.to_string())),
    ("kvc_aware_prompt_blocks", |s| Some(s.context()?.matched()?.prompt_blocks.to_string())),
    ("kvc_aware_prompt_tokens", |s| Some(s.context()?.prompt.as_ref().ok()?.ids.len().to_string())),
    ("kvc_aware_hit_ratio", |s| {
        let picked = s.context()?.matched()?;
        let blocks = f64::from(picked.prompt_blocks.max(1));
        Some(format!("{:.3}", f64::from(picked.matched_blocks) / blocks))
    }),
    ("kvc_aware_choice", |s| Some(s.context()?.choice.as_ref()?.name.clone())),
    ("kvc_aware_choice_matched_tokens", |s| {
        let context = s.context()?;
        context.prompt.as_ref().ok()?;
        Some(context.choice.as_ref()?.matched_tokens.to_string())
    }),
    ("kvc_aware_time", |s| Some(format!("{:.6}", s.context()?.spent.as_secs_f64()))),
    // SAFETY: the source's request is live.
    ("kvc_aware_priority", |s| unsafe { priority_of(s.request) }),
];

impl Context {
    fn model_name(&self) -> Option<String> {
        Some(process::get()?.models.name(self.model?).to_owned())
    }

    /// What the access phase has come to; `None` for a request that ended in the middle of it.
    fn looked_at(&self) -> Option<&Result<Tokens, Skip>> {
        match self.stage {
            Stage::Reading | Stage::Waiting(_) => None,
            Stage::New | Stage::Done => Some(&self.prompt),
        }
    }

    /// The server that was chosen, where the choice rested on tokens.
    fn matched(&self) -> Option<&super::context::Picked> {
        self.prompt.as_ref().ok()?;
        self.picked.as_ref()
    }

    fn status(&self) -> Option<String> {
        let picked = match self.looked_at()? {
            Err(skip) => return Some(skip.to_string()),
            Ok(_) => self.picked.as_ref()?,
        };
        let status = match (self.single, picked.matched_blocks) {
            (true, _) => "single",
            (false, 0) => "miss",
            (false, _) => "hit",
        };
        Some(status.to_owned())
    }
}

/// The priority as a text from 0 to 100; none unless the header is on.
unsafe fn priority_of(r: *mut ngx_http_request_t) -> Option<String> {
    // SAFETY: the request is live, the value was compiled for this configuration.
    unsafe {
        let conf = location_conf(r);
        let value = conf.priority.filter(|_| conf.priority_header())?;
        let mut text = ngx_str_t::empty();
        if ngx_http_complex_value(r, value, &mut text) != NGX_OK as ngx_int_t {
            return None;
        }
        Some(priority(&String::from_utf8_lossy(text.as_bytes())).to_string())
    }
}

/// 0 to 100: a number is clamped, `vip` and `true` are 100, all else is 0.
fn priority(value: &str) -> u8 {
    let value = value.trim();
    if value.eq_ignore_ascii_case("vip") || value.eq_ignore_ascii_case("true") {
        return 100;
    }
    // The cast makes 0 of what is below, and of NaN, which clamp leaves as it is.
    value.parse::<f64>().map_or(0, |number| number.clamp(0.0, 100.0) as u8)
}

pub unsafe extern "C" fn add(cf: *mut ngx_conf_t) -> ngx_int_t {
    for (index, (name, _)) in VARIABLES.iter().enumerate() {
        // SAFETY: nginx copies the name into the configuration's pool.
        unsafe {
            let mut name = ngx_str_t { len: name.len(), data: name.as_ptr().cast_mut() };
            let variable = ngx_http_add_variable(cf, &mut name, NGX_HTTP_VAR_NOCACHEABLE as usize);
            let Some(variable) = variable.as_mut() else { return NGX_ERROR as ngx_int_t };
            variable.get_handler = Some(get);
            variable.data = index;
        }
    }
    NGX_OK as ngx_int_t
}

unsafe extern "C" fn get(
    r: *mut ngx_http_request_t,
    value: *mut ngx_http_variable_value_t,
    index: usize,
) -> ngx_int_t {
    let made =
        guard(None, || VARIABLES.get(index).and_then(|(_, value)| value(&Source { request: r })));
    // SAFETY: the value is nginx's to fill; an empty one is valid too.
    unsafe {
        let text = made.unwrap_or_default();
        let data = ngx_pnalloc((*r).pool, text.len().max(1)).cast::<u8>();
        if data.is_null() {
            return NGX_ERROR as ngx_int_t;
        }
        data.copy_from_nonoverlapping(text.as_ptr(), text.len());
        (*value).set_len(text.len() as u32);
        (*value).set_valid(1);
        (*value).set_no_cacheable(0);
        (*value).set_not_found(0);
        (*value).data = data;
    }
    NGX_OK as ngx_int_t
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_are_clamped() {
        for (text, expected) in [
            ("0", 0),
            ("37", 37),
            (" 42.9 ", 42),
            ("100", 100),
            ("101", 100),
            ("1e9", 100),
            ("-5", 0),
            ("vip", 100),
            ("TRUE", 100),
            ("false", 0),
            ("", 0),
            ("high", 0),
            ("NaN", 0),
            ("inf", 100),
        ] {
            assert_eq!(priority(text), expected, "{text:?}");
        }
    }

    #[test]
    fn readme_names_each_variable() {
        let readme = include_str!("../../README.md");
        for (name, _) in VARIABLES {
            assert!(readme.contains(&format!("`${name}`")), "README does not describe ${name}");
        }
    }
}
