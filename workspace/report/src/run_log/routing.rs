//! The evaluations of `routing.jsonl` that a page shows in full: of each validation set the newest one, and those
//! before training and after conversions. A run writes one every few minutes for weeks, and what a page shows of the
//! others is in [`RoutingHistory`].

use std::collections::BTreeMap;
use std::path::Path;

use moh_checkpoint::run_log::{RoutingLine, RoutingMoment};

use super::lines::{self, LeftOut};
use super::routing_history::RoutingHistory;
use crate::chart::printable;

/// Maximum heads of all layers of an evaluation, several times those of the largest models.
const MAX_HEADS: usize = 1 << 16;

/// How one validation set uses the heads.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingEvaluation {
    pub set: String,
    pub step: u64,
    pub moment: RoutingMoment,
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
    /// By set; more lines of them may come.
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

    /// All evaluations, of which the newest are complete now.
    fn finish(mut self) -> (Vec<RoutingEvaluation>, Vec<RoutingHistory>) {
        for (set, newest) in self.newest {
            RoutingHistory::of_set(&mut self.histories, &set, |history| history.finish(&newest));
            self.kept.push(newest);
        }
        // Stable, so that a conversion stays after the step that it follows.
        self.kept.sort_by_key(|evaluation| evaluation.step);
        (self.kept, self.histories)
    }
}

/// Reads the evaluations in the order of the run, and how each set's use of the heads changed. Lines that are not in
/// the format, or have more heads than any model, are left out.
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
