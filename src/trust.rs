//! What an engine reports of a prompt, against what was made and foretold of it here.
//!
//! An answer's `usage` tells how many tokens the prompt had and how many of them were cached. If
//! the first differs time after time, the tokens made here are not the engine's: from then on the
//! server is taken as approximate, whose blocks are keyed by our own tokens, right or wrong, until
//! the two have agreed for as long: now and then two numbers are the same by chance.
#![forbid(unsafe_code)]

use memchr::memmem;

use crate::shared::{ServerField, ServerRow};

/// So many reports in a row that differ end the trust.
pub const PATIENCE: u64 = 3;

const PROMPT: &[u8] = b"\"prompt_tokens\":";
const CACHED: &[u8] = b"\"cached_tokens\":";
/// A key and its number, with a space or two.
const LONGEST: usize = 40;

/// The usage report of an answer, whose bytes come in pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: Option<u32>,
    pub cached: Option<u32>,
    /// The end of what came, in which a report may have begun.
    tail: Vec<u8>,
}

impl Usage {
    /// Takes the next bytes in. A quote within a JSON string is escaped, so no text of the answer
    /// is taken for a report; the last report counts.
    pub fn feed(&mut self, bytes: &[u8]) {
        let seam = &bytes[..bytes.len().min(LONGEST)];
        let joined = [self.tail.as_slice(), seam].concat();
        self.scan(&joined);
        self.scan(bytes);
        let kept = if bytes.len() < LONGEST { &joined } else { bytes };
        self.tail = kept[kept.len().saturating_sub(LONGEST)..].to_vec();
    }

    fn scan(&mut self, bytes: &[u8]) {
        self.prompt = last_number(bytes, PROMPT).or(self.prompt);
        self.cached = last_number(bytes, CACHED).or(self.cached);
    }
}

fn last_number(bytes: &[u8], key: &[u8]) -> Option<u32> {
    let at = memmem::rfind(bytes, key)?;
    let rest = bytes[at + key.len()..].trim_ascii_start();
    // A number that ends with the bytes may go on in the next ones.
    let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

/// What a report says of the trust in a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing new.
    Unchanged,
    /// The tokens made here are not the engine's, as it seems for the first time.
    Distrusted { reported: u32 },
    /// They are again.
    Trusted,
}

/// Counts a report of a server. `made` is the number of prompt tokens made here, `foretold` how
/// many of them were said to be cached.
pub fn compare(row: &ServerRow<'_>, usage: &Usage, made: u32, foretold: u32) -> Verdict {
    let Some(reported) = usage.prompt else { return Verdict::Unchanged };
    if reported != made {
        row.add(ServerField::PromptDiffers, 1);
        let doubt = row.add(ServerField::Doubt, 1) + 1;
        if doubt >= PATIENCE {
            row.set(ServerField::Doubt, 2 * PATIENCE);
        }
        let first = doubt == PATIENCE;
        return if first { Verdict::Distrusted { reported } } else { Verdict::Unchanged };
    }
    row.add(ServerField::PromptSame, 1);
    if let Some(cached) = usage.cached {
        let field = match foretold.cmp(&cached) {
            std::cmp::Ordering::Less => ServerField::CachedMore,
            std::cmp::Ordering::Equal => ServerField::CachedSame,
            std::cmp::Ordering::Greater => ServerField::CachedLess,
        };
        row.add(field, 1);
    }
    match row.get(ServerField::Doubt) {
        0 => Verdict::Unchanged,
        doubt if doubt > PATIENCE + 1 => {
            row.set(ServerField::Doubt, doubt - 1);
            Verdict::Unchanged
        }
        doubt => {
            row.set(ServerField::Doubt, 0);
            if doubt >= PATIENCE { Verdict::Trusted } else { Verdict::Unchanged }
        }
    }
}

/// Whether the tokens made here are taken for the engine's.
pub fn is_trusted(row: &ServerRow<'_>) -> bool {
    row.get(ServerField::Doubt) < PATIENCE
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::blocks::HashKey;
    use crate::shared::{MIN_ZONE_BYTES, Zone};
    use crate::types::ServerId;

    const REPORT: &[u8] =
        br#"{"choices":[{"message":{"content":"say \"prompt_tokens\":9, please"}}],
        "usage":{"prompt_tokens":1234,"completion_tokens": 7,
        "prompt_tokens_details":{"cached_tokens": 1200}}}"#;

    fn fed(pieces: &[&[u8]]) -> (Option<u32>, Option<u32>) {
        let mut usage = Usage::default();
        pieces.iter().for_each(|piece| usage.feed(piece));
        (usage.prompt, usage.cached)
    }

    #[test]
    fn a_report_is_found_wherever_it_is_cut() {
        let expected = (Some(1234), Some(1200));
        assert_eq!(fed(&[REPORT]), expected);
        for at in 0..REPORT.len() {
            let (head, tail) = REPORT.split_at(at);
            assert_eq!(fed(&[head, tail]), expected, "cut at {at}");
        }
        for size in 1..50 {
            assert_eq!(fed(&REPORT.chunks(size).collect::<Vec<_>>()), expected, "by {size}");
        }
        assert_eq!(
            fed(&[br#"{"usage":{"prompt_tokens":5,"prompt_tokens_details":null}}"#]).1,
            None
        );
        assert_eq!(fed(&[br#"{"usage":{"prompt_tokens":null}}"#]), (None, None));
    }

    #[test]
    fn trust_ends_with_the_third_report_and_comes_back_as_slowly() {
        let words: Vec<AtomicU64> = (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let zone = Zone::format(&words, HashKey([1, 2])).unwrap();
        let row = zone.server(ServerId(1));
        let usage = |prompt, cached| Usage { prompt, cached, tail: Vec::new() };
        let said = |prompt, cached| compare(&row, &usage(prompt, cached), 100, 32);
        assert_eq!(said(Some(101), Some(0)), Verdict::Unchanged);
        assert_eq!(said(Some(101), None), Verdict::Unchanged);
        assert_eq!(said(None, None), Verdict::Unchanged);
        assert!(is_trusted(&row));
        assert_eq!(said(Some(99), None), Verdict::Distrusted { reported: 99 });
        assert_eq!(said(Some(99), None), Verdict::Unchanged);
        assert!(!is_trusted(&row));
        assert_eq!(said(Some(100), None), Verdict::Unchanged);
        assert_eq!(said(Some(99), None), Verdict::Unchanged);
        assert_eq!(said(Some(100), None), Verdict::Unchanged);
        assert_eq!(said(Some(100), None), Verdict::Unchanged);
        assert!(!is_trusted(&row));
        assert_eq!(said(Some(100), Some(32)), Verdict::Trusted);
        assert!(is_trusted(&row));
        assert_eq!(said(Some(99), None), Verdict::Unchanged);
        assert_eq!(said(Some(99), None), Verdict::Unchanged);
        assert_eq!(said(Some(100), Some(48)), Verdict::Unchanged);
        assert_eq!(said(Some(100), Some(16)), Verdict::Unchanged);
        let counts = [
            ServerField::PromptSame,
            ServerField::PromptDiffers,
            ServerField::CachedSame,
            ServerField::CachedMore,
            ServerField::CachedLess,
        ];
        assert_eq!(counts.map(|field| row.get(field)), [6, 7, 1, 1, 1]);
    }
}
