//! The one seam to the tokenizer crates.

use std::time::Duration;

use serde_json::Value;

use crate::types::TokenId;

/// A loaded `tokenizer.json`.
pub(crate) enum Tokenizer {
    Fast(Box<fastokens::Tokenizer>),
    /// For the files that the fast crate does not load.
    Reference(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Truncation and padding that the file asks for are off: the engine passes its own.
    /// `config` is the tokenizer_config.json beside the file.
    pub fn load(mut json: Value, config: &Value) -> Result<Tokenizer, String> {
        rebuild(&mut json, config);
        match fastokens::Tokenizer::from_json(json.clone()) {
            Ok(mut fast) => {
                fast.set_truncation(None);
                fast.set_padding(None);
                Ok(Tokenizer::Fast(Box::new(fast)))
            }
            Err(_) => Tokenizer::load_reference(json),
        }
    }

    fn load_reference(json: Value) -> Result<Tokenizer, String> {
        let mut reference: tokenizers::Tokenizer =
            serde_json::from_value(json).map_err(|error| error.to_string())?;
        reference.with_truncation(None).map_err(|error| error.to_string())?;
        reference.with_padding(None);
        Ok(Tokenizer::Reference(Box::new(reference)))
    }

    /// The id of an added token.
    pub fn id(&self, token: &str) -> Result<TokenId, String> {
        let id = match self {
            Tokenizer::Fast(fast) => fast.token_to_id(token),
            Tokenizer::Reference(reference) => reference.token_to_id(token),
        };
        id.ok_or_else(|| format!("no token \"{token}\""))
    }

    /// Encodes a text in which the names of added tokens are text like any other.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<TokenId>, String> {
        match self {
            Tokenizer::Fast(fast) => fast.encode_ordinary(text).map_err(|error| error.to_string()),
            Tokenizer::Reference(_) => Err("names of tokens cannot be text".to_owned()),
        }
    }

    /// Whether [`Tokenizer::encode_plain`] works.
    pub fn has_plain(&self) -> bool {
        matches!(self, Tokenizer::Fast(_))
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, String> {
        match self {
            Tokenizer::Fast(fast) => fast
                .encode_with_special_tokens(text, add_special_tokens)
                .map_err(|error| error.to_string()),
            Tokenizer::Reference(reference) => reference
                .encode_fast(text, add_special_tokens)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|error| error.to_string()),
        }
    }
}

/// The least time that encoding a text takes, where that is much.
///
/// What a tokenizer's pattern does not split it takes in one piece, at some hundred times the usual
/// cost of a byte, and encoding cannot be stopped. Such pieces are runs of letters, of space or of
/// punctuation; text of other scripts costs less and is not counted.
pub(crate) fn least_time(text: &str) -> Duration {
    const COSTLY: usize = 64 << 10;
    const OF_BYTE: Duration = Duration::from_nanos(400);
    if text.len() < COSTLY {
        return Duration::ZERO;
    }
    let class = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' => 0,
        _ if byte.is_ascii_whitespace() => 1,
        _ if byte.is_ascii_punctuation() => 2,
        _ => 3,
    };
    let runs = text.as_bytes().chunk_by(|a, b| class(*a) == class(*b));
    let costly = runs.filter(|run| run.len() >= COSTLY && class(run[0]) != 3);
    let bytes: usize = costly.map(<[u8]>::len).sum();
    OF_BYTE.saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX))
}

/// The engine's transformers builds a tokenizer of the class LlamaTokenizer anew from its vocabulary:
/// with a Metaspace pre-tokenizer in place of the normalizer that SentencePiece files come with.
fn rebuild(json: &mut Value, config: &Value) {
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    let normalizers = json["normalizer"]["normalizers"].as_array();
    let is_prepend = |normalizer: &Value| normalizer["type"] == "Prepend";
    let from_sentencepiece = normalizers.is_some_and(|all| all.iter().any(is_prepend));
    if !matches!(class, "LlamaTokenizer" | "LlamaTokenizerFast") || !from_sentencepiece {
        return;
    }
    let prefix = config["add_prefix_space"].as_bool().unwrap_or(true);
    let legacy = config["legacy"].as_bool().unwrap_or(false);
    let scheme = match (prefix, legacy) {
        (false, _) => "never",
        (true, true) => "always",
        (true, false) => "first",
    };
    json["normalizer"] = Value::Null;
    json["pre_tokenizer"] = serde_json::json!({
        "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/t/models/tiny/tokenizer.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn only_long_runs_take_long() {
        let words = "some words and 日本 ".repeat(50_000);
        assert_eq!(least_time(&words), Duration::ZERO);
        assert_eq!(least_time(&"日".repeat(500_000)), Duration::ZERO);
        let long = words + &"a".repeat(1_000_000);
        assert!(least_time(&long) >= Duration::from_millis(300));
    }

    #[test]
    fn a_sentencepiece_tokenizer_is_rebuilt_as_the_engine_does() {
        let mut json = serde_json::json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u{2581}"}]},
            "pre_tokenizer": null
        });
        let before = json.clone();
        rebuild(&mut json, &serde_json::json!({"tokenizer_class": "GemmaTokenizer"}));
        assert_eq!(json, before);
        for (legacy, scheme) in [(true, "always"), (false, "first")] {
            let mut json = before.clone();
            let class = serde_json::json!({"tokenizer_class": "LlamaTokenizer", "legacy": legacy});
            rebuild(&mut json, &class);
            assert!(json["normalizer"].is_null());
            assert_eq!(json["pre_tokenizer"]["prepend_scheme"], scheme);
        }
    }

    #[test]
    fn both_crates_give_the_same_ids() {
        let fast = Tokenizer::load(tiny(), &Value::Null).unwrap();
        assert!(matches!(fast, Tokenizer::Fast(_)));
        let reference = Tokenizer::load_reference(tiny()).unwrap();
        for text in
            ["", "What is the weather in London?", "<|im_start|>user\nhé 日本 👍🏽  \n\n x<|im_end|>"]
        {
            for special in [false, true] {
                assert_eq!(
                    fast.encode(text, special).unwrap(),
                    reference.encode(text, special).unwrap(),
                    "{text:?}"
                );
            }
        }
    }
}
