//! Text up to the first stop string. Text that may begin a stop string is held back until it is decided.

/// Finds stop strings in text that arrives in pieces.
#[derive(Debug)]
pub(super) struct StopStrings<'a> {
    stops: &'a [String],
    held: String,
    /// Whether a stop string was found. Then no more text follows.
    pub found: bool,
}

impl<'a> StopStrings<'a> {
    pub fn new(stops: &'a [String]) -> Self {
        StopStrings { stops, held: String::new(), found: false }
    }

    /// Adds text, and returns the text that is certainly before any stop string.
    pub fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        self.held.push_str(text);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = first {
            self.found = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let open = self.stops.iter().map(|stop| open_bytes(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - open);
        std::mem::replace(&mut self.held, rest)
    }

    /// Returns the text that was held back, at the end of the input.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the number of bytes at the end of `text` that begin a stop string.
fn open_bytes(text: &str, stop: &str) -> usize {
    let begins = stop.char_indices().map(|(at, _)| at).rev();
    begins.into_iter().find(|&bytes| text.ends_with(&stop[..bytes])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut found = StopStrings::new(&stops);
        let mut texts: Vec<String> = pieces.iter().map(|piece| found.push(piece)).collect();
        texts.push(found.finish());
        (texts, found.found)
    }

    #[test]
    fn text_ends_before_the_first_stop_string() {
        let expected =
            |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        assert_eq!(texts(&["END"], &["abE", "N", "Dx"]), (expected(&["ab", "", "", ""]), true));
        assert_eq!(texts(&["END"], &["abE", "N", "x"]), (expected(&["ab", "", "ENx", ""]), false));
        assert_eq!(texts(&["END"], &["abEN"]), (expected(&["ab", "EN"]), false));
        // Of two stop strings in a piece, the first counts. Of a stop string inside another, the outer counts, which
        // begins first.
        assert_eq!(texts(&["y", "x"], &["ax by"]).0, expected(&["a", ""]));
        assert_eq!(texts(&["b", "abc"], &["za", "bc"]).0, expected(&["z", "", ""]));
        assert_eq!(texts(&["é!"], &["aé", "é", "!"]).0, expected(&["a", "é", "", ""]));
        assert_eq!(texts(&[], &["a", "b"]), (expected(&["a", "b", ""]), false));
    }

    proptest! {
        /// However a text is divided, the same part of it is returned.
        #[test]
        fn the_division_does_not_matter(text in "[abé]{0,24}", stops in prop::collection::vec("[abé]{1,4}", 0..4)) {
            let end = stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
            let mut found = StopStrings::new(&stops);
            let mut all = String::new();
            for character in text.chars() {
                all.push_str(&found.push(character.encode_utf8(&mut [0; 4])));
            }
            all.push_str(&found.finish());
            // A stop string that is complete earlier may begin later than a stop string that is still open.
            if stops.len() < 2 {
                prop_assert_eq!(&all, &text[..end.unwrap_or(text.len())]);
            }
            prop_assert!(text.starts_with(&all));
            prop_assert_eq!(found.found, end.is_some());
        }
    }
}
