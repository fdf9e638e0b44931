//! The work of one rank in a stage: its parts of the model, their sizes and its micro-batches.
//! Traffic and time are computed from this alone.
//!
//! Sizes are per rank: heads are sharded by key/value groups, the MLP by columns and the vocabulary by rows. Norms are
//! replicated.

use moh_model::model_parallel::{ModelPart, TensorShare};
use moh_model::{AuxiliaryLosses, LayerHeads, ModelConfig, ModelLayout, MohConfig, SharedHeadSets};
use moh_recipe::{MohOptions, ParallelOptions, Recipe, Stage};
use moh_step::StepConfig;

/// The layout of a stage's ranks: tensor fastest, then data, pipeline slowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Tensor-parallel ranks.
    pub tensor: usize,
    /// Data-parallel ranks.
    pub data: usize,
    /// Pipeline stages.
    pub pipeline: usize,
    /// Chunks of the model on each pipeline stage.
    pub virtual_stages: usize,
}

impl Layout {
    /// A single rank.
    pub const ALONE: Layout = Layout { tensor: 1, data: 1, pipeline: 1, virtual_stages: 1 };

    /// Returns a recipe's parallelism on `ranks` ranks; `None` if `ranks` is not a multiple of it.
    pub fn new(parallel: ParallelOptions, ranks: usize) -> Option<Layout> {
        let ParallelOptions { tensor, pipeline, virtual_stages } = parallel;
        let data = parallel.data_ranks(ranks)?;
        Some(Layout { tensor, data, pipeline, virtual_stages })
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.tensor.saturating_mul(self.data).saturating_mul(self.pipeline)
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {} x {}", self.tensor, self.data, self.pipeline)
    }
}

/// A stage of a recipe with its layout.
pub(super) struct Work<'a> {
    pub recipe: &'a Recipe,
    pub stage: &'a Stage,
    /// The configuration with the stage's routing and the grown vocabulary.
    pub model: ModelConfig,
    /// The configuration of the stage's teacher. It has the model's shape, with the initial model's attention for
    /// `"start"`, and dense attention for another model.
    pub teacher: Option<ModelConfig>,
    pub layout: Layout,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Elements of the tensors, each on the rank with its largest share.
    pub elements: Elements,
    /// The chunks of the model, in order: rank s of the pipeline has chunks s, s + pipeline, and so
    /// on.
    parts: Vec<ModelPart>,
}

/// Elements of the tensors of a model, or of one tensor rank's share of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Elements {
    /// Elements of each block.
    pub blocks: Vec<BlockElements>,
    /// Elements of the embedding, and also of the output head.
    pub vocabulary: u128,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockElements {
    pub matrices: u128,
    pub norms: u128,
}

impl Elements {
    /// Returns the elements of the tensors of a model that `ranks` tensor ranks share, on the first rank, which has the
    /// largest share of each tensor.
    fn new(model: &ModelConfig, ranks: usize) -> Self {
        let tensor = TensorShare { rank: 0, ranks: ranks.max(1) };
        let layout =
            ModelLayout::of_part(model, 1, &ModelPart { tensor, ..ModelPart::whole(model) });
        let elements = |flat: usize, decays: bool| -> u128 {
            let segments = layout.flats[flat].segments.iter();
            let elements = segments.filter(|segment| segment.decays == decays);
            elements.map(|segment| segment.range.len() as u128).sum()
        };
        let block = |layer| {
            let flat = layout.block_index(layer);
            BlockElements { matrices: elements(flat, true), norms: elements(flat, false) }
        };
        Elements {
            blocks: (0..model.num_hidden_layers).map(block).collect(),
            vocabulary: elements(ModelLayout::EMBEDDING, true),
        }
    }
}

/// Returns the routing of a stage, as far as it is known. If a calibration chooses the shared heads, returns the last
/// heads, with the largest tables. If it also chooses their number, returns no shared heads.
fn largest_routing(
    recipe: &Recipe,
    stage: &Stage,
    model: &ModelConfig,
    moh: MohConfig,
) -> MohConfig {
    let index = recipe.stages.iter().position(|of| of.name == stage.name);
    let calibrated = index.and_then(|index| recipe.calibrated_stage(index));
    let calibration = calibrated.and_then(Stage::calibration);
    let Some(calibration) = calibration.filter(|of| of.chooses_heads()) else { return moh };
    let heads = model.num_attention_heads;
    // Shared and selected heads of a layer; a dense layer stays dense.
    let numbers = |layer| {
        let LayerHeads { shared, top_k } = moh.layer(layer);
        let keeps = !calibration.chooses_numbers() || !moh.router.selects();
        match keeps || shared.len() == heads {
            true => (shared.len(), top_k),
            false => (0, shared.len() + top_k),
        }
    };
    let numbers: Vec<(usize, usize)> = (0..model.num_hidden_layers).map(numbers).collect();
    let last: Vec<Vec<usize>> =
        numbers.iter().map(|&(shared, _)| (heads - shared..heads).collect()).collect();
    let Ok(shared_heads) = SharedHeadSets::from_ids(&last) else { return moh };
    let routed_top_k = numbers.iter().map(|&(_, top_k)| top_k).collect();
    let largest = MohConfig { shared_heads, routed_top_k, ..moh.clone() };
    if model.check_moh(&largest).is_ok() { largest } else { moh }
}

impl<'a> Work<'a> {
    /// Returns the work of `stage` on a model with its grown vocabulary.
    ///
    /// # Errors
    /// Fails if the layout has more chunks than the model has blocks.
    pub fn new(
        recipe: &'a Recipe,
        stage: &'a Stage,
        grown: &ModelConfig,
        layout: Layout,
    ) -> Result<Self, moh_model::Error> {
        let alone = Work::alone(recipe, stage, grown)?;
        let parts = layout.pipeline.saturating_mul(layout.virtual_stages);
        let parts = ModelPart::divide(&alone.model, parts, 1)?;
        let elements = Elements::new(&alone.model, layout.tensor);
        Ok(Work { layout, parts, elements, ..alone })
    }

    /// Returns the same work on a single rank.
    ///
    /// # Errors
    /// Fails if the stage's head counts do not fit the model.
    pub fn alone(
        recipe: &'a Recipe,
        stage: &'a Stage,
        grown: &ModelConfig,
    ) -> Result<Self, moh_model::Error> {
        let moh = stage.moh_config(grown)?.map(|moh| largest_routing(recipe, stage, grown, moh));
        let model = ModelConfig { moh, ..grown.clone() };
        let teacher = stage.distill.as_ref().map(|distill| {
            let moh = grown.moh.clone().filter(|_| distill.is_start());
            ModelConfig { moh, ..grown.clone() }
        });
        let parts = vec![ModelPart::whole(&model)];
        let (micro_batch, elements) = (stage.micro_batch, Elements::new(&model, 1));
        let layout = Layout::ALONE;
        Ok(Work { recipe, stage, model, teacher, layout, micro_batch, elements, parts })
    }

    /// Returns the chunks of rank `rank` of the pipeline.
    pub fn parts(&self, rank: usize) -> impl Iterator<Item = &ModelPart> {
        self.parts.iter().skip(rank).step_by(self.layout.pipeline.max(1))
    }

    pub fn sequence_length(&self) -> usize {
        self.recipe.stage_data(self.stage).sequence_length
    }

    pub fn tokens(&self) -> u128 {
        (self.sequence_length() as u128).saturating_mul(self.micro_batch as u128)
    }

    /// Returns the micro-batches of a step, over all ranks.
    pub fn micro_batches(&self) -> u64 {
        let sequences = self.recipe.batch_sequences(self.stage);
        sequences / (self.micro_batch as u64).max(1)
    }

    pub fn own_micro_batches(&self) -> u64 {
        self.micro_batches().div_ceil(self.layout.data as u64)
    }

    /// Returns a rank's share of a width of the model that tensor ranks divide.
    pub fn share(&self, width: usize) -> f64 {
        width.div_ceil(self.layout.tensor.max(1)) as f64
    }

    /// Returns the elements of all tensors of rank `rank` of the pipeline, with each flat buffer padded to a
    /// multiple of the data ranks.
    pub fn rank_elements(&self, rank: usize) -> u128 {
        self.parts(rank).map(|part| self.part_numbers(part)).sum()
    }

    fn part_numbers(&self, part: &ModelPart) -> u128 {
        let Elements { blocks, vocabulary } = &self.elements;
        let padded = |count: u128| count.next_multiple_of(self.layout.data.max(1) as u128);
        let tied = self.model.tie_word_embeddings;
        let embedding = part.first || part.last && tied;
        let head = part.last && !tied;
        let block = |layer: usize| padded(blocks[layer].matrices + blocks[layer].norms);
        part.layers().map(block).sum::<u128>()
            + (u128::from(embedding) + u128::from(head)) * padded(*vocabulary)
            + u128::from(part.last) * padded(self.model.hidden_size as u128)
    }

    /// Returns the number of flat buffers of rank `rank` of the pipeline: blocks, embedding, final norm and head.
    pub fn flat_buffers(&self, rank: usize) -> u64 {
        let flats = |part: &ModelPart| {
            let ends = u64::from(part.first) + 2 * u64::from(part.last);
            part.num_blocks() as u64 + ends
        };
        self.parts(rank).map(flats).sum()
    }
}

/// Returns the settings of the steps of `stage` of `recipe`.
pub fn step_config(recipe: &Recipe, stage: &Stage) -> StepConfig {
    let data = recipe.stage_data(stage);
    let tokens = stage.micro_batch * data.sequence_length;
    StepConfig {
        stage: stage.name.clone(),
        sequence_length: data.sequence_length,
        micro_batch: stage.micro_batch,
        micro_batches: stage.batch_tokens / tokens as u64,
        document_mask: data.document_mask,
        recompute: recipe.memory.recompute,
        auxiliary_weights: (stage.moh.as_ref())
            .map_or(AuxiliaryLosses::all(0.0), MohOptions::auxiliary_weights),
        distillation: stage.distillation(),
        optimizer: stage.optimizer,
        gradients: recipe.precision.gradients,
        reduce: recipe.precision.reduce,
    }
}

#[cfg(test)]
mod tests {
    use moh_model::Architecture;

    use super::*;
    use crate::tests::{llama3_8b, small};

    #[test]
    fn ranks_are_a_multiple_of_the_split() {
        let parallel = ParallelOptions { tensor: 2, pipeline: 4, virtual_stages: 1 };
        let layout = Layout::new(parallel, 64).unwrap();
        assert_eq!((layout.data, layout.ranks()), (8, 64));
        assert_eq!(Layout::new(parallel, 12), None);
        assert_eq!(Layout::new(parallel, 0), None);
        let huge = ParallelOptions { tensor: usize::MAX, pipeline: 2, virtual_stages: 1 };
        assert_eq!(Layout::new(huge, 8), None);
    }

    #[test]
    fn the_numbers_of_a_rank_are_those_that_a_model_allocates() {
        let (recipe, llama) = small(&[]);
        let sizes = [(1, 1), (3, 1), (2, 2), (7, 5)];
        let all = Architecture::ALL.into_iter().flat_map(|of| sizes.map(|sizes| (of, sizes)));
        for (architecture, (data, pipeline)) in all {
            let model = ModelConfig { architecture, ..llama.clone() };
            let layout = Layout { data, pipeline, ..Layout::ALONE };
            let work = Work::new(&recipe, &recipe.stages[1], &model, layout).unwrap();
            for (rank, part) in ModelPart::divide(&model, pipeline, 1).unwrap().iter().enumerate() {
                let allocated = ModelLayout::of_part(&model, data, part);
                assert_eq!(work.rank_elements(rank), allocated.len() as u128);
                let flats = allocated.flats.iter().filter(|flat| flat.len > 0).count();
                assert_eq!(work.flat_buffers(rank), flats as u64);
            }
        }
    }

    #[test]
    fn tensor_ranks_have_their_share_of_everything_but_the_norms() {
        let (recipe, model) = llama3_8b(&[]);
        let layout = Layout { tensor: 4, ..Layout::ALONE };
        let work = Work::new(&recipe, &recipe.stages[0], &model, layout).unwrap();
        // A block of LLaMA-3-8B has 4096 x (4096 + 2 x 1024 + 4096 + 3 x 14336) = 218,103,808 elements in
        // matrices and 8192 in norms; 160,896 rows of 4096 are 659,030,016.
        let block = BlockElements { matrices: 54_525_952, norms: 8192 };
        let expected = Elements { blocks: vec![block; 32], vocabulary: 164_757_504 };
        assert_eq!(work.elements, expected);
        let all = 32 * (54_525_952 + 8192) + 2 * 164_757_504 + 4096;
        assert_eq!(work.rank_elements(0), all);
    }
}
