//! What says the same through another API is the same prompt, or a named reason why not.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use ngx_http_kvc_aware_module::prompt::{Endpoint, Limits, ModelSpec, Models, Tokens};
use ngx_http_kvc_aware_module::types::Skip;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

struct World(Models);

impl World {
    fn new() -> World {
        World::with_template(None)
    }

    fn with_template(template: Option<PathBuf>) -> World {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("t/models/tiny");
        let name = "tiny".to_owned();
        let models = Models::new(vec![ModelSpec { name, dir, template, ..ModelSpec::default() }]);
        models.load_all(|_, result| {
            result.unwrap();
        });
        World(models)
    }

    fn ask(&self, path: &str, mut body: Value) -> Result<Tokens, Skip> {
        body["model"] = json!("tiny");
        let endpoint = Endpoint::from_path(path).unwrap();
        let limits = Limits { max_text: 1 << 20, deadline: None };
        self.0.tokenize(endpoint, body.to_string().as_bytes(), &limits, true, |_| ()).result
    }

    fn text(&self, path: &str, body: Value) -> String {
        let tokens = self.ask(path, body).unwrap();
        assert!(tokens.exact.reason().is_none());
        tokens.text.unwrap()
    }
}

fn messages() -> Value {
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the time?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "user", "content": "Thanks"},
    ])
}

#[test]
fn messages_are_a_chat() {
    let body = json!({
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": "What is the time?"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "noon"},
                {"type": "text", "text": "Thanks"},
            ]},
        ],
    });
    let world = World::new();
    let chat = world.text(CHAT, json!({ "messages": messages() }));
    assert!(chat.contains("noon") && chat.contains("Thanks"));
    assert_eq!(world.text("/v1/messages", body), chat);
}

#[test]
fn messages_with_an_image_are_known_up_to_it() {
    let world = World::new();
    let ask = |messages: &[Value]| {
        world.ask("/v1/messages", json!({"max_tokens": 5, "messages": messages})).unwrap()
    };
    let text = json!({"type": "text", "text": "What is this, in a word or two?"});
    let image = json!({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}});
    let turns = |last: Value| {
        [
            json!({"role": "user", "content": "I shall show you something. Say that you are ready."}),
            json!({"role": "assistant", "content": "Ready."}),
            json!({"role": "user", "content": last}),
        ]
    };
    let plain = ask(&turns(json!([text])));
    let known = ask(&turns(json!([text, image])));
    assert_eq!(known.exact.reason(), Some("multimodal"));
    assert!(plain.ids.starts_with(&known.ids), "{:?} for {:?}", known.ids, plain.ids);
    // Its template takes strings, before which the engine puts the image.
    let last = ask(&turns(json!([text]))[2..]).ids.len();
    assert!(known.ids.len() + last > plain.ids.len(), "{} and {last}", known.ids.len());
}

#[test]
fn responses_are_a_chat() {
    let body = json!({
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is the time?"}]},
            {"type": "message", "role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            {"role": "user", "content": "Thanks"},
        ],
    });
    let world = World::new();
    let chat = world.text(CHAT, json!({ "messages": messages() }));
    assert_eq!(world.text("/v1/responses", body), chat);
    let plain = json!([{"role": "user", "content": "Hello"}]);
    let chat = world.ask(CHAT, json!({ "messages": plain })).unwrap();
    let own = world.ask("/v1/responses", json!({ "input": "Hello" })).unwrap();
    assert_eq!(own.text, chat.text);
    // The template writes a BOS and the tokenizer another, as in the engine.
    assert_eq!(own.ids[0], chat.ids[0]);
    assert_eq!(own.ids[1..], chat.ids);
}

/// A chat's calls pass through the engine's request model, those of items do not.
#[test]
fn calls_have_the_order_of_their_api() {
    let file = std::env::temp_dir().join(format!("kvc-calls-{}.jinja", std::process::id()));
    std::fs::write(&file, "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}")
        .unwrap();
    let world = World::with_template(Some(file.clone()));
    std::fs::remove_file(file).unwrap();
    let ordered =
        r#"[{"id": "c1", "function": {"arguments": {"a": 1}, "name": "f"}, "type": "function"}]"#;
    let call = json!({"type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}, "id": "c1"});
    let chat = json!({"messages": [{"role": "assistant", "tool_calls": [call]}]});
    assert_eq!(world.text(CHAT, chat), ordered);
    let used = json!({"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}});
    let body = json!({"max_tokens": 5, "messages": [{"role": "assistant", "content": [used]}]});
    assert_eq!(world.text("/v1/messages", body), ordered);
    let item =
        json!({"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"});
    assert_eq!(
        world.text("/v1/responses", json!({ "input": [item] })),
        r#"[{"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}, "type": "function"}]"#
    );
}

#[test]
fn generate_takes_a_text_or_ids() {
    let world = World::new();
    let ids = world.ask("/v1/completions", json!({ "prompt": "Once upon a time" })).unwrap().ids;
    let ask = |body| world.ask("/generate", body).unwrap().ids;
    assert_eq!(ask(json!({ "text": "Once upon a time" })), ids);
    assert_eq!(ask(json!({ "input_ids": [5, 6, 7] })), [5, 6, 7]);
}

#[test]
fn what_is_not_reproduced_is_named() {
    let world = World::new();
    let image = json!([{"type": "image", "source": {"type": "url"}}]);
    let billed = json!([{"type": "input_text", "text": "x-anthropic-billing-header: 1\nS"}]);
    for (path, body, skip) in [
        ("/v1/responses", json!({"input": "a", "previous_response_id": "r"}), Skip::Unsupported),
        ("/v1/responses", json!({"input": [{"type": "web_search_call"}]}), Skip::Unsupported),
        (
            "/v1/responses",
            json!({"input": [{"role": "system", "content": billed}]}),
            Skip::Unsupported,
        ),
        ("/v1/responses", json!({"input": 5}), Skip::Refused),
        (
            "/v1/messages",
            json!({"max_tokens": 1, "messages": [{"role": "user", "content": image}]}),
            Skip::Multimodal,
        ),
        ("/v1/messages", json!({"max_tokens": 1}), Skip::Refused),
    ] {
        assert_eq!(world.ask(path, body.clone()).map(|_| ()).unwrap_err(), skip, "{path} {body}");
    }
}
