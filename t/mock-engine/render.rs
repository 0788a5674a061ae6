//! `/v1/…/render` and `/tokenize`: the ids of a request, in the shapes of vLLM.

use std::io;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use ngx_http_kvc_aware_module::prompt::{Endpoint, Tokens};
use serde_json::{Map, Value, json};

use crate::api::{Server, error, refuse, respond};
use crate::http::{Connection, Request};

/// How often one that never answers looks whether its client is still there.
const LOOK: Duration = Duration::from_millis(10);

/// What becomes of requests for ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rendering {
    #[default]
    On,
    /// `render` is answered with this status and no ids.
    Status(u16),
    /// Both are answered with something else.
    Garbage,
    /// Neither is answered at all.
    Hang,
}

impl FromStr for Rendering {
    type Err = ();

    fn from_str(text: &str) -> Result<Rendering, ()> {
        match text {
            "on" => Ok(Rendering::On),
            "garbage" => Ok(Rendering::Garbage),
            "hang" => Ok(Rendering::Hang),
            status => status.parse().map(Rendering::Status).map_err(|_| ()),
        }
    }
}

/// The endpoint whose requests are rendered at a path.
pub fn endpoint(path: &str) -> Option<Endpoint> {
    Endpoint::from_path(path.strip_suffix("/render")?)
}

pub fn render(
    server: &Server,
    connection: &mut Connection,
    request: &Request,
    endpoint: Endpoint,
) -> io::Result<()> {
    match server.control.renders() {
        Rendering::On => {}
        Rendering::Status(404) => return respond(connection, 404, &json!({"detail": "Not Found"})),
        Rendering::Status(status) => return error(connection, status, "a fault was asked for"),
        fault => return fail(connection, fault),
    }
    let body: Map<String, Value> = serde_json::from_slice(&request.body).unwrap_or_default();
    let tokens = match server.tokens(endpoint, request, &body) {
        Ok(tokens) => tokens,
        Err(skip) => return refuse(connection, skip),
    };
    let one = rendered(&tokens, &body);
    let answer = if endpoint == Endpoint::Completions { json!([one]) } else { one };
    respond(connection, 200, &answer)
}

fn rendered(tokens: &Tokens, body: &Map<String, Value>) -> Value {
    json!({
        "request_id": "render",
        "token_ids": tokens.ids,
        "token_offsets": null,
        "features": null,
        "content_parts": null,
        "sampling_params": { "n": 1, "temperature": 1.0 },
        "model": body.get("model"),
        "stream": tokens.stream,
        "cache_salt": tokens.salt,
    })
}

pub fn tokenize(server: &Server, connection: &mut Connection, request: &Request) -> io::Result<()> {
    if let fault @ (Rendering::Garbage | Rendering::Hang) = server.control.tokenizes() {
        return fail(connection, fault);
    }
    let body: Map<String, Value> = serde_json::from_slice(&request.body).unwrap_or_default();
    let endpoint =
        if body.contains_key("messages") { Endpoint::Chat } else { Endpoint::Completions };
    match server.tokens(endpoint, request, &body) {
        Ok(tokens) => {
            let answer = json!({
                "count": tokens.ids.len(),
                "max_model_len": server.max_tokens(),
                "tokens": tokens.ids,
                "token_strs": null,
            });
            respond(connection, 200, &answer)
        }
        Err(skip) => refuse(connection, skip),
    }
}

fn fail(connection: &mut Connection, fault: Rendering) -> io::Result<()> {
    if fault == Rendering::Hang {
        while !connection.gone() {
            thread::sleep(LOOK);
        }
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    respond(connection, 200, &json!({ "token_ids": "none", "tokens": "none" }))
}
