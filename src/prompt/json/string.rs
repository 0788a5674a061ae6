//! JSON strings.

use super::Fault;

/// How many bytes there are before the first quote, backslash or control character.
pub(super) fn plain_len(bytes: &[u8]) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let zero_bytes = |word: u64| word.wrapping_sub(ONES) & !word;
    let mut at = 0;
    while let Some(chunk) = bytes.get(at..at + 8) {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        let word = u64::from_le_bytes(word);
        let special = zero_bytes(word ^ (ONES * u64::from(b'"')))
            | zero_bytes(word ^ (ONES * u64::from(b'\\')))
            | (word.wrapping_sub(ONES * 0x20) & !word);
        if special & HIGH != 0 {
            break;
        }
        at += 8;
    }
    let special = |byte: &u8| matches!(byte, b'"' | b'\\' | 0..0x20);
    let rest = &bytes[at..];
    at + rest.iter().position(special).unwrap_or(rest.len())
}

/// The text of a string between its quotes, whose escapes have been checked.
pub(super) fn unescape(raw: &str) -> Result<String, Fault> {
    let mut out = String::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let (plain, len) = match rest.as_bytes().get(at + 1) {
            Some(b'b') => ('\u{8}', 2),
            Some(b'f') => ('\u{c}', 2),
            Some(b'n') => ('\n', 2),
            Some(b'r') => ('\r', 2),
            Some(b't') => ('\t', 2),
            Some(b'u') => unicode(&rest[at..])?,
            Some(&byte) => (char::from(byte), 2),
            None => return Err(Fault::Syntax),
        };
        out.push(plain);
        rest = &rest[at + len..];
    }
    out.push_str(rest);
    Ok(out)
}

/// The character that `\uXXXX` or a pair of them stands for, and the length of that.
fn unicode(escape: &str) -> Result<(char, usize), Fault> {
    let high = hex(escape, 2).ok_or(Fault::Syntax)?;
    if let Some(plain) = char::from_u32(high) {
        return Ok((plain, 6));
    }
    let low = hex(escape, 8).filter(|_| escape[6..].starts_with("\\u"));
    match low {
        Some(low @ 0xdc00..0xe000) if high < 0xdc00 => {
            let code = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
            char::from_u32(code).map(|plain| (plain, 12)).ok_or(Fault::Surrogate)
        }
        _ => Err(Fault::Surrogate),
    }
}

pub(super) fn hex(text: &str, at: usize) -> Option<u32> {
    let digits = text.get(at..at + 4)?;
    digits
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit())
        .then(|| u32::from_str_radix(digits, 16).ok())?
}
