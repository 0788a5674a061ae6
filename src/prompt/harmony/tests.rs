use std::fs;
use std::path::Path;

use super::*;
use crate::prompt::{Endpoint, Limits, ModelSpec, Models, Tokens};

const SYSTEM: &str = "<|start|>system<|message|>You are ChatGPT, a large language model trained by \
    OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: 2026-03-05\n\nReasoning: medium\n\n# Valid \
    channels: analysis, commentary, final. Channel must be included for every message.";

/// A folder whose tokenizer knows the tokens of harmony, and no config.json.
fn folder() -> std::path::PathBuf {
    let tiny = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/t/models/tiny"));
    let text = fs::read_to_string(tiny.join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (id, token) in (500..).zip(TOKENS) {
        let mut entry = added[0].clone();
        entry["id"] = id.into();
        entry["content"] = token.into();
        added.push(entry);
    }
    let thread = std::thread::current();
    let name = thread.name().unwrap_or_default().replace("::", "-");
    let folder = std::env::temp_dir().join(format!("kvc-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
    folder
}

struct Served(Models);

impl Served {
    fn new(kwargs: Value) -> Served {
        let dir = folder();
        let spec = ModelSpec {
            name: "m".to_owned(),
            dir: dir.clone(),
            template_kwargs: kwargs.as_object().cloned(),
            ..ModelSpec::default()
        };
        let models = Models::new(vec![spec]).at_time(1_772_694_489);
        models.load_all(|_, result| assert!(result.is_ok(), "{:?}", result.err()));
        fs::remove_dir_all(dir).unwrap();
        Served(models)
    }

    fn run(&self, endpoint: Endpoint, rest: &str) -> Result<Tokens, Skip> {
        let limits = Limits { max_text: 1 << 20, deadline: None };
        let body = format!(r#"{{"model":"m",{rest}}}"#);
        self.0.tokenize(endpoint, body.as_bytes(), &limits, true, |_| ()).result
    }

    /// What comes after the system message.
    fn rest(&self, endpoint: Endpoint, rest: &str) -> Result<String, Skip> {
        let text = self.run(endpoint, rest)?.text.unwrap();
        let (_, rest) = text.split_once("<|end|>").unwrap();
        Ok(rest.strip_suffix("<|start|>assistant").unwrap().to_owned())
    }

    fn chat(&self, messages: &str) -> Result<String, Skip> {
        self.rest(Endpoint::Chat, &format!(r#""messages":[{messages}]"#))
    }

    fn items(&self, rest: &str) -> Result<String, Skip> {
        self.rest(Endpoint::Responses, rest)
    }
}

fn served() -> Served {
    Served::new(Value::Null)
}

#[test]
fn a_prompt_is_dated_unless_the_engine_has_a_date_of_its_own() {
    let hi = r#""messages":[{"role":"user","content":"Hi"}]"#;
    let tokens = served().run(Endpoint::Chat, hi).unwrap();
    let text = format!("{SYSTEM}<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant");
    assert_eq!(tokens.text, Some(text));
    assert_eq!(tokens.exact.reason(), Some("date"));
    let dated = Served::new(serde_json::json!({ "VLLM_SYSTEM_START_DATE": "2025-01-02" }));
    let tokens = dated.run(Endpoint::Chat, hi).unwrap();
    assert!(tokens.text.unwrap().contains("\nCurrent date: 2025-01-02\n"));
    assert_eq!(tokens.exact, Exact::Yes);
}

#[test]
fn names_of_tokens_in_a_text_are_text() {
    let chat = |text: &str| {
        let messages = format!(r#""messages":[{{"role":"user","content":"{text}"}}]"#);
        served().run(Endpoint::Chat, &messages).unwrap().ids
    };
    let (plain, odd) = (chat(""), chat("<|end|>"));
    let ends = |ids: &[u32]| ids.iter().filter(|id| **id == 501).count();
    assert_eq!((ends(&plain), ends(&odd)), (2, 2));
    assert!(odd.len() > plain.len());
    // A completion is one text.
    let ids = served().run(Endpoint::Completions, r#""prompt":"<|end|>""#).unwrap().ids;
    assert_eq!(ends(&ids), 1);
}

#[test]
fn each_part_is_encoded_apart() {
    let ids = |content: &str| {
        let messages = format!(r#""messages":[{{"role":"user","content":{content}}}]"#);
        served().run(Endpoint::Chat, &messages).unwrap()
    };
    let one = ids(r#""the the""#);
    let two = ids(r#"[{"type":"text","text":"the t"},{"type":"text","text":"he"}]"#);
    assert_eq!(one.text, two.text);
    assert_ne!(one.ids, two.ids);
}

#[test]
fn instructions_are_the_developers() {
    let both = r#"{"role":"system","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
        {"role":"user","content":"u"},{"role":"developer","content":"c"},{"role":"system"}"#;
    let developer = "<|start|>developer<|message|># Instructions\n\n";
    let text = served().chat(both).unwrap();
    let user = "<|start|>user<|message|>u<|end|>";
    assert_eq!(text, format!("{developer}ab<|end|>{user}{developer}c<|end|>"));
    assert_eq!(served().chat(r#"{"role":"system","content":""}"#).unwrap(), "");
    let kwargs = serde_json::json!({ "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": true });
    let served = Served::new(kwargs);
    let messages = r#""messages":[{"role":"system","content":"a"},{"role":"user","content":"u"}]"#;
    let text = served.run(Endpoint::Chat, messages).unwrap().text.unwrap();
    assert!(text.contains("by OpenAI.\na\nKnowledge"), "{text}");
    assert!(!text.contains("developer"), "{text}");
}

#[test]
fn reasoning_before_an_answer_is_dropped() {
    let said = r#"{"role":"user","content":"q"},
        {"role":"assistant","content":"a","reasoning_content":"r"}"#;
    let text = served().chat(said).unwrap();
    let answered = "<|start|>user<|message|>q<|end|>\
        <|start|>assistant<|channel|>final<|message|>a<|end|>";
    assert_eq!(text, answered);
    let more = format!(r#"{said},{{"role":"assistant","reasoning":"s"}}"#);
    let text = served().chat(&more).unwrap();
    let thought = "<|start|>assistant<|channel|>analysis<|message|>s<|end|>";
    assert_eq!(text, format!("{answered}{thought}"));
    assert_eq!(
        served().chat(r#"{"role":"assistant","content":"","reasoning":5}"#),
        Err(Skip::Refused)
    );
}

#[test]
fn calls_and_their_results_are_commentary() {
    let calls = r#"{"role":"assistant","content":"c","reasoning":"r","tool_calls":[
        {"id":"1","type":"function","function":{"name":"f","arguments":"{ }"}},
        {"id":"2","type":"custom","custom":{"name":"g","input":"i"}}]},
        {"role":"tool","tool_call_id":"1","content":"x"},
        {"role":"tool","tool_call_id":"2","content":[{"type":"text","text":"y"}]},
        {"role":"tool","content":"z"}"#;
    assert_eq!(
        served().chat(calls).unwrap(),
        "<|start|>assistant<|channel|>commentary<|message|>c<|end|>\
         <|start|>assistant<|channel|>analysis<|message|>r<|end|>\
         <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{ }<|call|>\
         <|start|>assistant to=functions.<|channel|>commentary json<|message|><|call|>\
         <|start|>functions.f<|channel|>commentary to=assistant<|message|>x<|end|>\
         <|start|>functions.None<|channel|>commentary to=assistant<|message|>y<|end|>\
         <|start|>functions.<|channel|>commentary to=assistant<|message|>z<|end|>"
    );
}

#[test]
fn a_part_that_is_no_text_is_not_shown() {
    let content = |parts: &str| served().chat(&format!(r#"{{"role":"user","content":[{parts}]}}"#));
    let user = |text: &str| Ok(format!("<|start|>user<|message|>{text}<|end|>"));
    let image = r#"{"type":"image_url","image_url":{"url":"u"}}"#;
    assert_eq!(content(&format!(r#"{image},{{"type":"text","text":"t"}}"#)), user("t"));
    assert_eq!(content(r#"{"type":"refusal","refusal":"no"}"#), user(""));
    for parts in [r#"{"type":"text"}"#, r#"{"type":"foo","text":"t"}"#, r#""t""#] {
        assert_eq!(content(parts), Err(Skip::Refused), "{parts}");
    }
}

#[test]
fn what_the_engine_refuses_is_refused() {
    let call = |name: &str| {
        format!(
            r#"{{"role":"assistant","content":"","tool_calls":[{{"id":"1","type":"function",
            "function":{{"name":"{name}","arguments":""}}}}]}}"#
        )
    };
    for name in ["<|end|>", "a<|reserved_200017|>", "<|endoftext|>"] {
        assert_eq!(served().chat(&call(name)), Err(Skip::Refused), "{name}");
    }
    for name in ["<|endofprompt|>", "<|reserved_200005|>", "<|reserved_201089|>", "<|x|>"] {
        assert!(served().chat(&call(name)).is_ok(), "{name}");
    }
    for message in [
        r#"{"role":"critic","content":"c"}"#,
        r#"{"role":"user","content":null}"#,
        r#"{"role":"user","content":"c","tool_calls":null}"#,
        r#"{"role":"assistant","content":null,"tool_calls":null}"#,
        r#"{"role":"assistant","tool_calls":"x"}"#,
        r#"{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":""}}]}"#,
    ] {
        assert_eq!(served().chat(message), Err(Skip::Refused), "{message}");
    }
    for rest in [
        r#""reasoning_effort":"none""#,
        r#""reasoning_effort":"xhigh""#,
        r#""truncation_side":"up""#,
        r#""truncate_prompt_tokens":-2"#,
    ] {
        let rest = format!(r#""messages":[],{rest}"#);
        assert_eq!(served().run(Endpoint::Chat, &rest), Err(Skip::Refused), "{rest}");
    }
    let ignored = r#""messages":[],"chat_template":"x","truncate_prompt_tokens":1,
        "chat_template_kwargs":{"messages":[],"reasoning_effort":"low"}"#;
    assert_eq!(served().rest(Endpoint::Chat, ignored).as_deref(), Ok(""));
}

#[test]
fn efforts_and_tools_are_told() {
    let rest = r#""messages":[],"reasoning_effort":"high","tools":[{"type":"function","function":
        {"name":"f","description":"one\ntwo","parameters":{"type":"object","properties":{
        "a":{"type":"string"}}}}},{"type":"function","function":{"name":"g"}}]"#;
    let text = served().run(Endpoint::Chat, rest).unwrap().text.unwrap();
    assert!(text.contains("\nReasoning: high\n"), "{text}");
    let tools = "every message.\nCalls to these tools must go to the commentary channel: \
        'functions'.<|end|><|start|>developer<|message|># Tools\n\n## functions\n\nnamespace \
        functions {\n\n// one\n// two\ntype f = (_: {\na?: string,\n}) => any;\n\ntype g = () => \
        any;\n\n} // namespace functions<|end|><|start|>assistant";
    assert!(text.ends_with(tools), "{text}");
}

#[test]
fn items_become_messages() {
    let text = served().items(
        r#""input":[{"role":"developer","content":"d"},
        {"role":"user","content":[{"type":"input_text","text":"u"}]},
        {"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"r"},
            {"type":"reasoning_text","text":"s"}]},
        {"type":"reasoning","summary":[{"type":"summary_text","text":"no"}]},
        {"type":"function_call","call_id":"1","name":"f","arguments":"{}"},
        {"type":"function_call_output","call_id":"1","output":"o"},
        {"role":"system","content":"late"}]"#,
    );
    assert_eq!(
        text.unwrap(),
        "<|start|>developer<|message|># Instructions\n\nd<|end|>\
         <|start|>user<|message|>u<|end|>\
         <|start|>assistant<|channel|>analysis<|message|>r\ns<|end|>\
         <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>\
         <|start|>functions.f<|channel|>commentary to=assistant<|message|>o<|end|>\
         <|start|>developer<|message|># Instructions\n\nlate<|end|>"
    );
    let answer = r#""instructions":"i","input":[{"type":"message","role":"assistant","content":[
        {"type":"output_text","text":"a"},{"type":"output_text","text":"b"}]}]"#;
    assert_eq!(
        served().items(answer).unwrap(),
        "<|start|>developer<|message|># Instructions\n\ni<|end|>\
         <|start|>assistant<|channel|>final<|message|>ab<|end|>"
    );
}

#[test]
fn items_that_make_no_prompt_here_are_named() {
    for (rest, skip) in [
        (r#""input":[{"type":"function_call_output","call_id":"1","output":"o"}]"#, Skip::Refused),
        (
            r#""input":[{"type":"custom_tool_call","call_id":"1","name":"f","input":""}]"#,
            Skip::Refused,
        ),
        (r#""input":"u","tools":[{"type":"custom","name":"c"}]"#, Skip::Refused),
        (
            r#""input":[{"type":"message","role":"assistant","id":"m","status":"completed",
            "content":"text"}]"#,
            Skip::Refused,
        ),
        (r#""input":"u","reasoning":{"effort":"minimal"}"#, Skip::Refused),
        (r#""input":"u","chat_template_kwargs":{"chat_template":"x"}"#, Skip::Refused),
        (r#""input":"u","tools":[{"type":"web_search_preview"}]"#, Skip::Unsupported),
        (r#""input":"u","previous_input_messages":[]"#, Skip::Unsupported),
        (r#""input":"u","previous_response_id":"r"#, Skip::BadJson),
        (r#""input":"u","previous_response_id":"r""#, Skip::Unsupported),
    ] {
        assert_eq!(served().items(rest), Err(skip), "{rest}");
    }
    let cut = served().run(Endpoint::Responses, r#""input":"u","truncation":"auto""#).unwrap();
    assert_eq!(cut.exact.reason(), Some("date"));
}

#[test]
fn messages_of_anthropic_are_rendered() {
    let rest = r#""max_tokens":9,"system":"s","thinking":{"type":"disabled"},
        "messages":[{"role":"user","content":"u"}],
        "tools":[{"name":"f","input_schema":{"properties":{}}}]"#;
    let text = served().run(Endpoint::Messages, rest).unwrap().text.unwrap();
    assert!(text.contains("\nReasoning: low\n"), "{text}");
    assert!(text.contains("# Instructions\n\ns\n\n# Tools"), "{text}");
    assert!(text.contains("type f = (_: {\n}) => any;"), "{text}");
    let call = r#""max_tokens":9,"messages":[{"role":"assistant","content":[
        {"type":"tool_use","id":"1","name":"f","input":{"é":[1.0,null]}}]}]"#;
    let text = served().run(Endpoint::Messages, call).unwrap().text.unwrap();
    assert!(text.contains(r#"json<|message|>{"\u00e9": [1.0, null]}<|call|>"#), "{text}");
}

#[test]
fn a_text_past_the_limit_is_cut_and_said_to_be() {
    let tools: Vec<String> = (0..50)
        .map(|at| {
            let properties = r#"{"type":"object","properties":{"a":{"type":"string"}}}"#;
            let name = format!(r#""name":"f{at}","parameters":{properties}"#);
            format!(r#"{{"type":"function","function":{{{name}}}}}"#)
        })
        .collect();
    let body = format!(r#"{{"model":"m","messages":[],"tools":[{}]}}"#, tools.join(","));
    let run = |max_text| {
        let limits = Limits { max_text, deadline: None };
        served().0.tokenize(Endpoint::Chat, body.as_bytes(), &limits, true, |_| ()).result.unwrap()
    };
    let (whole, cut) = (run(1 << 20), run(600));
    assert_eq!((cut.text_len < whole.text_len, cut.exact.reason()), (true, Some("max_text")));
    assert!(whole.text.unwrap().starts_with(&cut.text.unwrap()));
}

/// The type of a schema.
fn typed(schema: &str) -> String {
    schema::Type::of(&serde_json::from_str(schema).unwrap(), usize::MAX)
}

#[test]
fn schemas_become_types() {
    for (schema, expected) in [
        (r#"{"type":"integer"}"#, "number"),
        (r#"{"type":["integer","null"]}"#, "number | null"),
        (r#"{"type":"string","enum":["a","b",1]}"#, r#""a" | "b""#),
        (r#"{"type":"array"}"#, "Array<any>"),
        (r#"{"type":"array","items":{"type":"string","enum":["a","b"]}}"#, r#""a" | "b"[]"#),
        (r#"{"anyOf":[]}"#, "any"),
        ("true", "any"),
        (
            r#"{"oneOf":[{"type":"string","description":"d","default":"x"},
            {"type":"number","nullable":true}]}"#,
            "\n | string // d default: \"x\"\n | number | null",
        ),
        (
            r#"{"type":"object","description":"d","required":["a"],"properties":{
            "a":{"type":"object","title":"T","properties":{"b":{"type":"boolean","default":1e-7}}},
            "c":{"type":"string","nullable":true,"examples":["e",1],"default":"x"},
            "d":{"type":"string","enum":["x"],"default":"x"}}}"#,
            "// d\n{\n// T\n//\na: {\n    b?: boolean, // default: 1e-7\n    },\n\
             // Examples:\n// - \"e\"\nc?: string | null, // default: \"x\"\n\
             d?: \"x\", // default: x\n}",
        ),
        (
            r#"{"type":"object","properties":{"a":{"description":"d","default":2,"oneOf":[
            {"type":"string","description":"e"},{"type":"null","description":"f"}]}}}"#,
            "{\n// d\n// default: 2\na?:\n | string\n | any // f\n,\n}",
        ),
    ] {
        assert_eq!(typed(schema), expected, "{schema}");
    }
}
