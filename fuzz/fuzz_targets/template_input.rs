//! Any conversation through templates that use what templates use: a text or a named reason, the same
//! each time.
#![no_main]

use std::fmt::Write;
use std::sync::LazyLock;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use ngx_http_kvc_aware_module::prompt::{Limits, ModelSpec, Models};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const TEMPLATES: [&str; 4] = [
    "/../t/models/tiny/chat_template.jinja",
    "/templates/calls.jinja",
    "/templates/python.jinja",
    "/templates/rules.jinja",
];
const LIMITS: Limits = Limits { max_text: 1 << 16, deadline: None };
const NOW: i64 = 1_772_694_489;

static MODELS: LazyLock<Models> = LazyLock::new(|| {
    let spec = |template: &&str| ModelSpec {
        name: (*template).to_owned(),
        dir: format!("{ROOT}/../t/models/tiny").into(),
        template: Some(format!("{ROOT}{template}").into()),
        ..ModelSpec::default()
    };
    let models = Models::new(TEMPLATES.iter().map(spec).collect()).at_time(NOW);
    models.load_all(|name, loaded| assert!(loaded.is_ok(), "{name}: {loaded:?}"));
    models
});

const WORDS: [&str; 16] = [
    "",
    "a",
    "stop",
    "user",
    " x\\n y ",
    "é日本",
    "👍🏽",
    "\\u0000",
    "<think>a</think>b",
    "\\u2028",
    "%s",
    "'",
    "\\\"",
    "<|im_end|>",
    "{{ a }}",
    "\\u00a0",
];
const NUMBERS: [&str; 8] = [
    "0",
    "-1",
    "1e16",
    "3e-05",
    "1.5",
    "9223372036854775808",
    "NaN",
    "123456789012345678901234567890123456789012",
];
const KEYS: [&str; 12] = [
    "type",
    "text",
    "name",
    "function",
    "arguments",
    "parameters",
    "properties",
    "items",
    "id",
    "a",
    "keys",
    "1",
];
const ROLES: [&str; 6] = ["user", "assistant", "system", "tool", "developer", "critic"];

struct Input<'a, 'b> {
    from: &'a mut Unstructured<'b>,
    json: String,
}

impl Input<'_, '_> {
    fn text(&mut self) -> Result<()> {
        let word = self.from.choose(&WORDS)?;
        let times = if self.from.ratio(1, 8)? { self.from.int_in_range(0..=200)? } else { 1 };
        self.json.push('"');
        (0..times).for_each(|_| self.json.push_str(word));
        self.json.push('"');
        Ok(())
    }

    fn many(
        &mut self,
        [open, close]: [char; 2],
        most: u8,
        mut item: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.json.push(open);
        for at in 0..self.from.int_in_range(0..=most)? {
            if at > 0 {
                self.json.push(',');
            }
            item(self)?;
        }
        self.json.push(close);
        Ok(())
    }

    fn key(&mut self, key: &str) {
        let _ = write!(self.json, "\"{key}\":");
    }

    fn value(&mut self, depth: u32) -> Result<()> {
        match self.from.int_in_range(0..=if depth == 0 { 4 } else { 6 })? {
            0 => self.json.push_str("null"),
            1 => self.json.push_str(self.from.choose(&["true", "false"])?),
            2 => self.json.push_str(self.from.choose(&NUMBERS)?),
            3 | 4 => self.text()?,
            5 => self.many(['[', ']'], 4, |input| input.value(depth - 1))?,
            _ => self.many(['{', '}'], 4, |input| {
                let key = *input.from.choose(&KEYS)?;
                input.key(key);
                input.value(depth - 1)
            })?,
        }
        Ok(())
    }

    fn message(&mut self) -> Result<()> {
        let role = *self.from.choose(&ROLES)?;
        let _ = write!(self.json, "{{\"role\":\"{role}\"");
        for field in ["content", "name", "tool_calls", "reasoning_content"] {
            if self.from.ratio(if field == "content" { 7 } else { 1 }, 8u8)? {
                let _ = write!(self.json, ",\"{field}\":");
                self.value(4)?;
            }
        }
        self.json.push('}');
        Ok(())
    }

    fn tool(&mut self) -> Result<()> {
        self.json.push_str("{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":");
        self.value(5)?;
        self.json.push_str("}}");
        Ok(())
    }

    fn all(&mut self) -> Result<()> {
        self.json.push_str("{\"messages\":");
        self.many(['[', ']'], 6, Input::message)?;
        for field in
            ["extra", "documents", "strict", "add_generation_prompt", "continue_final_message"]
        {
            if self.from.ratio(1, 3u8)? {
                self.json.push(',');
                self.key(field);
                self.value(3)?;
            }
        }
        if self.from.arbitrary()? {
            self.json.push_str(",\"tools\":");
            self.many(['[', ']'], 3, Input::tool)?;
        }
        self.json.push('}');
        Ok(())
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut from = Unstructured::new(bytes);
    let Ok(model) = from.int_in_range(0..=TEMPLATES.len() - 1) else { return };
    let mut input = Input { from: &mut from, json: String::new() };
    if input.all().is_err() {
        return;
    }
    let render = || MODELS.render_template(model, input.json.as_bytes(), &LIMITS);
    let first = render();
    assert_eq!(first, render(), "{}", input.json);
    assert!(first.is_ok_and(|text| text.len() <= LIMITS.max_text) || render().is_err());
});
