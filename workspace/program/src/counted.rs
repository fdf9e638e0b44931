//! Numbers with their nouns.

/// A number and its noun: `1 token`, `2 tokens`.
pub fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let shown = [0, 1, 2].map(|number| counted(number, "token"));
        assert_eq!(shown, ["0 tokens", "1 token", "2 tokens"]);
    }
}
