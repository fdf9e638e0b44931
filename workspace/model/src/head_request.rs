//! Resolves a user's request into the head counts of every layer: the one place where a share of the heads becomes
//! counts.
//!
//! 1. Of h heads at share R, a = R h are active, rounded half up.
//! 2. If R is above one half, a is above h / 2 rounded down, and h is at least 3: half of all heads are shared, rounded
//!    down.
//! 3. Otherwise half of the active heads are shared, rounded down.
//! 4. The other active heads are routed: k = a - shared.
//!
//! If a router selects whole groups of heads, groups are counted instead of heads, and each stands for its heads.
//! Without a router all active heads are shared.

use crate::router::HeadGroups;
use crate::{Error, HeadCounts, ModelConfig, MohConfig, Result, RouterKind, SharedHeadSets};

/// The share of active heads where a user gives no count.
pub const DEFAULT_ACTIVE_SHARE: f64 = 0.75;

/// The product of a decimal share and a number of heads may be this far below the exact product (0.29 x 50).
const PRODUCT_ERROR: f64 = 1e-9;

/// The number of active heads per token that a user asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Active {
    /// This share of all heads, including shared heads.
    Share(f64),
    /// The shared heads and this many routed heads.
    RoutedTopK(HeadCounts),
}

/// The head counts that a user asks for. A missing count is the source's, if the source is a Mixture-of-Head model and
/// no share is given. Otherwise it follows from the share.
///
/// ```
/// use moh_model::{Active, HeadRequest};
///
/// // 75% of the 32 heads of each of 32 layers: 16 shared heads, and 8 of the other 16.
/// let request = HeadRequest { active: Some(Active::Share(0.75)), ..HeadRequest::default() };
/// let moh = request.resolve(32, 8, 32, None)?;
/// assert_eq!((moh.shared_heads.counts().uniform(), moh.routed_top_k.uniform()), (Some(16), Some(8)));
/// # Ok::<_, moh_model::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeadRequest {
    /// The router; default: the source's, or query-norm.
    pub router: Option<RouterKind>,
    /// Heads that are active for every token.
    pub shared_heads: Option<SharedHeadSets>,
    /// The number of active heads.
    pub active: Option<Active>,
}

/// A share of the heads, and its origin.
#[derive(Debug, Clone, Copy)]
struct Share {
    share: f64,
    is_default: bool,
    router: RouterKind,
    /// The number of active heads is a multiple of this number.
    unit: usize,
}

impl HeadRequest {
    /// Returns the counts for `layers` layers of `heads` heads, which read `kv_heads` key/value heads. `source` is the
    /// routing of the source model, if it is a Mixture-of-Head model.
    ///
    /// # Errors
    /// Fails:
    /// - if the share is not in 0..=1, or leaves no head active,
    /// - if a share below 1 leaves all heads active,
    /// - if a layer with routed heads would have no active routed head without `routed_top_k` 0,
    /// - where [`MohConfig::validate`] fails.
    pub fn resolve(
        &self,
        heads: usize,
        kv_heads: usize,
        layers: usize,
        source: Option<&MohConfig>,
    ) -> Result<MohConfig> {
        let (router, groups) = (self.router(source), HeadGroups { heads, kv_heads });
        let given = self.shared_heads.clone();
        let (shared_heads, routed_top_k) = match (self.share(groups, source), &self.active) {
            (Some(share), _) => {
                let shared = given.unwrap_or_else(|| share.default_shared_heads(heads).into());
                let top_k = share.routed_top_k(heads, &shared.counts())?;
                (shared, top_k)
            }
            (None, active) => {
                let kept = source.map(|moh| moh.shared_heads.clone());
                let shared = given.or(kept);
                let top_k = match active {
                    Some(Active::RoutedTopK(top_k)) => Some(top_k.clone()),
                    _ if !router.selects() => None,
                    _ => source.map(|moh| moh.routed_top_k.clone()),
                };
                // Without a share, `routed_top_k` is given or the source's.
                (shared.unwrap_or((heads / 2).into()), top_k.unwrap_or(0.into()))
            }
        };
        let moh = MohConfig { router, shared_heads, routed_top_k };
        moh.validate(heads, kv_heads, layers)?;
        Ok(moh)
    }

    /// Returns the counts for the layers and heads of `model`, with its routing as the source's, as
    /// [`HeadRequest::resolve`] does.
    pub fn for_model(&self, model: &ModelConfig) -> Result<MohConfig> {
        let (heads, kv_heads) = (model.num_attention_heads, model.num_key_value_heads);
        self.resolve(heads, kv_heads, model.num_hidden_layers, model.moh.as_ref())
    }

    fn router(&self, source: Option<&MohConfig>) -> RouterKind {
        self.router.or(source.map(|moh| moh.router)).unwrap_or(RouterKind::QueryNorm)
    }

    /// Describes the rounded share, if no number of heads meets the share exactly:
    /// `--active 0.8 of 8 heads: 6 of 8, 0.75`.
    pub fn rounding(
        &self,
        heads: usize,
        kv_heads: usize,
        source: Option<&MohConfig>,
    ) -> Option<String> {
        let groups = HeadGroups { heads, kv_heads };
        let share = self.share(groups, source)?;
        let active = share.active(heads);
        if (share.share * heads as f64 - active as f64).abs() < PRODUCT_ERROR {
            return None;
        }
        let met = format!("{:.3}", active as f64 / heads as f64);
        let met = met.trim_end_matches('0').trim_end_matches('.');
        Some(format!("{}: {active} of {heads}, {met}", share.describe(heads)))
    }

    /// Returns the share that determines the counts; `None` if counts determine them.
    fn share(&self, groups: HeadGroups, source: Option<&MohConfig>) -> Option<Share> {
        let router = self.router(source);
        let unit = router.unit(groups);
        let (share, is_default) = match (&self.active, source) {
            (Some(Active::Share(share)), _) => (*share, false),
            (None, None) => (DEFAULT_ACTIVE_SHARE, true),
            (Some(Active::RoutedTopK(_)), _) | (None, Some(_)) => return None,
        };
        Some(Share { share, is_default, router, unit })
    }
}

/// Returns a share of a number of heads or groups of heads, rounded half up.
fn rounded(share: f64, number: usize) -> usize {
    (share * number as f64 + PRODUCT_ERROR + 0.5).floor() as usize
}

impl Share {
    /// Returns the share's name in messages.
    fn describe(self, heads: usize) -> String {
        let Share { share, is_default, .. } = self;
        match is_default {
            true => format!("the default share of {share} of {heads} heads"),
            false => format!("--active {share} of {heads} heads"),
        }
    }

    fn active(self, heads: usize) -> usize {
        rounded(self.share, heads / self.unit) * self.unit
    }

    /// Returns the number of shared heads if the user gives no number. Compares the share with one half, not the
    /// rounded count: half of an odd number of heads is rounded up, and would leave one routed head active.
    fn default_shared_heads(self, heads: usize) -> usize {
        let (units, active) = (heads / self.unit, self.active(heads) / self.unit);
        let half = match self.share > 0.5 && active > units / 2 && units >= 3 {
            true => units / 2,
            false => active / 2,
        };
        match self.router {
            RouterKind::Static => active,
            _ => half * self.unit,
        }
    }

    /// Returns the number of active routed heads of each layer, in addition to its shared heads.
    fn routed_top_k(self, heads: usize, shared: &HeadCounts) -> Result<HeadCounts> {
        let Share { share, is_default, .. } = self;
        let refuse = |reason: String| Err(Error::Invalid(reason));
        if !(0.0..=1.0).contains(&share) {
            return refuse(format!("--active {share}: must be a share of the heads, 0 to 1"));
        }
        let (named, active) = (self.describe(heads), self.active(heads));
        if active == 0 {
            return refuse(format!("{named} leaves no head active: use a larger share"));
        }
        if active == heads && share < 1.0 {
            let advice = match is_default {
                true => "set both shared heads and routed top-k",
                false => "use a smaller share, or --active 1 for all heads",
            };
            return refuse(format!("{named} is all {heads} heads: {advice}"));
        }
        match shared {
            HeadCounts::All(shared) => self.routed(heads, *shared, "").map(HeadCounts::All),
            HeadCounts::Each(list) => {
                let layers = list.iter().enumerate();
                let routed = layers.map(|(layer, &shared)| {
                    self.routed(heads, shared, &format!(" of layer {layer}"))
                });
                routed.collect()
            }
        }
    }

    /// Returns the number of active routed heads of a layer with `shared` shared heads. Messages append `place` to the
    /// layer's counts.
    fn routed(self, heads: usize, shared: usize, place: &str) -> Result<usize> {
        let active = self.active(heads);
        let dense_layer = shared >= heads;
        if !self.router.selects() {
            return Ok(0);
        }
        if shared < active || (dense_layer && (self.is_default || active == heads)) {
            return Ok(active.saturating_sub(shared));
        }
        let named = self.describe(heads);
        let reason = match self.is_default {
            true => format!(
                "shared_heads{place} = {shared}: {named} is {active}, which leaves no active routed \
                 head: set routed_top_k too (--routed-top-k), 0 for none"
            ),
            false if shared > active => format!(
                "{named} is {active}, fewer than the {shared} shared heads{place}: use a larger \
                 share or fewer --shared-heads"
            ),
            false => format!(
                "{named} is {active}, all of them shared heads{place}: use a larger share or fewer \
                 --shared-heads, or --routed-top-k 0 for no active routed head"
            ),
        };
        Err(Error::Invalid(reason))
    }
}

#[cfg(test)]
mod tests;
