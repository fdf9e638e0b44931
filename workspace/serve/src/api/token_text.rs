//! The text of single tokens, as lists of log-probabilities show it.

use std::collections::HashMap;

use moh_text::TextTokenizer;

/// What the lowest log-probability is shown as: JSON has no infinity.
const LEAST_LOGPROB: f64 = -9999.0;

/// The texts of tokens, each decoded once.
#[derive(Debug)]
pub(super) struct TokenTexts<'a> {
    tokenizer: &'a TextTokenizer,
    /// Whether a token is written as `token_id:N`.
    as_ids: bool,
    known: HashMap<u32, (String, Vec<u8>)>,
}

impl<'a> TokenTexts<'a> {
    pub fn new(tokenizer: &'a TextTokenizer, as_ids: bool) -> Self {
        TokenTexts { tokenizer, as_ids, known: HashMap::new() }
    }

    /// The text of a token after others, and its bytes. Bytes that are no text are written as `bytes:\xe2\x80`.
    pub fn of(&mut self, id: u32) -> &(String, Vec<u8>) {
        let (tokenizer, as_ids) = (self.tokenizer, self.as_ids);
        self.known.entry(id).or_insert_with(|| {
            let (text, bytes) = text_and_bytes(tokenizer, id);
            (if as_ids { format!("token_id:{id}") } else { text }, bytes)
        })
    }
}

/// A log-probability as JSON can have it.
pub(super) fn finite(logprob: f64) -> f64 {
    logprob.max(LEAST_LOGPROB)
}

fn text_and_bytes(tokenizer: &TextTokenizer, id: u32) -> (String, Vec<u8>) {
    let decode = |ids: &[u32]| tokenizer.decode(ids, false).unwrap_or_default();
    // Twice, because decoders drop a space at the beginning of a text.
    let (once, twice) = (decode(&[id]), decode(&[id, id]));
    let text = twice.strip_prefix(&once).map_or(once.clone(), str::to_owned);
    if !text.contains('\u{fffd}') {
        return (text.clone(), text.into_bytes());
    }
    let token = tokenizer.token(id).unwrap_or_default();
    let Some(bytes) =
        byte_of_fallback(&token).map(|byte| vec![byte]).or_else(|| byte_level(&token))
    else {
        return (text.clone(), text.into_bytes());
    };
    let shown = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    (format!("bytes:{shown}"), bytes)
}

/// The byte of a token such as `<0x0A>`.
fn byte_of_fallback(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok()
}

/// The bytes of a token of byte-level BPE, which writes those that are no printable character of Latin-1 as the
/// characters from U+0100 on (GPT-2's alphabet).
fn byte_level(token: &str) -> Option<Vec<u8>> {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let byte = |character: char| {
        let code = u32::from(character);
        match u8::try_from(code) {
            Ok(byte) => Some(byte).filter(|&byte| is_printable(byte)),
            Err(_) => (0..=u8::MAX)
                .filter(|&byte| !is_printable(byte))
                .nth(usize::try_from(code).ok()?.checked_sub(0x100)?),
        }
    };
    token.chars().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_from_the_names_of_tokens() {
        assert_eq!(byte_of_fallback("<0x0A>"), Some(10));
        assert_eq!(byte_of_fallback("<0xZZ>"), None);
        assert_eq!(byte_level("\u{120}a"), Some(b" a".to_vec()));
        assert_eq!(byte_level("\u{10a}"), Some(b"\n".to_vec()));
        assert_eq!(byte_level("\u{e2}\u{122}"), Some(vec![0xe2, 0x80]));
        assert_eq!(byte_level("\u{143}"), Some(vec![0xad]), "the last one");
        assert_eq!(byte_level("\u{144}"), None);
        assert_eq!(byte_level(" "), None);
    }
}
