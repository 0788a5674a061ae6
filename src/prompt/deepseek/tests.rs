use std::fs;
use std::path::Path;

use crate::prompt::{Endpoint, Limits, ModelSpec, Models};
use crate::types::Skip;

/// A model of an architecture, with a tokenizer that knows none of its tokens.
struct Served(Models);

impl Served {
    fn new(config: &str) -> Served {
        let tiny = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/t/models/tiny"));
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default().replace("::", "-");
        let dir = std::env::temp_dir().join(format!("kvc-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::copy(tiny.join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
        fs::write(dir.join("config.json"), config).unwrap();
        let spec = ModelSpec { name: "m".to_owned(), dir: dir.clone(), ..ModelSpec::default() };
        let models = Models::new(vec![spec]);
        models.load_all(|_, result| assert!(result.is_ok(), "{:?}", result.err()));
        fs::remove_dir_all(dir).unwrap();
        Served(models)
    }

    fn prompt(&self, rest: &str) -> Result<String, Skip> {
        let limits = Limits { max_text: 1 << 20, deadline: None };
        let body = format!(r#"{{"model":"m",{rest}}}"#);
        let result = self.0.tokenize(Endpoint::Chat, body.as_bytes(), &limits, true, |_| ()).result;
        let text = result?.text.unwrap();
        Ok(text.strip_prefix("<｜begin▁of▁sentence｜>").unwrap().to_owned())
    }

    fn chat(&self, messages: &str, rest: &str) -> Result<String, Skip> {
        self.prompt(&format!(r#""messages":[{messages}]{rest}"#))
    }
}

fn v32() -> Served {
    Served::new(r#"{"model_type":"deepseek_v32"}"#)
}

fn v4() -> Served {
    Served::new(r#"{"architectures":["DeepseekV4ForCausalLM"]}"#)
}

const THINKS: &str = r#","chat_template_kwargs":{"thinking":true}"#;
const QUIET: &str = r#","chat_template_kwargs":{"thinking":false}"#;

const ASKED: &str = r#"{"role":"user","content":"q"},
    {"role":"assistant","content":"a","reasoning":"r"}"#;
const CALLED: &str = r#"{"role":"user","content":"q"},
    {"role":"assistant","content":"c","reasoning":"r","tool_calls":[
    {"id":"1","type":"function","function":{"name":"f","arguments":"{\"s\":\"t\",\"n\":[1.0,null]}"}},
    {"id":"2","type":"function","function":{"name":"g","arguments":"no"}}]}"#;

#[test]
fn the_architecture_says_whose_prompts_they_are() {
    let other = r#"{"model_type":"deepseek_v32","architectures":["OtherForCausalLM"]}"#;
    // Without a template there is no chat.
    assert_eq!(Served::new(other).chat(ASKED, ""), Err(Skip::Refused));
    let newer = r#"{"architectures":["DeepseekV41ForCausalLM"]}"#;
    assert_eq!(Served::new(newer).chat(ASKED, ""), Err(Skip::Unsupported));
}

#[test]
fn v32_shows_reasoning_of_the_turn_that_is_not_answered() {
    let user = r#",{"role":"user","content":"u"}"#;
    let all = format!("{ASKED}{user}");
    let answered = "<｜User｜>q<｜Assistant｜></think>a<｜end▁of▁sentence｜>";
    let open = |mark: &str| Ok(format!("{answered}<｜User｜>u<｜Assistant｜>{mark}"));
    assert_eq!(v32().chat(&all, ""), open("</think>"));
    assert_eq!(v32().chat(&all, THINKS), open("<think>"));
    assert_eq!(v32().chat(&all, r#","reasoning_effort":"low""#), open("<think>"));
    let shown = "<｜User｜>q<｜Assistant｜><think>r</think>a<｜end▁of▁sentence｜>";
    assert_eq!(v32().chat(ASKED, THINKS).as_deref(), Ok(shown));
    let bare = r#"{"role":"user","content":"q"},{"role":"assistant","content":"a"}"#;
    assert_eq!(v32().chat(bare, THINKS), Err(Skip::Refused));
    assert_eq!(v32().chat("", ""), Err(Skip::Refused));
}

#[test]
fn v32_closes_results_after_the_last() {
    let calls = "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
        <｜DSML｜parameter name=\"s\" string=\"true\">t</｜DSML｜parameter>\n\
        <｜DSML｜parameter name=\"n\" string=\"false\">[1.0, null]</｜DSML｜parameter>\n\
        </｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n\
        </｜DSML｜function_calls><｜end▁of▁sentence｜>";
    let results = r#",{"role":"tool","tool_call_id":"2","content":"x"},
        {"role":"tool","tool_call_id":"1","content":"y"}"#;
    let text = v32().chat(&format!("{CALLED}{results}"), "").unwrap();
    let expected = format!(
        "<｜User｜>q<｜Assistant｜></think>c{calls}\n\n<function_results>\n<result>x</result>\n\
         <result>y</result>\n</function_results>\n\n</think>"
    );
    assert_eq!(text, expected);
    let one_more = format!(r#"{CALLED}{results},{{"role":"tool","content":"z"}}"#);
    assert_eq!(v32().chat(&one_more, ""), Err(Skip::Refused));
    assert_eq!(v32().chat(r#"{"role":"tool","content":"z"}"#, ""), Err(Skip::Refused));
}

#[test]
fn v32_reads_the_developer_and_tools() {
    let tools = r#","tools":[{"type":"function","function":{"name":"f"}}]"#;
    let text = v32().chat(r#"{"role":"developer","content":"d"}"#, tools).unwrap();
    let schema = "<functions>\n{\"name\": \"f\", \"description\": null, \"parameters\": null}\n\
        </functions>\n<｜User｜>\n\n# The user's message is: d<｜Assistant｜></think>";
    assert!(text.starts_with("\n\n## Tools\nYou have access"), "{text}");
    assert!(text.ends_with(schema), "{text}");
    let early = r#"{"role":"developer","content":"d"},{"role":"user","content":"u"}"#;
    assert!(v32().chat(early, "").is_ok());
    assert_eq!(v32().chat(early, THINKS), Err(Skip::Refused));
    for message in [r#"{"role":"developer","content":""}"#, r#"{"role":"critic","content":"c"}"#] {
        assert_eq!(v32().chat(message, ""), Err(Skip::Refused), "{message}");
    }
}

#[test]
fn v4_thinks_unless_it_is_told_not_to() {
    let user = r#",{"role":"user","content":"u"}"#;
    let all = format!("{ASKED}{user}");
    let expected = |mark: &str| {
        format!(
            "<｜User｜>q<｜Assistant｜></think>a<｜end▁of▁sentence｜><｜User｜>u<｜Assistant｜>{mark}"
        )
    };
    assert_eq!(v4().chat(&all, QUIET), Ok(expected("</think>")));
    assert_eq!(v4().chat(&all, r#","reasoning_effort":"none""#), Ok(expected("</think>")));
    assert_eq!(v4().chat(&all, r#","reasoning_effort":"medium""#), Ok(expected("<think>")));
    for (effort, start) in [("high", "Reasoning Effort: Abs"), ("max", "Reasoning Effort: Bey")] {
        let text = v4().chat(&all, &format!(r#","reasoning_effort":"{effort}""#)).unwrap();
        assert!(text.starts_with(start) && text.ends_with(&expected("<think>")), "{text}");
    }
    assert!(v4().chat(&all, "").unwrap().starts_with("Reasoning Effort: Absolute"));
    assert_eq!(v4().chat("", "").as_deref(), Ok(""));
    // Where there are tools, or the request says so, all reasoning is shown.
    let kept = r#","reasoning_effort":"low","chat_template_kwargs":{"drop_thinking":false}"#;
    let text = v4().chat(&all, kept).unwrap();
    assert!(text.contains("<｜Assistant｜><think>r</think>a"), "{text}");
    let tools =
        r#","reasoning_effort":"low","tools":[{"type":"function","function":{"name":"f"}}]"#;
    let text = v4().chat(&all, tools).unwrap();
    assert!(text.contains("<｜Assistant｜><think>r</think>a"), "{text}");
    assert!(text.starts_with("\n\n## Tools\n\nYou have access"), "{text}");
}

#[test]
fn v4_results_are_the_users_in_the_order_of_the_calls() {
    let rest = r#",{"role":"tool","tool_call_id":"2","content":"x"},{"role":"user","content":"u"},
        {"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"y"}]},
        {"role":"user","content":[{"type":"text","text":"v"},{"type":"text","text":"w"}]}"#;
    let text = v4().chat(&format!("{CALLED}{rest}"), QUIET).unwrap();
    let user = "<｜end▁of▁sentence｜><｜User｜><tool_result>y</tool_result>\n\nu\n\n\
        <tool_result>x</tool_result>\n\nv\n\nw<｜Assistant｜></think>";
    assert!(text.ends_with(user), "{text}");
    assert!(text.contains("\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">"), "{text}");
}

#[test]
fn v4_tasks_and_late_messages_open_what_follows() {
    let task = |name: &str| {
        let message = format!(r#"{{"role":"user","content":"q","task":"{name}"}}"#);
        v4().chat(&message, QUIET)
    };
    assert_eq!(task("title").as_deref(), Ok("<｜User｜>q<｜title｜>"));
    assert_eq!(task("action").as_deref(), Ok("<｜User｜>q<｜Assistant｜></think><｜action｜>"));
    assert_eq!(task("other"), Err(Skip::Refused));
    let late = r#"{"role":"user","content":"q"},{"role":"system","content":"s"}"#;
    let text = v4().chat(late, QUIET);
    assert_eq!(text.as_deref(), Ok("<｜User｜>qs<｜Assistant｜></think>"));
    let reminder = r#"{"role":"user","content":"q"},{"role":"latest_reminder","content":"l"}"#;
    let text = v4().chat(reminder, QUIET);
    let expected = "<｜User｜>q<｜Assistant｜></think><｜latest_reminder｜>l";
    assert_eq!(text.as_deref(), Ok(expected));
    let dropped = r#"{"role":"developer","content":"d"},{"role":"critic","content":"c"},
        {"role":"user","content":"u"}"#;
    let text = v4().chat(dropped, r#","reasoning_effort":"low""#);
    assert_eq!(text.as_deref(), Ok("<｜User｜>u<｜Assistant｜><think>"));
    assert_eq!(v4().chat(dropped, QUIET), Err(Skip::Refused));
}
