//! Prompts with images, audio or video: the tokens before the first of them.
//!
//! What a model puts in the place of an image is known to the engine alone: how many tokens, and a key
//! of the image that goes into the hashes of its blocks. What comes before it is known. It is found by
//! rendering the conversation twice, with two things in the place of what is no text: where the two
//! texts part, the first image begins.

use super::chat::{self, Chat};
use super::jinja::ContentFormat;
use super::messages::Media;
use super::model::Model;
use super::tokenizer::{self, Tokenizer};
use super::{Exact, Job, Prompt};
use crate::types::{Skip, TokenId};

/// Texts that no prompt has, of characters that stand for nothing.
const MARKS: [&str; 2] = ["\u{f8a1}\u{f8a2}\u{f8a3}", "\u{f8b1}\u{f8b2}\u{f8b3}"];

/// What may follow: a token that is another for one of these is not known. Models whose placeholder
/// begins with line ends merge them into those before it.
const FOLLOWING: [&str; 4] = [MARKS[0], "\n\n", "<|", "["];

pub(crate) fn prompt(model: &Model, chat: &Chat, job: &Job) -> Result<Prompt, Skip> {
    // The engine counts the tokens that go from the end.
    if chat.truncation.is_some() {
        return Err(Skip::Multimodal);
    }
    let parts = matches!(chat.template(model)?.format, ContentFormat::Parts);
    // Where the template is given a string, the engine puts a text of the model's before it, or in
    // the place of the part if it is told so.
    let [one, other] = match parts {
        true => [Media::Items, Media::Inline(MARKS[0])],
        false => [Media::Front(MARKS[0]), Media::Inline(MARKS[1])],
    };
    let one = chat::rendered(model, chat, one, job)?;
    let other = chat::rendered(model, chat, other, job)?;
    let before = common(&one.text, &other.text);
    if before.len() == one.text.len() && one.cut {
        let Chat { add_special_tokens, .. } = *chat;
        let exact = Exact::No("max_text");
        return Ok(Prompt::Text { text: one.text, add_special_tokens, truncation: None, exact });
    }
    // A template that writes nothing for an image does not tell where the engine puts it.
    if parts && other.text.replace(MARKS[0], "") == one.text {
        return Err(Skip::Multimodal);
    }
    let rest = parts.then_some(&one.text[before.len()..]);
    let following: Vec<&str> = FOLLOWING.into_iter().chain(rest).collect();
    let times = u32::try_from(following.len()).unwrap_or(u32::MAX);
    if job.limits.over_after(tokenizer::least_time(&one.text).saturating_mul(times)) {
        return Err(Skip::Deadline);
    }
    let ids = certain(&model.tokenizer, before, &following, chat.add_special_tokens)
        .map_err(|_| Skip::Failed)?;
    if ids.is_empty() {
        return Err(Skip::Multimodal);
    }
    Ok(Prompt::Ids { ids, truncation: None, exact: Exact::No("multimodal") })
}

/// What two texts begin with.
fn common<'a>(a: &'a str, b: &str) -> &'a str {
    let same = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    &a[..a.floor_char_boundary(same)]
}

/// The tokens of a text that are the same whatever follows it.
fn certain(
    tokenizer: &Tokenizer,
    text: &str,
    following: &[&str],
    add_special_tokens: bool,
) -> Result<Vec<TokenId>, String> {
    let mut certain: Option<Vec<TokenId>> = None;
    for rest in following {
        let ids = tokenizer.encode(&[text, rest].concat(), add_special_tokens)?;
        let known = certain.get_or_insert_with(|| ids.clone());
        let same = known.iter().zip(&ids).take_while(|(a, b)| a == b).count();
        known.truncate(same);
    }
    Ok(certain.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::prompt::{Endpoint, Exact, Limits, ModelSpec, Models, Tokens};
    use crate::types::Skip;

    const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/t/models");
    const IMAGE: &str = r#"{"type":"image_url","image_url":{"url":"data:,"},"uuid":"u"}"#;

    /// The tiny model with another template; its own wants strings.
    fn models(template: &str) -> Models {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let file = FILES.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("{}-{file}.jinja", std::process::id()));
        std::fs::write(&path, template).unwrap();
        let own = template.is_empty();
        let models = Models::new(vec![ModelSpec {
            name: "tiny".to_owned(),
            dir: format!("{MODELS}/tiny").into(),
            template: (!own).then_some(path.clone()),
            ..ModelSpec::default()
        }]);
        models.load_all(|_, result| {
            result.unwrap();
        });
        std::fs::remove_file(path).unwrap();
        models
    }

    fn vision() -> Models {
        models(&std::fs::read_to_string(format!("{MODELS}/vision.jinja")).unwrap())
    }

    fn run(models: &Models, messages: &str) -> Result<Tokens, Skip> {
        let body = format!(r#"{{"model":"tiny","messages":[{messages}]}}"#);
        let limits = Limits { max_text: 1 << 20, deadline: None };
        models.tokenize(Endpoint::Chat, body.as_bytes(), &limits, false, |_| ()).result
    }

    fn encoded(models: &Models, text: &str) -> Vec<u32> {
        models.loaded(0).unwrap().tokenizer.encode(text, false).unwrap()
    }

    fn user(parts: &[&str]) -> String {
        format!(r#"{{"role":"user","content":[{}]}}"#, parts.join(","))
    }

    const SYSTEM: &str = r#"{"role":"system","content":"Be brief, be kind."}"#;
    const BEFORE: &str = r#"{"type":"text","text":"What is this?"}"#;
    const AFTER: &str = r#"{"type":"text","text":"And then?"}"#;

    #[test]
    fn what_is_before_the_first_image_is_known() {
        let models = vision();
        let start = "<|im_start|>system\nBe brief, be kind.<|im_end|>\n<|im_start|>user\n";
        for (parts, text) in [
            (vec![BEFORE, IMAGE, AFTER], format!("{start}What is this?")),
            (vec![BEFORE, IMAGE, IMAGE], format!("{start}What is this?")),
            (vec![IMAGE, BEFORE], start.to_owned()),
        ] {
            let tokens = run(&models, &format!("{SYSTEM},{}", user(&parts))).unwrap();
            let whole = encoded(&models, &text);
            assert_eq!(tokens.exact, Exact::No("multimodal"));
            assert!(whole.starts_with(&tokens.ids), "{parts:?} {:?} {whole:?}", tokens.ids);
            // A token at the seam may go.
            assert!(tokens.ids.len() + 1 >= whole.len(), "{parts:?} {:?} {whole:?}", tokens.ids);
        }
    }

    #[test]
    fn an_image_of_another_api_is_one_of_a_chat() {
        let models = vision();
        let image = r#"{"type":"image","source":{"type":"url","url":"u"}}"#;
        let text = r#"{"type":"text","text":"What is this?"}"#;
        let call = r#"{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"look",
            "input":{}}]}"#;
        let result =
            format!(r#"{{"type":"tool_result","tool_use_id":"1","content":[{text},{image}]}}"#);
        let chat_call = r#"{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":
            "function","function":{"name":"look","arguments":"{}"}}]}"#;
        let chat_result = r#"{"role":"tool","tool_call_id":"1","content":"What is this?"}"#;
        let asked = r#"{"role":"user","content":"Look"}"#;
        for (messages, chat) in [
            (user(&[text, image]), user(&[BEFORE, IMAGE])),
            (
                format!("{asked},{call},{}", user(&[&result])),
                format!("{asked},{chat_call},{chat_result},{}", user(&[IMAGE])),
            ),
        ] {
            let body = format!(r#"{{"model":"tiny","max_tokens":1,"messages":[{messages}]}}"#);
            let limits = Limits { max_text: 1 << 20, deadline: None };
            let outcome =
                models.tokenize(Endpoint::Messages, body.as_bytes(), &limits, false, |_| ());
            let ids = outcome.result.unwrap().ids;
            assert!(ids.len() > 10);
            assert_eq!(ids, run(&models, &chat).unwrap().ids, "{messages}");
        }
    }

    #[test]
    fn images_that_come_later_do_not_matter() {
        let models = vision();
        let one = run(&models, &format!("{SYSTEM},{}", user(&[BEFORE, IMAGE]))).unwrap();
        let later = format!("{SYSTEM},{},{}", user(&[BEFORE, IMAGE]), user(&[AFTER, IMAGE]));
        assert_eq!(run(&models, &later).unwrap().ids, one.ids);
        // All images before all texts.
        let first = models_that_put_images_first();
        let prompt = format!("{SYSTEM},{}", user(&[BEFORE, IMAGE, IMAGE]));
        let tokens = run(&first, &prompt).unwrap();
        let before = encoded(&first, "<|im_start|>Be brief, be kind.<|im_start|>");
        assert_eq!(tokens.ids, before);
    }

    fn models_that_put_images_first() -> Models {
        models(
            "{%- for message in messages -%}<|im_start|>\
             {%- for part in message.content if part.type == 'image' -%}<|im_end|>{%- endfor -%}\
             {%- for part in message.content if part.type == 'text' -%}{{ part.text }}\
             {%- endfor -%}{%- endfor -%}",
        )
    }

    #[test]
    fn a_string_is_known_up_to_the_message() {
        let models = models("");
        let text = "<|bos|><|im_start|>system\nBe brief, be kind.<|im_end|>\n<|im_start|>user\n";
        let whole = encoded(&models, text);
        for parts in [[BEFORE, IMAGE], [IMAGE, BEFORE]] {
            let tokens = run(&models, &format!("{SYSTEM},{}", user(&parts))).unwrap();
            assert!(whole.starts_with(&tokens.ids), "{:?} {whole:?}", tokens.ids);
            assert!(tokens.ids.len() + 1 >= whole.len(), "{:?} {whole:?}", tokens.ids);
        }
    }

    #[test]
    fn what_a_template_does_not_tell_is_not_known() {
        let silent = "{%- for message in messages -%}<|im_start|>{%- for part in message.content \
                      if part.type == 'text' -%}{{ part.text }}{%- endfor -%}{%- endfor -%}";
        let prompt = format!("{SYSTEM},{}", user(&[BEFORE, IMAGE]));
        assert_eq!(run(&models(silent), &prompt), Err(Skip::Multimodal));
        let counting = "{%- for message in messages -%}{{ message.content|length }}\
                        {%- for part in message.content -%}{{ part.type }}{%- endfor -%}\
                        {%- endfor -%}";
        assert_eq!(run(&models(counting), &user(&[IMAGE])).map(|tokens| tokens.ids.len()), Ok(1));
        for part in [
            r#"{"type":"file","file":{}}"#,
            r#"{"type":"image_url","image_url":{"url":"u"},"video_url":{"url":"u"}}"#,
            r#"{"image_url":{"url":"u"}}"#,
        ] {
            let prompt = format!("{SYSTEM},{}", user(&[BEFORE, part]));
            assert_eq!(run(&vision(), &prompt), Err(Skip::Multimodal), "{part}");
        }
        let body = format!(r#"{SYSTEM},{}],"truncate_prompt_tokens":9,"x":["#, user(&[IMAGE]));
        assert_eq!(run(&vision(), &body), Err(Skip::Multimodal));
    }
}
