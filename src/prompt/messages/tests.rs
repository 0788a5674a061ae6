use super::*;
use crate::prompt::repr;

/// The conversation that `messages` become, as Python prints it.
fn converted(messages: &str, format: ContentFormat) -> Result<String, Skip> {
    let conversation = conversation(&ordered(json::parse(messages).unwrap()), format)?;
    let mut out = String::new();
    repr::write_json(&mut out, &Json::list(conversation.into_iter().map(Json::dict).collect()))
        .unwrap();
    Ok(out)
}

fn string(messages: &str) -> Result<String, Skip> {
    converted(messages, ContentFormat::String)
}

#[test]
fn parts_are_joined_or_handed_over() {
    let messages = r#"[{"role":"user","content":[{"text":"a","type":"text","own":1,"name":2},
        {"type":"text","text":""},{"type":"refusal","refusal":"b"}]}]"#;
    assert_eq!(string(messages).unwrap(), r"[{'role': 'user', 'content': 'a\nb'}]");
    assert_eq!(
        converted(messages, ContentFormat::Parts).unwrap(),
        "[{'role': 'user', 'content': [{'type': 'text', 'text': 'a', 'own': 1}, \
         {'type': 'text', 'text': ''}, {'type': 'text', 'text': 'b'}]}]"
    );
    let tool = r#"[{"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"a"},
        {"type":"text","text":"b"}]}]"#;
    assert_eq!(
        converted(tool, ContentFormat::Parts).unwrap(),
        r"[{'role': 'tool', 'content': 'a\nb', 'tool_call_id': '1'}]"
    );
}

#[test]
fn tool_calls_are_ordered_and_their_arguments_read() {
    let call = |arguments: &str| {
        let arguments = serde_json::Value::from(arguments);
        format!(
            r#"[{{"role":"assistant","content":null,"reasoning_content":"r","tool_calls":[
            {{"type":"function","own":1,"function":{{"name":"f","arguments":{arguments}}},
            "id":"1"}}]}}]"#
        )
    };
    let with = |arguments: &str| {
        format!(
            "[{{'role': 'assistant', 'content': '', 'tool_calls': [{{'id': '1', 'function': \
             {{'arguments': {arguments}, 'name': 'f'}}, 'type': 'function', 'own': 1}}], \
             'reasoning': 'r', 'reasoning_content': 'r'}}]"
        )
    };
    for (text, read) in [
        (r#"{"a": 1.50, "b": NaN, "a": 2}"#, "{'a': 2, 'b': nan}"),
        ("", "{}"),
        ("[1]", "{}"),
        ("{'a': 1}", "{}"),
    ] {
        assert_eq!(string(&call(text)).unwrap(), with(read), "{text}");
    }
    let none = r#"[{"role":"assistant","content":"a","tool_calls":[]}]"#;
    assert_eq!(string(none).unwrap(), "[{'role': 'assistant', 'content': 'a'}]");
}

#[test]
fn wrong_messages_are_refused_and_others_named() {
    for message in [
        r#"{"content":"a"}"#,
        r#"{"role":"user","content":null}"#,
        r#"{"role":"user","content":5}"#,
        r#"{"role":"user","content":["a"]}"#,
        r#"{"role":"user","content":[{"type":"text"}]}"#,
        r#"{"role":"user","content":[{"type":"odd","text":"a"}]}"#,
        r#"{"role":"user","content":"a","name":5}"#,
        r#"{"role":"tool","content":"a","tool_call_id":5}"#,
        r#"{"role":"assistant","content":null,"tool_calls":null}"#,
        r#"{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":{}}}]}"#,
        r#"{"role":"assistant","tool_calls":[{"id":"1","type":"custom","custom":{}}]}"#,
    ] {
        assert_eq!(string(&format!("[{message}]")), Err(Skip::Refused), "{message}");
    }
    let image = r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]"#;
    assert_eq!(string(image), Err(Skip::Multimodal));
    assert!(has_media(&json::parse(image).unwrap()));
    let odd = r#"[{"role":"critic","content":["a",{"type":"input_text","text":"b"}]}]"#;
    assert_eq!(string(odd).unwrap(), r"[{'role': 'critic', 'content': 'a\nb'}]");
}

#[test]
fn developer_messages_become_one_system_message() {
    let merged = |messages: &str| {
        let parsed = json::parse(messages).unwrap();
        let conversation = conversation(&parsed, ContentFormat::String).unwrap();
        let merged = without_developer(conversation);
        let mut out = String::new();
        repr::write_json(&mut out, &Json::list(merged.into_iter().map(Json::dict).collect()))
            .unwrap();
        out
    };
    assert_eq!(
        merged(r#"[{"role":"developer","content":"a"},{"role":"user","content":"b"}]"#),
        "[{'role': 'system', 'content': 'a'}, {'role': 'user', 'content': 'b'}]"
    );
    assert_eq!(
        merged(
            r#"[{"role":"system","content":"a"},{"role":"user","content":"b"},
            {"role":"developer","content":"c"}]"#
        ),
        r"[{'role': 'system', 'content': 'a\n\nc'}, {'role': 'user', 'content': 'b'}]"
    );
    let billed = r#"[{"role":"system","content":"x-anthropic-billing-header: 1\nrest"}]"#;
    assert_eq!(merged(billed), "[{'role': 'system', 'content': 'rest'}]");
}
