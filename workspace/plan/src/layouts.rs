//! Suggested layouts: every layout of a number of ranks that fits in memory with 8% free, fastest first.

use moh_model::ModelConfig;
use moh_recipe::{Recipe, Stage};

use super::cluster::{ClusterStage, PredictedSpeed};
use super::hardware::Hardware;
use super::work::{Layout, Work};
use super::{DiskBytes, grow_vocabulary};

const SHOWN: usize = 5;
/// Maximum micro-batch: matmuls do not get faster beyond this.
const MAX_SEQUENCES: u64 = 64;
/// Maximum chunks of a pipeline: no model has as many blocks.
const MAX_PARTS: usize = 256;

/// The fastest layouts of each stage of a recipe.
#[derive(Debug, Clone, PartialEq)]
pub struct Suggestions {
    /// Number of ranks.
    pub ranks: usize,
    /// The hardware profile.
    pub hardware: Hardware,
    /// The stages, in order.
    pub stages: Vec<StageSuggestions>,
}

/// The fastest layouts of one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageSuggestions {
    /// The stage's name.
    pub stage: String,
    pub considered: usize,
    /// Number of layouts that fit in memory and leave 8% of it free.
    pub fitting: usize,
    /// The least memory of any layout, in bytes.
    pub least_bytes: Option<u64>,
    /// The fastest layouts that fit, fastest first.
    pub best: Vec<Suggestion>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Suggestion {
    pub layout: Layout,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Memory of the rank that needs most, in bytes.
    pub bytes: u64,
    pub speed: PredictedSpeed,
}

impl Suggestion {
    /// Returns the overrides that select this layout for a recipe's stage.
    pub fn overrides(&self, stage: &str) -> String {
        let Layout { tensor, pipeline, virtual_stages, .. } = self.layout;
        format!(
            "--set stage.{stage}.parallel.tensor={tensor} \
             --set stage.{stage}.parallel.pipeline={pipeline} \
             --set stage.{stage}.parallel.virtual_stages={virtual_stages} \
             --set stage.{stage}.micro_batch={}",
            self.micro_batch
        )
    }
}

impl Suggestions {
    /// Finds the fastest layouts of `ranks` ranks of a machine for each stage of `recipe` on
    /// `model`, given before its vocabulary grows.
    pub fn new(recipe: &Recipe, model: &ModelConfig, ranks: usize, hardware: Hardware) -> Self {
        let model = grow_vocabulary(recipe, model);
        let checkpoint = DiskBytes::new(recipe, &model).checkpoint;
        let checkpoint = hardware.checkpoint_seconds(checkpoint, ranks);
        let of_stage = |stage| suggest(recipe, stage, &model, ranks, &hardware, checkpoint);
        let stages = recipe.stages.iter().map(of_stage).collect();
        Suggestions { ranks, stages, hardware }
    }
}

fn suggest(
    recipe: &Recipe,
    stage: &Stage,
    model: &ModelConfig,
    ranks: usize,
    hardware: &Hardware,
    checkpoint: Option<f64>,
) -> StageSuggestions {
    let mut found = Vec::new();
    let (mut considered, mut least_bytes) = (0, None::<u64>);
    for layout in layouts(model, ranks, hardware) {
        let Ok(mut work) = Work::new(recipe, stage, model, layout) else { continue };
        for micro_batch in micro_batches(recipe, stage) {
            work.micro_batch = micro_batch;
            if !serves(&work) {
                continue;
            }
            let Ok(cluster) = ClusterStage::new(&work, Some(hardware), checkpoint) else {
                continue;
            };
            considered += 1;
            let bytes = cluster.memory.total();
            least_bytes = Some(least_bytes.map_or(bytes, |least| least.min(bytes)));
            if let Some(speed) = cluster.speed.filter(|_| bytes <= hardware.suggested_bytes()) {
                found.push(Suggestion { layout, micro_batch, bytes, speed });
            }
        }
    }
    // A stable sort: equal layouts stay in order, the simplest first.
    found.sort_by(|a, b| a.speed.step.total().total_cmp(&b.speed.step.total()));
    let fitting = found.len();
    found.truncate(SHOWN);
    StageSuggestions { stage: stage.name.clone(), considered, fitting, least_bytes, best: found }
}

/// Returns all layouts of `ranks` ranks. Tensor ranks divide the key/value heads and stay within a node, and every
/// chunk of a pipeline has at least one block.
fn layouts(model: &ModelConfig, ranks: usize, hardware: &Hardware) -> Vec<Layout> {
    let (groups, blocks) = (model.num_key_value_heads, model.num_hidden_layers);
    let most = blocks.min(MAX_PARTS);
    let mut layouts = Vec::new();
    for tensor in (1..=groups.min(hardware.node.ranks)).filter(|&tensor| {
        [groups, hardware.node.ranks, ranks].iter().all(|count| count.is_multiple_of(tensor))
    }) {
        let copies = ranks / tensor;
        for pipeline in (1..=most).filter(|&pipeline| copies.is_multiple_of(pipeline)) {
            let data = copies / pipeline;
            let most_virtual = if pipeline == 1 { 1 } else { most / pipeline };
            layouts.extend((1..=most_virtual).map(|virtual_stages| Layout {
                tensor,
                data,
                pipeline,
                virtual_stages,
            }));
        }
    }
    layouts.retain(|layout| layout.data > 0);
    layouts
}

/// Returns the micro-batch sizes that divide the step.
fn micro_batches(recipe: &Recipe, stage: &Stage) -> impl Iterator<Item = usize> {
    let sequences = recipe.batch_sequences(stage);
    let divides = move |&count: &u64| sequences.is_multiple_of(count);
    // At most 64, so the conversion is exact.
    (1..=MAX_SEQUENCES.min(sequences)).filter(divides).map(|count| count as usize)
}

/// Returns whether every data rank has a micro-batch, and at least as many as an interleaved pipeline has stages: with
/// fewer, the stages would wait.
fn serves(work: &Work) -> bool {
    let (micro_batches, data) = (work.micro_batches(), work.layout.data as u64);
    let fewest = micro_batches / data.max(1);
    let fills = fewest >= work.layout.pipeline as u64;
    data <= micro_batches && (work.layout.virtual_stages == 1 || fills)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::tests::h100;
    use crate::tests::{llama3_8b, small};

    #[test]
    fn the_8b_recipe_gets_layouts_that_fit_and_use_the_machine() {
        let (recipe, model) = llama3_8b(&[]);
        for ranks in [8, 64, 1024] {
            let found = Suggestions::new(&recipe, &model, ranks, h100());
            for stage in &found.stages {
                assert_eq!(stage.best.len(), SHOWN, "{ranks}");
                assert!(stage.fitting <= stage.considered);
                let times = stage.best.iter().map(|best| best.speed.step.total());
                assert!(times.is_sorted());
                let Suggestion { layout, bytes, speed, .. } = &stage.best[0];
                assert_eq!(layout.ranks(), ranks);
                // 8% of the device's memory stay free.
                let memory = h100().device.memory_bytes as f64;
                assert!(*bytes as f64 <= 0.92 * memory, "{bytes}");
                // One model of 8 billion parameters needs few ranks, and leaves most to the data.
                assert!(layout.tensor * layout.pipeline <= 8, "{layout:?}");
                assert!(speed.matmul_share > 0.6 && speed.matmul_share < 1.0, "{speed:?}");
            }
        }
    }

    #[test]
    fn a_model_that_fits_nowhere_has_no_suggestion() {
        let (recipe, model) = llama3_8b(&[]);
        let found = Suggestions::new(&recipe, &model, 1, h100());
        let stage = &found.stages[0];
        assert_eq!((stage.fitting, stage.best.len()), (0, 0));
        assert!(stage.considered > 0 && stage.least_bytes.unwrap() > h100().usable_bytes());
    }

    #[test]
    fn layouts_keep_to_the_rules() {
        let (_, model) = small(&[]);
        // 4 key/value heads and 5 blocks: no more than 4 tensor ranks, pipelines of 1, 2, 3 and 4.
        for layout in layouts(&model, 48, &h100()) {
            let Layout { tensor, data, pipeline, virtual_stages } = layout;
            assert_eq!(tensor * data * pipeline, 48);
            assert!([1, 2, 4].contains(&tensor) && pipeline * virtual_stages <= 5);
            assert!(virtual_stages == 1 || pipeline > 1);
        }
        assert_eq!(layouts(&model, 7, &h100()), [Layout { data: 7, ..Layout::ALONE }]);
        assert!(layouts(&model, usize::MAX, &h100()).iter().all(|layout| layout.data > 0));
        assert_eq!(layouts(&model, 0, &h100()), []);
    }

    #[test]
    fn overrides_are_those_of_a_recipe() {
        let (recipe, model) = llama3_8b(&[]);
        let found = Suggestions::new(&recipe, &model, 64, h100());
        for stage in &found.stages {
            for best in &stage.best {
                let text = best.overrides(&stage.stage);
                let overrides: Vec<&str> = text.split("--set ").map(str::trim).skip(1).collect();
                let (changed, _) = llama3_8b(&overrides);
                let changed = changed.stages.iter().find(|s| s.name == stage.stage).unwrap();
                assert_eq!(Layout::new(changed.parallel, 64), Some(best.layout));
                assert_eq!(changed.micro_batch, best.micro_batch);
            }
        }
    }
}
