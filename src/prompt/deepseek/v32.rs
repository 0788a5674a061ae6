//! DeepSeek V3.2.

use super::{ASSISTANT, BOS, EOS, Message, THINK, THOUGHT, USER};
use super::{is_true, last_asking, schemas, without_reasoning, write_calls};
use crate::prompt::Job;
use crate::prompt::python::{Dict, Json};
use crate::types::Skip;

/// What the model was taught to read before and after the schemas of tools.
const TOOLS: [&str; 2] = [
    r#"## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
"#,
    "\n</functions>\n",
];

pub(super) fn prompt(mut messages: Vec<Message>, kwargs: &Dict, job: &Job) -> Result<String, Skip> {
    let thinks = is_true(kwargs, "thinking") || is_true(kwargs, "enable_thinking");
    if let Some(tools) = kwargs.get("tools").filter(|tools| tools.is_true()) {
        let system = Message { role: "system".into(), ..Message::default() };
        messages.insert(0, Message { tools: Some(tools.clone()), ..system });
    }
    let asks = messages.last().ok_or(Skip::Refused)?.is("user");
    if thinks && asks {
        let all = messages.len();
        messages = without_reasoning(messages, &["user", "system", "tool"]);
        // The engine counts those that are dropped, and fails.
        if messages.len() < all {
            return Err(Skip::Refused);
        }
    }
    let place = Place { last: last_asking(&messages), messages: &messages, thinks };
    let mut out = BOS.to_owned();
    for at in 0..messages.len() {
        if job.limits.over() {
            return Err(Skip::Deadline);
        }
        if out.len() > job.limits.max_text {
            break;
        }
        place.write(at, &mut out)?;
    }
    Ok(out)
}

struct Place<'a> {
    messages: &'a [Message],
    /// The last message that asks for an answer.
    last: Option<usize>,
    thinks: bool,
}

impl Place<'_> {
    fn write(&self, at: usize, out: &mut String) -> Result<(), Skip> {
        let message = &self.messages[at];
        match &*message.role {
            "system" => {
                out.push_str(&message.text);
                if let Some(tools) = &message.tools {
                    write_tools(tools, out)?;
                }
            }
            "developer" => {
                if message.text.is_empty() {
                    return Err(Skip::Refused);
                }
                out.push_str(USER);
                if let Some(tools) = &message.tools {
                    write_tools(tools, out)?;
                }
                out.push_str("\n\n# The user's message is: ");
                self.open(at, out);
            }
            "user" => {
                out.push_str(USER);
                self.open(at, out);
            }
            "tool" => self.result(at, out)?,
            "assistant" => self.answer(at, out)?,
            _ => return Err(Skip::Refused),
        }
        Ok(())
    }

    /// A question, and the head of its answer.
    fn open(&self, at: usize, out: &mut String) {
        out.push_str(&self.messages[at].text);
        out.push_str(ASSISTANT);
        out.push_str(if self.thinks && self.last == Some(at) { THINK } else { THOUGHT });
    }

    fn result(&self, at: usize, out: &mut String) -> Result<(), Skip> {
        let caller = self.messages[..at].iter().rposition(|message| !message.is("tool"));
        // The engine looks at the end where nothing comes before the first message.
        let calls = match caller {
            Some(caller) if self.messages[caller].is("assistant") => {
                self.messages[caller].calls.len()
            }
            None if at == 0 => self.messages.last().map_or(0, |last| last.calls.len()),
            _ => return Err(Skip::Refused),
        };
        let order = caller.map_or(1, |caller| at - caller);
        if calls < order {
            return Err(Skip::Refused);
        }
        if order == 1 {
            out.push_str("\n\n<function_results>");
        }
        out.push_str(&format!("\n<result>{}</result>", self.messages[at].text));
        if order == calls {
            out.push_str("\n</function_results>\n\n");
            let open = self.last.is_none_or(|last| at >= last);
            out.push_str(if self.thinks && open { THINK } else { THOUGHT });
        }
        Ok(())
    }

    fn answer(&self, at: usize, out: &mut String) -> Result<(), Skip> {
        let message = &self.messages[at];
        if self.thinks && self.last.is_none_or(|last| at > last) {
            if message.reasoning.is_none() && message.calls.is_empty() {
                return Err(Skip::Refused);
            }
            out.push_str(message.reasoning.as_deref().unwrap_or_default());
            out.push_str(THOUGHT);
        }
        out.push_str(&message.text);
        if !message.calls.is_empty() {
            write_calls(&message.calls, "function_calls", out)?;
        }
        out.push_str(EOS);
        Ok(())
    }
}

fn write_tools(tools: &Json, out: &mut String) -> Result<(), Skip> {
    out.push_str("\n\n");
    out.push_str(TOOLS[0]);
    out.push_str(&schemas(tools)?);
    out.push_str(TOOLS[1]);
    Ok(())
}
