//! The evaluations of `routing.jsonl` that a page shows in full: the newest of each validation set, and evaluations
//! before training and after conversions. A run writes an evaluation every few minutes for weeks. [`RoutingHistory`]
//! has the shown values of all evaluations.

use std::collections::BTreeMap;
use std::path::Path;

use moh_checkpoint::run_log::{RoutingLine, RoutingMoment};

use super::lines::{self, LeftOut};
use super::routing_history::RoutingHistory;
use crate::chart::printable;

/// The most heads of all layers of an evaluation: several times the heads of the largest models.
const MAX_HEADS: usize = 1 << 16;

/// The use of heads on a validation set.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingEvaluation {
    pub set: String,
    pub step: u64,
    pub moment: RoutingMoment,
    pub layers: BTreeMap<usize, RoutingLine>,
    /// The number of heads of these layers.
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
                "layer {} with {} shared and {} routed heads: more than {MAX_HEADS} layers or heads of a model",
                line.layer,
                line.shared_heads,
                line.selected.len()
            ));
        }
        self.layers.insert(line.layer, line);
        Ok(())
    }
}

#[derive(Default)]
struct Evaluations {
    kept: Vec<RoutingEvaluation>,
    /// The newest evaluation of each set, which may get more lines.
    newest: BTreeMap<String, RoutingEvaluation>,
    histories: Vec<RoutingHistory>,
}

impl Evaluations {
    fn add(&mut self, line: RoutingLine) -> Result<(), String> {
        let mut begun = RoutingEvaluation::new(&line);
        let set = begun.set.clone();
        if let Some(known) = self.newest.get_mut(&set)
            && (known.step, known.moment) == (line.step, line.moment)
        {
            return known.add(line);
        }
        begun.add(line)?;
        if let Some(complete) = self.newest.insert(set.clone(), begun) {
            RoutingHistory::of_set(&mut self.histories, &set, |history| history.add(&complete));
            self.kept.extend((complete.moment != RoutingMoment::Step).then_some(complete));
        }
        Ok(())
    }

    /// Returns all evaluations, including the newest, which are now complete.
    fn finish(mut self) -> (Vec<RoutingEvaluation>, Vec<RoutingHistory>) {
        for (set, newest) in self.newest {
            RoutingHistory::of_set(&mut self.histories, &set, |history| history.finish(&newest));
            self.kept.push(newest);
        }
        // The sort is stable, so that a conversion stays after the step that it follows.
        self.kept.sort_by_key(|evaluation| evaluation.step);
        (self.kept, self.histories)
    }
}

/// Reads the evaluations in the order of the run, and each set's history. Lines that are not in the format, or have
/// more heads than any model, are omitted.
pub(super) fn read(
    path: &Path,
    left_out: &mut Vec<LeftOut>,
) -> anyhow::Result<(Vec<RoutingEvaluation>, Vec<RoutingHistory>)> {
    let mut evaluations = Evaluations::default();
    lines::for_each(path, left_out, |_, text| {
        evaluations.add(serde_json::from_slice(text).map_err(lines::reason)?)
    })?;
    Ok(evaluations.finish())
}
