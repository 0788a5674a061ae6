//! What an engine tells of a prompt, against what was made and foretold of it here.
//!
//! Two things tell. An answer's `usage` has the number of prompt tokens and how many of them were
//! cached. And the blocks that the engine stores for a prompt must be those that were made of it
//! here; the holder of the lease looks out for them. What differs time after time means that the
//! tokens made here for that model are not the engine's: from then on the server is taken as
//! approximate for that model, whose blocks are keyed by our own tokens, right or wrong, until the
//! two have agreed for as long: now and then two numbers are the same by chance.
#![forbid(unsafe_code)]

use std::cmp::Ordering;

use memchr::memmem;

use crate::shared::{ModelKey, ServerField, ServerRow, TrustField, TrustRow};

/// So many that differ in a row end the trust.
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

/// What became of the trust in a model's tokens on a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing new.
    Unchanged,
    /// The tokens made here are not the engine's, as it seems for the first time.
    Distrusted,
    /// They are again.
    Trusted,
}

/// What the holder of the lease saw of the blocks of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    Same,
    /// The engine stored others in their place.
    Differ,
    /// It stored neither.
    Absent,
}

/// Counts a usage report. `made` is the number of prompt tokens made here, `foretold` how many of
/// them were said to be cached.
pub fn reported(
    row: &ServerRow<'_>,
    model: ModelKey,
    usage: &Usage,
    made: u32,
    foretold: u32,
) -> Verdict {
    let (Some(reported), Some(trust)) = (usage.prompt, row.trust(model)) else {
        return Verdict::Unchanged;
    };
    let same = reported == made;
    trust.add(if same { TrustField::PromptSame } else { TrustField::PromptDiffers });
    if let Some(cached) = usage.cached.filter(|_| same) {
        trust.add(match foretold.cmp(&cached) {
            Ordering::Less => TrustField::CachedMore,
            Ordering::Equal => TrustField::CachedSame,
            Ordering::Greater => TrustField::CachedLess,
        });
    }
    weigh(row, model, TrustField::UsageDoubt, same)
}

/// Counts a prompt whose blocks were looked out for.
pub fn looked(row: &ServerRow<'_>, model: ModelKey, seen: Blocks) -> Verdict {
    let Some(trust) = row.trust(model) else { return Verdict::Unchanged };
    trust.add(match seen {
        Blocks::Same => TrustField::BlocksSame,
        Blocks::Differ => TrustField::BlocksDiffer,
        Blocks::Absent => TrustField::BlocksAbsent,
    });
    weigh(row, model, TrustField::BlockDoubt, seen == Blocks::Same)
}

/// A doubt counts what differs in a row up to [`PATIENCE`], which is the end of the trust. Then it
/// is twice that, and what agrees takes it down again; one above [`PATIENCE`] is the end of doubt.
fn weigh(row: &ServerRow<'_>, model: ModelKey, doubt: TrustField, agrees: bool) -> Verdict {
    let Some(trust) = row.trust(model) else { return Verdict::Unchanged };
    let step = |doubt: u64| match (agrees, doubt) {
        (false, doubt) if doubt + 1 >= PATIENCE => 2 * PATIENCE,
        (false, doubt) => doubt + 1,
        (true, doubt) if doubt > PATIENCE + 1 => doubt - 1,
        (true, _) => 0,
    };
    let (before, after) = trust.change(doubt, step);
    if after >= PATIENCE {
        row.set(ServerField::Distrust, 1);
    }
    match (before >= PATIENCE, after >= PATIENCE) {
        (false, true) => Verdict::Distrusted,
        (true, false) => {
            let distrusted = row.trusts().any(|trust| !is_certain(&trust));
            row.set(ServerField::Distrust, u64::from(distrusted));
            trust.swap(TrustField::Logged, 0);
            Verdict::Trusted
        }
        _ => Verdict::Unchanged,
    }
}

fn is_certain(trust: &TrustRow<'_>) -> bool {
    [TrustField::UsageDoubt, TrustField::BlockDoubt]
        .iter()
        .all(|field| trust.get(*field) < PATIENCE)
}

/// Whether the tokens made here for a model are taken for the engine's; without a model, whether
/// those of all models are.
pub fn is_trusted(row: &ServerRow<'_>, model: Option<ModelKey>) -> bool {
    if row.get(ServerField::Distrust) == 0 {
        return true;
    }
    let concerned = |trust: &TrustRow<'_>| model.is_none_or(|model| trust.model() == model);
    row.trusts().filter(concerned).all(|trust| is_certain(&trust))
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

    fn words() -> Vec<AtomicU64> {
        (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn trust_ends_with_the_third_report_and_comes_back_as_slowly() {
        let words = words();
        let zone = Zone::format(&words, HashKey([1, 2])).unwrap();
        let (row, model) = (zone.server(ServerId(1)), ModelKey::of("a"));
        let usage = |prompt, cached| Usage { prompt, cached, tail: Vec::new() };
        let said = |prompt, cached| reported(&row, model, &usage(prompt, cached), 100, 32);
        let trusted = || is_trusted(&row, Some(model));
        assert_eq!(said(Some(101), Some(0)), Verdict::Unchanged);
        assert_eq!(said(Some(101), None), Verdict::Unchanged);
        assert_eq!(said(None, None), Verdict::Unchanged);
        assert!(trusted());
        assert_eq!(said(Some(99), None), Verdict::Distrusted);
        assert_eq!(said(Some(99), None), Verdict::Unchanged);
        assert!(!trusted());
        assert_eq!(said(Some(100), None), Verdict::Unchanged);
        assert_eq!(said(Some(99), None), Verdict::Unchanged);
        assert_eq!(said(Some(100), None), Verdict::Unchanged);
        assert_eq!(said(Some(100), None), Verdict::Unchanged);
        assert!(!trusted());
        assert_eq!(said(Some(100), Some(32)), Verdict::Trusted);
        assert!(trusted());
        assert_eq!(said(Some(99), None), Verdict::Unchanged);
        assert_eq!(said(Some(99), None), Verdict::Unchanged);
        assert_eq!(said(Some(100), Some(48)), Verdict::Unchanged);
        assert_eq!(said(Some(100), Some(16)), Verdict::Unchanged);
        let counts = [
            TrustField::PromptSame,
            TrustField::PromptDiffers,
            TrustField::CachedSame,
            TrustField::CachedMore,
            TrustField::CachedLess,
        ];
        let trust = row.trust(model).unwrap();
        assert_eq!(counts.map(|field| trust.get(field)), [6, 7, 1, 1, 1]);
    }

    #[test]
    fn a_report_that_agrees_does_not_outweigh_blocks_that_differ() {
        let words = words();
        let zone = Zone::format(&words, HashKey([1, 2])).unwrap();
        let (row, model) = (zone.server(ServerId(1)), ModelKey::of("a"));
        let agrees = Usage { prompt: Some(100), cached: None, tail: Vec::new() };
        for (seen, verdict) in [
            (Blocks::Differ, Verdict::Unchanged),
            (Blocks::Absent, Verdict::Unchanged),
            (Blocks::Differ, Verdict::Distrusted),
            (Blocks::Same, Verdict::Unchanged),
            (Blocks::Same, Verdict::Unchanged),
            (Blocks::Same, Verdict::Trusted),
        ] {
            assert_eq!(reported(&row, model, &agrees, 100, 0), Verdict::Unchanged);
            assert_eq!(looked(&row, model, seen), verdict);
        }
        let trust = row.trust(model).unwrap();
        let counts = [TrustField::BlocksSame, TrustField::BlocksDiffer, TrustField::BlocksAbsent];
        assert_eq!(counts.map(|field| trust.get(field)), [3, 2, 1]);
    }

    #[test]
    fn one_model_is_not_blamed_for_another() {
        let words = words();
        let zone = Zone::format(&words, HashKey([1, 2])).unwrap();
        let row = zone.server(ServerId(1));
        let [a, b] = ["a", "b"].map(ModelKey::of);
        let times = |n, model, seen| (0..n).fold(None, |_, _| Some(looked(&row, model, seen)));
        times(3, a, Blocks::Differ);
        let trusted = || [Some(a), Some(b), None].map(|model| is_trusted(&row, model));
        assert_eq!(trusted(), [false, true, false]);
        times(3, b, Blocks::Differ);
        assert_eq!(trusted(), [false, false, false]);
        times(4, a, Blocks::Same);
        assert_eq!(trusted(), [true, false, false]);
        row.forget_trust();
        assert_eq!(trusted(), [true, true, true]);
        for n in 0..4 {
            assert!(row.trust(ModelKey::of(&format!("model {n}"))).is_some());
        }
        assert!(row.trust(a).is_none());
        assert_eq!(times(4, a, Blocks::Differ), Some(Verdict::Unchanged));
        assert_eq!(trusted(), [true, true, true]);
    }
}
