//! `truncate_prompt_tokens`.

use super::request::Request;
use super::tokenizer::Tokenizer;
use crate::types::{Skip, TokenId};

/// How many tokens of a prompt the engine keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Truncation {
    keep: usize,
    side: Option<Side>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// The first tokens go.
    Left,
    Right,
}

impl Truncation {
    /// Refuses what the engine refuses even where it cuts nothing.
    pub fn check(request: &Request<'_>) -> Result<(), Skip> {
        side(request)?;
        match request.int("truncate_prompt_tokens")? {
            Some(keep) if keep < -1 => Err(Skip::Refused),
            _ => Ok(()),
        }
    }

    pub fn read(request: &Request<'_>) -> Result<Option<Truncation>, Skip> {
        let side = side(request)?;
        match request.int("truncate_prompt_tokens")? {
            None => Ok(None),
            Some(keep) if keep > 0 => {
                let keep = usize::try_from(keep).map_err(|_| Skip::Refused)?;
                Ok(Some(Truncation { keep, side }))
            }
            // As many as the model takes, which is not known here.
            Some(-1) => Err(Skip::Unsupported),
            // Nothing would be left.
            Some(_) => Err(Skip::Refused),
        }
    }

    /// Cuts the tokens of a request that carries ids.
    pub fn cut(self, ids: Vec<TokenId>) -> Vec<TokenId> {
        let over = ids.len().saturating_sub(self.keep);
        match self.side {
            Some(Side::Right) => ids[..ids.len() - over].to_vec(),
            _ => ids[over..].to_vec(),
        }
    }

    /// Encodes a text and cuts its tokens. Where the request names no side the tokenizer cuts, on
    /// the left and before it adds its special tokens.
    pub fn encode(
        self,
        tokenizer: &Tokenizer,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, String> {
        let ids = tokenizer.encode(text, add_special_tokens)?;
        if ids.len() <= self.keep || self.side.is_some() || !add_special_tokens {
            return Ok(self.cut(ids));
        }
        let plain = tokenizer.encode(text, false)?;
        let added = ids.len().saturating_sub(plain.len());
        let before = (0..=added).find(|&at| ids[at..].starts_with(&plain)).unwrap_or(added);
        let over = ids.len() - self.keep;
        let Some(kept) = plain.get(over..) else { return Err("nothing is left".to_owned()) };
        Ok([&ids[..before], kept, &ids[before + plain.len()..]].concat())
    }
}

fn side(request: &Request<'_>) -> Result<Option<Side>, Skip> {
    match request.str("truncation_side")?.as_deref() {
        None => Ok(None),
        Some("left") => Ok(Some(Side::Left)),
        Some("right") => Ok(Some(Side::Right)),
        Some(_) => Err(Skip::Refused),
    }
}
