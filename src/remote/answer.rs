//! What an engine answers, read.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::types::TokenId;

/// How every conversation in harmony, the format of gpt-oss, begins. The engine makes those by code
/// of its own, but its `/tokenize` by a template.
const HARMONY: [TokenId; 3] = [200_006, 17_360, 200_008];

/// An answer that gives no tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It cannot be read, or holds no ids.
    Garbage,
    Multimodal,
    /// The ids are not those that the request is run with.
    Other,
}

#[derive(Deserialize)]
struct Rendered {
    token_ids: Vec<TokenId>,
    /// Images and the like that stand in the prompt.
    features: Option<IgnoredAny>,
}

/// Of several prompts there is one for each.
#[derive(Deserialize)]
#[serde(untagged)]
enum Rendering {
    One(Rendered),
    Several(Vec<Rendered>),
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<TokenId>,
}

/// The first prompt of what a server rendered.
pub fn rendered(answer: &[u8]) -> Result<Vec<TokenId>, Fault> {
    let first = match serde_json::from_slice(answer).map_err(|_| Fault::Garbage)? {
        Rendering::One(one) => one,
        Rendering::Several(all) => all.into_iter().next().ok_or(Fault::Garbage)?,
    };
    if first.features.is_some() {
        return Err(Fault::Multimodal);
    }
    some(first.token_ids)
}

/// The ids in the answer of `/tokenize`.
pub fn tokenized(answer: &[u8]) -> Result<Vec<TokenId>, Fault> {
    let Tokenized { tokens } = serde_json::from_slice(answer).map_err(|_| Fault::Garbage)?;
    if tokens.starts_with(&HARMONY) { Err(Fault::Other) } else { some(tokens) }
}

/// Whether an answer with status 404 is about the request, not about the path: engines then give
/// an error object.
pub fn names_an_error(answer: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Failed {
        #[expect(dead_code, reason = "it is enough that it is there")]
        error: IgnoredAny,
    }
    serde_json::from_slice::<Failed>(answer).is_ok()
}

fn some(ids: Vec<TokenId>) -> Result<Vec<TokenId>, Fault> {
    if ids.is_empty() { Err(Fault::Garbage) } else { Ok(ids) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rendering_is_one_or_several() {
        let one = r#"{"request_id":"a","token_ids":[1,2],"features":null,"sampling_params":{}}"#;
        assert_eq!(rendered(one.as_bytes()), Ok(vec![1, 2]));
        assert_eq!(rendered(br#"{"token_ids":[1]}"#), Ok(vec![1]));
        let several = format!(r#"[{{"token_ids":[3,4]}},{one}]"#);
        assert_eq!(rendered(several.as_bytes()), Ok(vec![3, 4]));
        let image = br#"{"token_ids":[1],"features":{"mm_hashes":{}}}"#;
        assert_eq!(rendered(image), Err(Fault::Multimodal));
    }

    #[test]
    fn what_holds_no_ids_is_garbage() {
        for text in [
            "",
            "x",
            "null",
            "[]",
            "{}",
            "[1]",
            r#"{"token_ids":[]}"#,
            r#"{"token_ids":[-1]}"#,
            r#"{"token_ids":[1.5]}"#,
            r#"{"token_ids":["1"]}"#,
            r#"{"token_ids":[1]"#,
            r#"{"token_ids":[4294967296]}"#,
        ] {
            assert_eq!(rendered(text.as_bytes()), Err(Fault::Garbage), "{text}");
            let text = text.replace("token_ids", "tokens");
            assert_eq!(tokenized(text.as_bytes()), Err(Fault::Garbage), "{text}");
        }
    }

    #[test]
    fn a_template_does_not_stand_for_harmony() {
        assert_eq!(tokenized(br#"{"count":2,"tokens":[5,6],"token_strs":null}"#), Ok(vec![5, 6]));
        let harmony = "[200006,17360,200008,3575]";
        let text = format!(r#"{{"tokens":{harmony}}}"#);
        assert_eq!(tokenized(text.as_bytes()), Err(Fault::Other));
        let text = format!(r#"{{"token_ids":{harmony}}}"#);
        assert_eq!(rendered(text.as_bytes()), Ok(vec![200_006, 17_360, 200_008, 3575]));
    }

    #[test]
    fn a_404_of_the_path_names_no_error() {
        assert!(names_an_error(br#"{"error":{"message":"no such model"}}"#));
        assert!(!names_an_error(br#"{"detail":"Not Found"}"#) && !names_an_error(b"nothing"));
    }
}
