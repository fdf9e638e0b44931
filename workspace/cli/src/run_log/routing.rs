//! The evaluations of `routing.jsonl` that a page shows: of each validation set the newest one, and those before
//! training and after conversions. A run writes one every few minutes for weeks.

use std::collections::BTreeMap;
use std::path::Path;

use moh_train::routing_log::{self, RoutingLine, RoutingMoment};

use crate::chart::printable;

/// Maximum heads of all layers of an evaluation, several times those of the largest models.
const MAX_HEADS: usize = 1 << 16;

/// How one validation set uses the heads.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingEvaluation {
    /// The set.
    pub set: String,
    /// Steps done, over all stages.
    pub step: u64,
    /// What the evaluation follows.
    pub moment: RoutingMoment,
    /// The layers that route.
    pub layers: BTreeMap<usize, RoutingLine>,
    /// Heads of these layers.
    heads: usize,
}

impl RoutingEvaluation {
    fn new(line: &RoutingLine) -> Self {
        let (set, layers) = (printable(&line.validation), BTreeMap::new());
        RoutingEvaluation { set, step: line.step, moment: line.moment, layers, heads: 0 }
    }

    /// Adds a layer, unless the layers would have more heads than a map can show.
    fn add(&mut self, line: RoutingLine) -> Result<(), String> {
        let heads = line.shared_heads.saturating_add(line.selected.len());
        self.heads = self.heads.saturating_add(heads);
        if line.layer >= MAX_HEADS || self.heads > MAX_HEADS {
            return Err(format!(
                "layer {} with {} shared and {} routed heads: more than {MAX_HEADS} layers or heads of a model: \
                 move the file away, and run the command again",
                line.layer,
                line.shared_heads,
                line.selected.len()
            ));
        }
        self.layers.insert(line.layer, line);
        Ok(())
    }
}

/// Reads the evaluations in the order of the run.
///
/// # Errors
/// Fails if the file cannot be read, if a line is not in its format, or has more heads than any model.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<RoutingEvaluation>> {
    let mut kept: Vec<RoutingEvaluation> = Vec::new();
    routing_log::for_each(path, |line| {
        let set = printable(&line.validation);
        let newest = kept.iter().rposition(|known| known.set == set);
        let at = match newest {
            Some(at) if (kept[at].step, kept[at].moment) == (line.step, line.moment) => at,
            Some(at) if kept[at].moment == RoutingMoment::Step => {
                kept[at] = RoutingEvaluation::new(&line);
                at
            }
            _ => {
                kept.push(RoutingEvaluation::new(&line));
                kept.len() - 1
            }
        };
        kept[at].add(line)
    })?;
    // Stable, so that a conversion stays after the step that it follows.
    kept.sort_by_key(|evaluation| evaluation.step);
    Ok(kept)
}
