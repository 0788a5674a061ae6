//! The directive table: the one place that says what a directive is called, where it may stand and
//! what it takes. nginx's command table is made from it, and a test holds README against it.

use std::ffi::{CStr, c_char, c_void};

use nginx_sys::{
    NGX_CONF_1MORE, NGX_CONF_2MORE, NGX_CONF_ANY, NGX_CONF_TAKE1, NGX_HTTP_LOC_CONF,
    NGX_HTTP_LOC_CONF_OFFSET, NGX_HTTP_MAIN_CONF, NGX_HTTP_MAIN_CONF_OFFSET, NGX_HTTP_SRV_CONF,
    NGX_HTTP_SRV_CONF_OFFSET, NGX_HTTP_UPS_CONF, ngx_command_t, ngx_conf_t, ngx_str_t,
};

use super::setters::{location, main, upstream};

pub type Setter =
    unsafe extern "C" fn(*mut ngx_conf_t, *mut ngx_command_t, *mut c_void) -> *mut c_char;

/// Where a directive may stand, which is also whose configuration it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    Main,
    Upstream,
    /// `http`, `server`, `location`.
    Any,
    Location,
}

impl Context {
    const fn flags(self) -> u32 {
        match self {
            Context::Main => NGX_HTTP_MAIN_CONF,
            Context::Upstream => NGX_HTTP_UPS_CONF,
            Context::Any => NGX_HTTP_MAIN_CONF | NGX_HTTP_SRV_CONF | NGX_HTTP_LOC_CONF,
            Context::Location => NGX_HTTP_LOC_CONF,
        }
    }

    const fn offset(self) -> usize {
        match self {
            Context::Main => NGX_HTTP_MAIN_CONF_OFFSET,
            Context::Upstream => NGX_HTTP_SRV_CONF_OFFSET,
            Context::Any | Context::Location => NGX_HTTP_LOC_CONF_OFFSET,
        }
    }

    /// As nginx's documentation writes it.
    #[cfg(test)]
    fn names(self) -> &'static str {
        match self {
            Context::Main => "`http`",
            Context::Upstream => "`upstream`",
            Context::Any => "`http`, `server`, `location`",
            Context::Location => "`location`",
        }
    }
}

pub struct Directive {
    pub name: &'static CStr,
    pub context: Context,
    arguments: u32,
    set: Setter,
    /// What follows the name, in nginx's notation.
    #[cfg_attr(not(test), expect(dead_code, reason = "the test holds README against it"))]
    syntax: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "the test holds README against it"))]
    default: &'static str,
}

pub const DIRECTIVES: &[Directive] = &[
    Directive {
        name: c"kvc_aware_zone",
        context: Context::Main,
        arguments: NGX_CONF_TAKE1,
        set: main::zone,
        syntax: "name:size",
        default: "",
    },
    Directive {
        name: c"kvc_aware_model",
        context: Context::Main,
        arguments: NGX_CONF_2MORE,
        set: main::model,
        syntax: "name dir|remote [alias=name,...] [lora=name,...] [template=file] [template_kwargs=json] [optional] [upstream=name] [key_file=file]",
        default: "",
    },
    Directive {
        name: c"kvc_aware_tokenizer_dir",
        context: Context::Main,
        arguments: NGX_CONF_TAKE1,
        set: main::tokenizer_dir,
        syntax: "dir",
        default: "",
    },
    Directive {
        name: c"kvc_aware_threads",
        context: Context::Main,
        arguments: NGX_CONF_TAKE1,
        set: main::threads,
        syntax: "number",
        default: "2",
    },
    Directive {
        name: c"kvc_aware",
        context: Context::Upstream,
        arguments: NGX_CONF_TAKE1,
        set: upstream::balance,
        syntax: "zone",
        default: "",
    },
    Directive {
        name: c"kvc_aware_events",
        context: Context::Upstream,
        arguments: NGX_CONF_1MORE,
        set: upstream::events,
        syntax: "port=number [replay_port=number] [ranks=number] [topic=prefix] | off",
        default: "off",
    },
    Directive {
        name: c"kvc_aware_server",
        context: Context::Upstream,
        arguments: NGX_CONF_2MORE,
        set: upstream::server,
        syntax: "address [events=endpoint] [replay=endpoint] [id=name] [ranks=number] [engine=vllm|sglang]",
        default: "",
    },
    Directive {
        name: c"kvc_aware_block_size",
        context: Context::Upstream,
        arguments: NGX_CONF_TAKE1,
        set: upstream::block_size,
        syntax: "auto | number",
        default: "auto",
    },
    Directive {
        name: c"kvc_aware_policy",
        context: Context::Upstream,
        arguments: NGX_CONF_TAKE1,
        set: upstream::policy,
        syntax: "cost | weighted",
        default: "cost",
    },
    Directive {
        name: c"kvc_aware_weights",
        context: Context::Upstream,
        arguments: NGX_CONF_1MORE,
        set: upstream::weights,
        syntax: "[cache=number] [tier=number] [load=number]",
        default: "cache=0.5 tier=0.3 load=0.2",
    },
    Directive {
        name: c"kvc_aware_route",
        context: Context::Any,
        arguments: NGX_CONF_TAKE1,
        set: location::route,
        syntax: "on | off | shadow",
        default: "off",
    },
    Directive {
        name: c"kvc_aware_max_text",
        context: Context::Any,
        arguments: NGX_CONF_TAKE1,
        set: location::max_text,
        syntax: "size",
        default: "4m",
    },
    Directive {
        name: c"kvc_aware_deadline",
        context: Context::Any,
        arguments: NGX_CONF_TAKE1,
        set: location::deadline,
        syntax: "time",
        default: "100ms",
    },
    Directive {
        name: c"kvc_aware_priority",
        context: Context::Any,
        arguments: NGX_CONF_TAKE1,
        set: location::priority,
        syntax: "value",
        default: "",
    },
    Directive {
        name: c"kvc_aware_priority_header",
        context: Context::Any,
        arguments: NGX_CONF_TAKE1,
        set: location::priority_header,
        syntax: "on | off",
        default: "off",
    },
    Directive {
        name: c"kvc_aware_index",
        context: Context::Location,
        arguments: NGX_CONF_ANY,
        set: location::index,
        syntax: "[explain=on|off] [tokens=on|off]",
        default: "",
    },
];

const fn command(directive: &Directive) -> ngx_command_t {
    let name = directive.name.to_bytes();
    ngx_command_t {
        name: ngx_str_t { len: name.len(), data: name.as_ptr().cast_mut() },
        type_: (directive.context.flags() | directive.arguments) as usize,
        set: Some(directive.set),
        conf: directive.context.offset(),
        offset: 0,
        post: std::ptr::null_mut(),
    }
}

/// nginx's view of [`DIRECTIVES`]; it ends with an empty command.
pub static mut COMMANDS: [ngx_command_t; DIRECTIVES.len() + 1] = {
    const EMPTY: ngx_command_t = ngx_command_t::empty();
    let mut commands = [EMPTY; DIRECTIVES.len() + 1];
    let mut at = 0;
    while at < DIRECTIVES.len() {
        commands[at] = command(&DIRECTIVES[at]);
        at += 1;
    }
    commands
};

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = include_str!("../../README.md");

    /// The section of a directive: from its heading to the next.
    fn section(name: &str) -> &'static str {
        let heading = format!("### {name}\n");
        let start = README.find(&heading).unwrap_or_else(|| panic!("README has no {heading:?}"));
        let text = &README[start + heading.len()..];
        &text[..text.find("\n#").unwrap_or(text.len())]
    }

    #[test]
    fn readme_describes_each_directive_as_it_is() {
        for directive in DIRECTIVES {
            let name = directive.name.to_str().unwrap();
            let section = section(name);
            let default = match directive.default {
                "" => "—".to_owned(),
                default => format!("`{name} {default};`"),
            };
            for line in [
                format!("**Syntax:** `{name} {};`", directive.syntax),
                format!("**Default:** {default}"),
                format!("**Context:** {}", directive.context.names()),
            ] {
                assert!(section.contains(&line), "README's {name} does not say: {line}");
            }
        }
    }

    #[test]
    fn readme_describes_no_other_directive() {
        for heading in README.lines().filter_map(|line| line.strip_prefix("### kvc_aware")) {
            let name = format!("kvc_aware{heading}");
            let known = DIRECTIVES.iter().any(|d| d.name.to_str().unwrap() == name);
            assert!(known, "README describes {name}");
        }
    }
}
