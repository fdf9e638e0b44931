//! The escapes of JSON's strings, taken back a piece at a time. The string was read as JSON before: what is
//! left to check are surrogates.

/// A string of JSON that is unescaped from its beginning to its end.
#[derive(Clone, Debug)]
pub(crate) struct Unescaped<'a> {
    raw: &'a str,
    at: usize,
}

impl<'a> Unescaped<'a> {
    /// `raw` is the string as it is written, without its quotes.
    pub(crate) fn new(raw: &'a str) -> Self {
        Self { raw, at: 0 }
    }

    /// Bytes that are not unescaped yet.
    pub(crate) fn rest(&self) -> usize {
        self.raw.len() - self.at
    }

    /// Appends to `text` until the string is over or about `bytes` of it were taken.
    ///
    /// # Errors
    /// Fails at half of a surrogate pair, with its place in the string.
    pub(crate) fn append(&mut self, text: &mut String, bytes: usize) -> Result<(), usize> {
        self.walk(bytes, |part| match part {
            Part::Plain(plain) => text.push_str(plain),
            Part::Character(character) => text.push(character),
        })
    }

    /// Checks the rest.
    ///
    /// # Errors
    /// As [`Unescaped::append`].
    pub(crate) fn check(mut self) -> Result<(), usize> {
        self.walk(usize::MAX, |_| {})
    }

    fn walk(&mut self, bytes: usize, mut visit: impl FnMut(Part<'a>)) -> Result<(), usize> {
        let limit = self.raw.floor_char_boundary(self.at.saturating_add(bytes.max(4)));
        let bytes = self.raw.as_bytes();
        while self.at < limit {
            let plain = memchr::memchr(b'\\', &bytes[self.at..limit]);
            let end = plain.map_or(limit, |length| self.at + length);
            if end > self.at {
                visit(Part::Plain(&self.raw[self.at..end]));
                self.at = end;
            }
            if plain.is_some() {
                let (character, length) = escape(&bytes[end..]).ok_or(end)?;
                visit(Part::Character(character));
                self.at = end + length;
            }
        }
        Ok(())
    }
}

enum Part<'a> {
    Plain(&'a str),
    Character(char),
}

/// The character of the escape at the start of `bytes`, and its length.
fn escape(bytes: &[u8]) -> Option<(char, usize)> {
    let simple = match bytes.get(1)? {
        b'n' => '\n',
        b't' => '\t',
        b'r' => '\r',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'u' => {
            let first = unit(bytes)?;
            if let Some(character) = char::from_u32(first) {
                return Some((character, 6));
            }
            let second = unit(bytes.get(6..)?)?;
            let is_pair = (0xd800..0xdc00).contains(&first) && (0xdc00..0xe000).contains(&second);
            let joined = 0x10000 + ((first & 0x3ff) << 10 | second & 0x3ff);
            return is_pair.then_some((char::from_u32(joined)?, 12));
        }
        &other => char::from(other),
    };
    Some((simple, 2))
}

/// The UTF-16 unit of an escape.
fn unit(bytes: &[u8]) -> Option<u32> {
    let digits = bytes.strip_prefix(b"\\u")?.get(..4)?;
    u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn unescaped(raw: &str, bytes: usize) -> Result<String, usize> {
        let mut text = String::new();
        let mut rest = Unescaped::new(raw);
        while rest.rest() > 0 {
            rest.append(&mut text, bytes)?;
        }
        Ok(text)
    }

    #[test]
    fn escapes_are_taken_back() {
        let raw = r#"\"\\\/\b\f\n\r\t\u00e4\u20AC\ud83d\uDE00"#;
        assert_eq!(unescaped(raw, 1).unwrap(), "\"\\/\u{8}\u{c}\n\r\t\u{e4}\u{20ac}\u{1f600}");
    }

    #[test]
    fn half_a_surrogate_pair_is_located() {
        for raw in
            [r"ab\ud83d", r"ab\ud83dxxxxxx", r"ab\ud83d\n", r"ab\ude00\ud83d", r"ab\ud83d\u0041"]
        {
            assert_eq!(unescaped(raw, 3), Err(2), "{raw}");
            assert_eq!(Unescaped::new(raw).check(), Err(2), "{raw}");
        }
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_join_to_the_text(text: String, bytes in 1usize..40) {
            let raw = serde_json::to_string(&text).unwrap();
            prop_assert_eq!(unescaped(&raw[1..raw.len() - 1], bytes).unwrap(), text);
        }
    }
}
