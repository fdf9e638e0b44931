//! Most operations of a calibration, by the formulas in `docs/plan.md`.

use std::ops::{AddAssign, Mul};

use moh_calibrate::{Division, Shared, judged_outputs, most_fits};
use moh_model::MohConfig;
use moh_recipe::CalibrationOptions;

use crate::work::Work;

/// Operations of the device, in f32, and of the host, in f64.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Operations {
    pub device: f64,
    pub host: f64,
}

impl AddAssign for Operations {
    fn add_assign(&mut self, other: Self) {
        self.device += other.device;
        self.host += other.host;
    }
}

impl Mul<usize> for Operations {
    type Output = Self;

    fn mul(self, times: usize) -> Self {
        Operations { device: self.device * times as f64, host: self.host * times as f64 }
    }
}

/// What a calibration chooses.
pub(super) struct Choices<'a> {
    pub calibration: CalibrationOptions,
    /// The heads as the stage gives them.
    pub moh: &'a MohConfig,
    pub shared: Shared,
    pub division: Option<&'a Division>,
}

/// Tokens by which a search judges sets.
pub(super) fn search_tokens(tokens: u64, inputs: u64) -> u64 {
    tokens.div_ceil(2).max(inputs).min(tokens)
}

/// Of a calibration on so many tokens.
pub(super) fn of_calibration(work: &Work, choices: &Choices<'_>, tokens: u64) -> Operations {
    let model = &work.model;
    let (n, m) = (model.query_width() as f64, model.hidden_size as f64);
    let keys = (work.sequence_length() as f64 + 1.0) / 2.0;
    let sizes = Sizes {
        n,
        m,
        heads: model.num_attention_heads,
        head_core: 4.0 * keys * model.head_dim as f64,
        qkv: 2.0 * m * (n + 2.0 * model.key_value_width() as f64),
        judged: judged_outputs(model.hidden_size) as f64,
        tokens: tokens as f64,
        sample: search_tokens(tokens, n as u64) as f64,
        refit: choices.calibration.refit,
        learned: choices.moh.router.has_matrices(),
    };
    let loss = 2.0 * model.vocab_size as f64 * m;
    // Of three residual streams, and of two conversions that are compared.
    let losses = if choices.division.is_some() { 5.0 } else { 3.0 };
    let mut all = Operations { device: losses * sizes.tokens * loss, host: 0.0 };
    for (layer, elements) in work.elements.blocks.iter().enumerate() {
        let block = Block {
            sizes: &sizes,
            pass: 2.0 * elements.matrices as f64,
            active: choices.moh.layer(layer).active(),
        };
        all += block.conversion();
        let given = choices.moh.layer(layer).shared.len();
        let fits = |given: Option<usize>, active: usize| {
            most_fits(model, choices.moh.router, choices.shared, given, active)
        };
        if let Some(division) = choices.division {
            all += block.numbers(division, &|active| fits(None, active));
            // The streams of this layer's numbers and of those before it go through it, and this layer's have a loss.
            let streams =
                Operations { device: (layer as f64 + 1.0) * block.forward() + loss, host: 0.0 };
            all += streams * division.numbers.len().saturating_mul(division.carried_tokens);
        } else if choices.calibration.chooses_heads() && given < sizes.heads {
            all += block.search(fits(Some(given), block.active));
        }
    }
    all
}

/// What all layers have in common.
struct Sizes {
    /// Width of all query heads.
    n: f64,
    /// Width of the residual stream.
    m: f64,
    heads: usize,
    /// Operations of a head and token in attention.
    head_core: f64,
    /// Operations of a token in the projections to queries, keys and values.
    qkv: f64,
    /// Outputs by which sets are judged.
    judged: f64,
    tokens: f64,
    /// Tokens by which sets are judged.
    sample: f64,
    refit: bool,
    /// Whether the router has matrices.
    learned: bool,
}

impl Sizes {
    fn core(&self, heads: usize) -> f64 {
        self.head_core * heads as f64
    }

    /// A token's part of the products of a fit.
    fn products(&self) -> f64 {
        2.0 * self.n * (self.n + self.m)
    }

    /// The error of the old output projection, and the fit of a new one.
    fn fit(&self) -> f64 {
        let Sizes { n, m, .. } = *self;
        let fit = n * n * n / 3.0 + 6.0 * m * n * n;
        2.0 * m * n * n + if self.refit { fit } else { 0.0 }
    }

    /// The fit of a learned router: the heads' outputs, their contributions, products, and its rows.
    fn router(&self) -> Operations {
        let (Sizes { n, m, tokens, .. }, rows) = (self, self.heads as f64);
        if !self.learned {
            return Operations::default();
        }
        let token = 2.0 * self.qkv + self.core(self.heads) + 2.0 * m * (m + rows);
        let host = tokens * 2.0 * n * m + m * m * m / 3.0 + 6.0 * rows * m * m;
        Operations { device: tokens * token, host }
    }
}

/// A layer.
struct Block<'a> {
    sizes: &'a Sizes,
    /// Operations of a token in its matrices.
    pass: f64,
    /// Its active heads.
    active: usize,
}

impl Block<'_> {
    /// A token of a residual stream.
    fn forward(&self) -> f64 {
        self.pass + self.sizes.core(self.active)
    }

    /// The passes with which a layer is converted, and its fits, without a search.
    fn conversion(&self) -> Operations {
        let Sizes { qkv, heads, tokens, .. } = *self.sizes;
        // Dense, as given and as calibrated; the heads' outputs of the latter, and their products.
        let dense = self.pass + self.sizes.core(heads);
        let products = qkv + self.sizes.core(heads) + self.sizes.products();
        let passes = dense + 2.0 * self.forward() + products;
        let mut all = Operations { device: tokens * passes, host: self.sizes.fit() };
        all += self.sizes.router();
        all
    }

    /// A search by so many fits.
    fn search(&self, fits: usize) -> Operations {
        let Sizes { n, qkv, heads, judged, sample, .. } = *self.sizes;
        let outputs = qkv + self.pass + 2.0 * self.sizes.core(heads);
        let products = fits as f64 * 2.0 * n * (n + judged);
        let judgement = n * n * n / 3.0 + 3.0 * judged * n * n;
        Operations { device: sample * (outputs + products), host: fits as f64 * judgement }
    }

    /// What the numbers of active heads of the layer take beside the result, but for their residual streams: the sets of
    /// each, `fits` of a number at most, and two conversions that are compared.
    fn numbers(&self, division: &Division, fits: &dyn Fn(usize) -> usize) -> Operations {
        let Sizes { heads, tokens, .. } = *self.sizes;
        let numbers = &division.numbers;
        let fewer = numbers.iter().filter(|&&active| active < heads);
        let fits: Vec<usize> = fewer.map(|&active| fits(active)).collect();
        let mut all = self.search(fits.iter().sum());
        // A number that is not measured is searched for in each conversion.
        let unit = numbers.first().map_or(1, |&first| first.max(1));
        if numbers.len() < heads / unit {
            all += self.search(fits.iter().copied().max().unwrap_or(0)) * 3;
        }
        all += self.number() * numbers.len();
        all += self.sizes.router();
        // The streams of the given and of the even heads.
        all += Operations { device: tokens * 2.0 * self.forward(), host: 0.0 };
        all += self.conversion() * 2;
        all
    }

    /// The fit of a number of active heads.
    fn number(&self) -> Operations {
        let Sizes { qkv, heads, tokens, .. } = *self.sizes;
        let token = self.pass + qkv + 2.0 * self.sizes.core(heads) + self.sizes.products();
        Operations { device: tokens * token, host: self.sizes.fit() }
    }
}
