//! The tokens that heads are measured on.

use std::ops::Range;

use moh_kernels::cross_entropy::IGNORED;
use moh_model::{ModelConfig, most_windows};

use crate::{Error, Result};

/// Number of passes after which the parts repeat.
const CYCLE: usize = 9;
/// The place in a cycle of the held-out pass, and of the pass that chooses the ridge.
const HELD_OUT: usize = 4;
const RIDGE: usize = 8;

/// The purpose of a pass's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Fits.
    Fit,
    /// The choice of each layer's ridge, then the fit with it.
    Ridge,
    /// Losses and errors, on tokens that are not fitted to.
    HeldOut,
}

/// The passes over the windows of a calibration. Of every nine passes one is held out, and one chooses the ridge of the
/// fits. All passes except the held-out pass are fitted to. With fewer than nine passes, the last pass is held out and
/// the pass before it chooses the ridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CalibrationPasses {
    length: usize,
    /// Windows of a pass.
    pub(crate) batch: usize,
    number: usize,
}

impl CalibrationPasses {
    /// Divides `windows` windows of `length` tokens into passes; skips windows after the last whole pass.
    pub fn new(windows: usize, length: usize) -> Self {
        let batch = most_windows(length).min(windows / CYCLE).max(1);
        CalibrationPasses { length, batch, number: windows / batch }
    }

    /// Returns the number of windows of a pass, and of tokens of a window.
    pub fn shape(&self) -> (usize, usize) {
        (self.batch, self.length)
    }

    /// Returns the number of tokens of all passes.
    pub fn tokens(&self) -> usize {
        self.number * self.pass()
    }

    /// Returns the number of tokens on which sets of heads are searched in a layer of `width` query columns, if about
    /// `search_tokens` are requested.
    pub fn searched(&self, search_tokens: usize, width: usize) -> usize {
        self.number_searched(search_tokens, width) * self.pass()
    }

    /// Returns the number of tokens of a pass.
    pub fn pass(&self) -> usize {
        self.batch * self.length
    }

    /// Returns the range of a pass's elements in a table with `width` columns and a row for each token.
    pub(crate) fn elements(&self, pass: usize, width: usize) -> Range<usize> {
        pass * self.pass() * width..(pass + 1) * self.pass() * width
    }

    /// Returns the places in a cycle of the held-out pass, and of the pass that chooses the ridge.
    fn places(&self) -> (usize, usize) {
        match self.number < CYCLE {
            true => (self.number.saturating_sub(1), self.number.saturating_sub(2)),
            false => (HELD_OUT, RIDGE),
        }
    }

    /// Returns the number of held-out passes.
    pub(crate) fn held_out(&self) -> usize {
        (self.number + CYCLE - 1 - self.places().0) / CYCLE
    }

    fn number_searched(&self, search_tokens: usize, width: usize) -> usize {
        let choose_ridge = (self.number + CYCLE - 1 - self.places().1) / CYCLE;
        let all = self.number.saturating_sub(self.held_out() + choose_ridge);
        search_tokens.max(width).div_ceil(self.pass().max(1)).min(all)
    }

    pub(crate) fn of(&self, part: Part) -> impl Iterator<Item = usize> + use<> {
        let (held_out, ridge) = self.places();
        (0..self.number).filter(move |pass| match pass % CYCLE {
            place if place == held_out => part == Part::HeldOut,
            place if place == ridge => part == Part::Ridge,
            _ => part == Part::Fit,
        })
    }

    /// Returns the passes that are fitted to.
    pub(crate) fn fitted(&self) -> impl Iterator<Item = usize> + use<> {
        self.of(Part::Fit).chain(self.of(Part::Ridge))
    }
}

/// Windows of equal length, one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CalibrationTokens {
    ids: Vec<u32>,
    /// The text of each window, by its number; empty if there is one text.
    texts: Vec<usize>,
    search_tokens: usize,
    pub(crate) passes: CalibrationPasses,
}

impl CalibrationTokens {
    /// Returns the windows of `length` tokens for the model that `config` describes; skips ids after the last whole
    /// pass. Sets of heads are searched on about `search_tokens` of the tokens.
    ///
    /// # Errors
    /// Fails if the model does not support the length, if there are fewer than three windows, or if fewer tokens are
    /// fitted to than the width of all query heads.
    pub fn new(
        mut ids: Vec<u32>,
        length: usize,
        search_tokens: usize,
        config: &ModelConfig,
    ) -> Result<Self> {
        let context = config.max_position_embeddings;
        if !(2..=context).contains(&length) {
            return Err(Error::Invalid(format!(
                "windows of {length} tokens: must be 2 to {context}, the model's context length"
            )));
        }
        let windows = ids.len() / length;
        if windows < 3 {
            return Err(Error::Invalid(format!(
                "{} calibration tokens make {windows} windows of {length}, and there must be 3, of which one is held \
                 out: give more text, more --calibration-tokens, or a shorter --calibration-length",
                ids.len()
            )));
        }
        let passes = CalibrationPasses::new(windows, length);
        let (fitted, width) = (passes.fitted().count() * passes.pass(), config.query_width());
        if fitted < width {
            return Err(Error::Invalid(format!(
                "{fitted} of {} calibration tokens are fitted to: a fit of {width} inputs, the width of all query \
                 heads, needs at least as many: give more text, or more --calibration-tokens",
                passes.tokens()
            )));
        }
        ids.truncate(passes.tokens());
        Ok(CalibrationTokens { ids, texts: Vec::new(), search_tokens, passes })
    }

    /// Returns the same windows as windows of several texts, so that losses of each text are measured too. `texts` has
    /// the number of each window's text.
    pub fn of_texts(self, texts: Vec<usize>) -> Self {
        CalibrationTokens { texts, ..self }
    }

    /// Returns the number of texts, at least one.
    pub(crate) fn num_texts(&self) -> usize {
        self.texts.iter().max().map_or(1, |last| last + 1)
    }

    /// Returns the targets of a pass in one text, and their number. A token's target is the next token of its window;
    /// the last token of a window has no target.
    pub(crate) fn targets(&self, pass: usize, text: usize) -> (Vec<u32>, usize) {
        let length = self.length();
        let first = pass * self.passes.batch;
        let mut targets = Vec::with_capacity(self.passes.pass());
        for (window, ids) in (first..).zip(self.ids_of(pass).chunks_exact(length)) {
            let own = self.texts.get(window).is_none_or(|&of| of == text);
            targets.extend(ids[1..].iter().map(|&id| if own { id } else { IGNORED }));
            targets.push(IGNORED);
        }
        let number = targets.iter().filter(|&&target| target != IGNORED).count();
        (targets, number)
    }

    /// Returns the ids of all windows.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the ids of the held-out windows.
    pub fn held_out(&self) -> Vec<u32> {
        self.passes.of(Part::HeldOut).flat_map(|pass| self.ids_of(pass)).copied().collect()
    }

    /// Returns the number of tokens of a window.
    pub fn length(&self) -> usize {
        self.passes.length
    }

    /// Returns the number of tokens on which sets of heads are searched.
    pub fn search_tokens(&self) -> usize {
        self.search_tokens
    }

    /// Returns the ids of a pass.
    pub(crate) fn ids_of(&self, pass: usize) -> &[u32] {
        &self.ids[pass * self.passes.pass()..][..self.passes.pass()]
    }

    /// Returns the windows on which sets of heads are searched, in whole passes: one window from each of equal parts of
    /// the windows of fits. The window's place differs from part to part, because windows of several texts may take
    /// turns.
    pub(crate) fn search_windows(&self, width: usize) -> Vec<usize> {
        let of_pass = |pass| pass * self.passes.batch..(pass + 1) * self.passes.batch;
        let all: Vec<usize> = self.passes.of(Part::Fit).flat_map(of_pass).collect();
        let number = self.passes.number_searched(self.search_tokens, width) * self.passes.batch;
        // Multiples of the golden ratio, without whole parts, are spread evenly over 0 to 1.
        let place = |part: usize| (part as f64 * 0.618_033_988_749_895).fract();
        let window =
            |part| ((part as f64 + place(part)) * all.len() as f64 / number as f64) as usize;
        (0..number).map(|part| all[window(part)]).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn config() -> ModelConfig {
        let fields = serde_json::json!({
            "model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        });
        moh_hf::ConfigFile::from_value(fields, std::path::Path::new("config.json")).unwrap().config
    }

    #[test]
    fn each_pass_has_a_part() {
        for (windows, length, expected) in [
            (3, 16, "frh"),
            (7, 16, "fffffrh"),
            (9, 16, "ffffhfffr"),
            (29, 16, "ffffhfffr"),
            (64 * 26, 64, "ffffhfffrffffhfffrffffhfff"),
        ] {
            let passes = CalibrationPasses::new(windows, length);
            let mut parts = vec![' '; passes.number];
            for (part, name) in [(Part::Fit, 'f'), (Part::Ridge, 'r'), (Part::HeldOut, 'h')] {
                passes.of(part).for_each(|pass| parts[pass] = name);
            }
            assert_eq!(parts.iter().collect::<String>(), expected);
            assert!(passes.pass() <= 4096 && passes.tokens() <= windows * length);
        }
        for windows in 0..100 {
            let passes = CalibrationPasses::new(windows, 1024);
            assert_eq!(passes.held_out(), passes.of(Part::HeldOut).count());
            assert_eq!(
                passes.searched(usize::MAX, 1),
                passes.of(Part::Fit).count() * passes.pass()
            );
        }
    }

    #[test]
    fn searches_have_windows_all_over_those_of_fits() {
        let search = |search_tokens, width| {
            let ids = vec![1; 64 * 64 * 26];
            let tokens = CalibrationTokens::new(ids, 64, search_tokens, &config()).unwrap();
            tokens.search_windows(width)
        };
        // 26 passes of 64 windows each: 3 passes are held out, and 2 choose the ridge.
        for (found, passes) in [
            (search(128, 32), 1),
            (search(128, 64 * 64 * 3), 3),
            (search(64 * 64 * 2, 32), 2),
            (search(usize::MAX, 32), 21),
        ] {
            assert_eq!(found.len(), passes * 64);
            assert!(found.windows(2).all(|pair| pair[0] < pair[1]), "{found:?}");
            assert!(found.iter().all(|window| ![4, 8].contains(&(window / 64 % 9))), "{found:?}");
            // Two texts that take turns are read alike.
            let odd = found.iter().filter(|&window| window % 2 == 1).count();
            assert!(odd.abs_diff(found.len() / 2) <= 4, "{odd} of {}", found.len());
        }
    }

    #[test]
    fn too_few_tokens_and_other_lengths_are_refused() {
        let refused = |ids, length| {
            CalibrationTokens::new(vec![1; ids], length, 128, &config()).unwrap_err().to_string()
        };
        assert!(refused(40, 15).starts_with("40 calibration tokens make 2 windows of 15"));
        assert!(
            refused(45, 15).starts_with("30 of 45 calibration tokens are fitted to: a fit of 32")
        );
        assert!(refused(40, 1).starts_with("windows of 1 tokens: must be 2 to 64"));
        assert!(refused(400, 65).starts_with("windows of 65 tokens: must be 2 to 64"));
    }
}
