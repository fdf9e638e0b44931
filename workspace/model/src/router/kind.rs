//! The routers of a configuration, by name, and the head counts that each router can route.

use crate::{Error, LayerHeads, Result};

/// The selection of each token's heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterKind {
    /// Any routed heads, by the norms of their queries before RoPE; no parameters (`"query-norm"`).
    QueryNorm,
    /// Whole groups of the heads that read the same key/value head, by their mean squared norms; no parameters
    /// (`"group"`).
    Group,
    /// No selection: every token computes only the shared heads (`"static"`).
    Static,
    /// Any routed heads, by a matrix; straight-through (`"linear"`).
    Linear,
    /// Any routed heads, by a matrix that also weighs all active heads (`"one-stage"`).
    OneStage,
    /// As `"one-stage"`, with a matrix that weighs shared heads against selected heads (`"two-stage"`).
    TwoStage,
}

/// The query heads of a model, and the key/value heads that they read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadGroups {
    pub heads: usize,
    pub kv_heads: usize,
}

impl HeadGroups {
    /// Returns the number of query heads in a group, which read the same key/value head.
    pub fn size(self) -> usize {
        (self.heads / self.kv_heads.max(1)).max(1)
    }
}

impl RouterKind {
    /// Every router.
    pub const ALL: [RouterKind; 6] = [
        RouterKind::QueryNorm,
        RouterKind::Group,
        RouterKind::Static,
        RouterKind::Linear,
        RouterKind::OneStage,
        RouterKind::TwoStage,
    ];

    /// The names of all routers in `config.json` and in recipes, in the order of `ALL`.
    pub const NAMES: [&'static str; Self::ALL.len()] =
        ["query-norm", "group", "static", "linear", "one-stage", "two-stage"];

    /// Returns the router's name.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Returns the router with that name, if it exists.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|router| router.name() == name)
    }

    /// Returns whether the router has matrices among a block's tensors.
    pub fn has_matrices(self) -> bool {
        self == RouterKind::Linear || self.weighs()
    }

    /// Returns whether the router's matrices must be fitted to a text before training: zeros or random values would
    /// select heads that do not matter. Other routers may start with zeros, which weigh every active head by 1.
    pub fn needs_fit(self) -> bool {
        self == RouterKind::Linear
    }

    /// Returns whether the router multiplies the outputs of active heads by weights other than 1.
    pub fn weighs(self) -> bool {
        matches!(self, RouterKind::OneStage | RouterKind::TwoStage)
    }

    /// Returns whether tokens select heads, so that there are gates, loads and a balance loss.
    pub fn selects(self) -> bool {
        self != RouterKind::Static
    }

    /// Returns the number of heads that a token selects together.
    pub(crate) fn unit(self, groups: HeadGroups) -> usize {
        match self {
            RouterKind::Group => groups.size(),
            _ => 1,
        }
    }

    /// Rejects a layer's counts that this router cannot route, of heads that the layer has. Messages append `place` to
    /// the names.
    pub(crate) fn check(self, layer: LayerHeads, groups: HeadGroups, place: &str) -> Result<()> {
        let refuse = |reason: String| Err(Error::Invalid(reason));
        let LayerHeads { shared, top_k } = layer;
        let (heads, size) = (groups.heads, groups.size());
        let mut shared_of_groups = (0..groups.kv_heads).map(|group| {
            (group * size..(group + 1) * size).filter(|&head| shared.contains(head)).count()
        });
        match self {
            RouterKind::QueryNorm if heads - shared.len() == 1 => refuse(format!(
                "shared_heads{place} = {} of {heads} leaves one routed head, whose norm has no \
                 standard deviation: route none or at least two",
                shared.len()
            )),
            RouterKind::Group if shared_of_groups.any(|count| count != 0 && count != size) => {
                refuse(format!(
                    "shared_heads{place} are no whole groups: the router \"group\" shares and \
                     selects the {size} heads of a key/value head together"
                ))
            }
            RouterKind::Group if !top_k.is_multiple_of(size) => refuse(format!(
                "routed_top_k{place} = {top_k}: must be a multiple of {size}, the heads of a group"
            )),
            RouterKind::Static if top_k > 0 => refuse(format!(
                "routed_top_k{place} = {top_k}: must be 0, tokens of the router \"static\" compute \
                 the shared heads alone"
            )),
            _ if self.weighs() && top_k == 0 && shared.len() < heads => refuse(format!(
                "routed_top_k{place} = 0: the router \"{}\" weighs selected heads, at least one",
                self.name()
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use moh_kernels::router::SharedHeads;

    use super::*;

    #[test]
    fn every_name_is_that_of_one_router() {
        for router in RouterKind::ALL {
            assert_eq!(RouterKind::from_name(router.name()), Some(router));
        }
        assert_eq!(RouterKind::from_name("norm"), None);
        assert_eq!(RouterKind::TwoStage.name(), "two-stage");
    }

    #[test]
    fn counts_that_a_router_cannot_route_are_refused() {
        let groups = HeadGroups { heads: 8, kv_heads: 4 };
        let check = |router: RouterKind, shared: &[usize], top_k| {
            let shared = SharedHeads::from_heads(shared.iter().copied()).unwrap();
            let checked = router.check(LayerHeads { shared, top_k }, groups, " of layer 3");
            checked.map_err(|error| error.to_string())
        };
        use RouterKind::{Group, Linear, OneStage, QueryNorm, Static, TwoStage};
        for (router, shared, top_k) in [
            (Group, &[2, 3, 6, 7][..], 2),
            (Group, &[0, 1, 2, 3, 4, 5], 2),
            (Static, &[0, 5, 6, 7], 0),
            (Static, &[0, 1, 2, 3, 4, 5, 6], 0),
            (Linear, &[0, 1, 2, 3, 4, 5, 6], 0),
            (TwoStage, &[0, 1, 2, 3, 4, 5, 7], 1),
        ] {
            assert_eq!(check(router, shared, top_k), Ok(()), "{router:?}");
        }
        for (router, shared, top_k, expected) in [
            (Group, &[0, 1, 2][..], 2, "shared_heads# are no whole groups: the router \"group\""),
            (Group, &[0, 1], 3, "routed_top_k# = 3: must be a multiple of 2, the heads of a group"),
            (TwoStage, &[3], 0, "routed_top_k# = 0: the router \"two-stage\""),
            (OneStage, &[3], 0, "routed_top_k# = 0: the router \"one-stage\""),
            (Static, &[0], 1, "routed_top_k# = 1: must be 0, tokens of"),
            (QueryNorm, &[0, 1, 2, 3, 4, 5, 7], 1, "shared_heads# = 7 of 8 leaves one routed head"),
        ] {
            let expected = expected.replace('#', " of layer 3");
            let message = check(router, shared, top_k).unwrap_err();
            assert!(message.starts_with(&expected), "{message}");
        }
    }
}
