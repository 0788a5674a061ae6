//! A prompt of pieces: what the engine encodes apart, and never as a control token by chance.

use crate::types::TokenId;

use super::tokenizer::Tokenizer;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    /// A token by its name.
    Control(&'static str),
    /// Text in which the name of a token is text.
    Text(String),
}

/// Text past a number of bytes is left out.
#[derive(Debug)]
pub(crate) struct Pieces {
    pieces: Vec<Piece>,
    room: usize,
    cut: bool,
}

impl Pieces {
    pub fn new(max_text: usize) -> Pieces {
        Pieces { pieces: Vec::new(), room: max_text, cut: false }
    }

    pub fn control(&mut self, token: &'static str) {
        if !self.cut {
            self.pieces.push(Piece::Control(token));
        }
    }

    pub fn text(&mut self, text: &str) {
        if self.cut {
            return;
        }
        let kept = &text[..text.floor_char_boundary(self.room)];
        self.cut = kept.len() < text.len();
        self.room -= kept.len();
        self.pieces.push(Piece::Text(kept.to_owned()));
    }

    /// Bytes of text that are still taken.
    pub fn room(&self) -> usize {
        if self.cut { 0 } else { self.room }
    }

    /// Whether text was left out.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// As one text.
    pub fn joined(&self) -> String {
        let texts = self.pieces.iter().map(|piece| match piece {
            Piece::Control(token) => token,
            Piece::Text(text) => text.as_str(),
        });
        texts.collect()
    }

    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, String> {
        let mut ids = Vec::new();
        for piece in &self.pieces {
            match piece {
                Piece::Control(token) => ids.push(tokenizer.id(token)?),
                Piece::Text(text) => ids.extend(tokenizer.encode_plain(text)?),
            }
        }
        Ok(ids)
    }
}
