//! The cost of a stage's calibration on the first rank (crate `moh-calibrate`), before the stage's first step. The
//! formulas are in `docs/plan.md`.

use moh_calibrate::{CalibrationBuffers, CalibrationPasses, MOST_FITS, judged_outputs};
use moh_kernels::{ElementType, Purpose};
use moh_model::model_parallel::ModelPart;
use moh_model::{
    Activations, ModelBuffers, ModelConfig, ModelLayout, PassSizes, RouterKind, Slots, block_alone,
    ends_alone, pass_alone,
};
use moh_recipe::CalibrationOptions;

use super::memory::{counting, fits_address_space};
use super::work::Work;
use crate::Error;

/// Bytes of f32 and f64.
const F32: u64 = 4;
const F64: u64 = 8;

/// The cost of a calibration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CalibrationCost {
    /// Calibration tokens, in whole sequences.
    pub tokens: u64,
    /// FLOPs of the dense and the converted model's passes, and of the sums of products, without the fits.
    pub flops: f64,
    /// Memory of the device, besides the weights and the optimiser's state.
    pub device_bytes: u64,
    /// Memory of the host.
    pub host_bytes: u64,
}

impl CalibrationCost {
    /// Computes the cost for the stage of `work`, or `None` if the stage has no calibration.
    pub(super) fn new(work: &Work) -> Result<Option<Self>, Error> {
        let Some(calibration) = work.stage.calibration() else { return Ok(None) };
        // The heads as the stage gives them, before any are chosen.
        let dense = ModelConfig { moh: None, ..work.model.clone() };
        let Some(moh) = work.stage.moh_config(&dense)? else { return Ok(None) };
        let model = &work.model;
        let passes = passes(work, &calibration);
        let tokens = passes.tokens() as u64;
        let (n, m) = (model.query_width() as u64, model.hidden_size as u64);
        let streams = tokens.saturating_mul(2);
        let searched = passes.searched(calibration.search_tokens, model.query_width()) as u64;
        let sets = if calibration.chooses_heads() { MOST_FITS as u64 } else { 0 };
        let forward = dense.flops_per_token(work.sequence_length()).forward();
        let products = |tokens: u64, outputs: u64| {
            let layers = model.num_hidden_layers as f64;
            2.0 * layers * tokens as f64 * n as f64 * (n + outputs) as f64
        };
        let flops = 2.0 * tokens as f64 * forward
            + products(tokens, m)
            + products(searched.saturating_mul(sets), judged_outputs(m as usize) as u64);
        Ok(Some(CalibrationCost {
            tokens,
            flops,
            device_bytes: device_bytes(work, moh.router, &passes)?,
            host_bytes: host_bytes([tokens, streams, searched], n, m),
        }))
    }
}

fn passes(work: &Work, calibration: &CalibrationOptions) -> CalibrationPasses {
    let length = work.sequence_length();
    let sequences = usize::try_from(calibration.sequences(length)).unwrap_or(usize::MAX);
    CalibrationPasses::new(sequences, length.max(1))
}

/// Returns the memory of the host: the heads' outputs of `tokens`, the residual streams of `streams`, the sample of a
/// search, and the sums and factors of a fit. The sample is there twice while it is built.
fn host_bytes([tokens, streams, searched]: [u64; 3], n: u64, m: u64) -> u64 {
    let outputs = tokens.saturating_mul(n).saturating_add(streams.saturating_mul(m));
    let sample = searched.saturating_mul(2 * n + m);
    let fit = (6 * n + 6 * m).saturating_mul(n * F64);
    outputs.saturating_add(sample).saturating_mul(F32).saturating_add(fit)
}

/// Returns the memory of the device: a block and the ends alone in f32, with their passes, and the sums of products.
fn device_bytes(work: &Work, router: RouterKind, passes: &CalibrationPasses) -> Result<u64, Error> {
    if !fits_address_space(work) {
        return Ok(u64::MAX);
    }
    let memory = counting(work);
    let (model, length) = (&work.model, work.sequence_length());
    let pass = pass_alone(passes.shape().0, length);
    for config in [&block_alone(model)?, &ends_alone(model)] {
        let layout = ModelLayout::new(config);
        let element = ElementType::F32;
        ModelBuffers::zeros(&memory, element, config, &layout, length)?;
        let part = ModelPart::whole(config);
        let sizes = PassSizes::new(config, &layout, &part, pass, element)?;
        Activations::with_slots(&memory, &sizes, Slots::ONE)?;
    }
    CalibrationBuffers::new(&memory, model, router, pass.tokens())?;
    Ok(Purpose::ALL.map(|purpose| memory.bytes(purpose)).into_iter().fold(0, u64::saturating_add))
}

#[cfg(test)]
mod tests {
    use moh_calibrate::{CalibrationTokens, FoundLayer, LayerStore, Watch, calibrate};
    use moh_kernels::Cpu;
    use moh_model::SharedChoice;

    use super::*;
    use crate::tests::{llama3_8b, small};

    struct Nothing;

    impl LayerStore<moh_calibrate::Error> for Nothing {
        fn known(&mut self, _: usize) -> moh_calibrate::Result<Option<FoundLayer>> {
            Ok(None)
        }

        fn keep(&mut self, _: FoundLayer) -> moh_calibrate::Result<()> {
            Ok(())
        }
    }

    const CALIBRATION: &str = "stage.moh.moh.calibration={ tokens = 65536 }";

    fn cost(calibration: &str) -> CalibrationCost {
        let (recipe, model) = llama3_8b(&[calibration]);
        let work = Work::alone(&recipe, &recipe.stages[1], &model).unwrap();
        CalibrationCost::new(&work).unwrap().unwrap()
    }

    #[test]
    fn the_host_holds_streams_a_sample_and_a_fit() {
        let given = cost(CALIBRATION);
        assert_eq!(given.tokens, 65_536);
        let (streams, sample) = (3 * 65_536 * 4096, 8192 * (2 * 4096 + 4096));
        assert_eq!(given.host_bytes, (streams + sample) * 4 + 12 * 4096 * 4096 * 8);
        let (recipe, model) = llama3_8b(&[CALIBRATION]);
        let dense = Work::alone(&recipe, &recipe.stages[0], &model).unwrap();
        assert_eq!(CalibrationCost::new(&dense).unwrap(), None);
        // Where the number of shared heads is chosen, the router's tables have all heads.
        let number = "stage.moh.moh.calibration={ tokens = 65536, shared = \"calibrated-number\" }";
        let (recipe, model) = llama3_8b(&[number]);
        let work = Work::alone(&recipe, &recipe.stages[1], &model).unwrap();
        let routing = work.model.moh.as_ref().unwrap().layer(0);
        assert_eq!((routing.shared.len(), routing.top_k), (0, 24));
        assert_eq!(cost(number).host_bytes, given.host_bytes);
    }

    #[test]
    fn the_memory_of_the_device_is_what_a_calibration_allocates() {
        for (router, heads) in [
            ("query-norm", "shared_heads = 4, routed_top_k = 2"),
            ("static", "shared_heads = 6, routed_top_k = 0"),
            ("two-stage", "shared_heads = 4, routed_top_k = 2"),
        ] {
            let moh = format!(
                "stage.moh.moh={{ router = \"{router}\", {heads}, calibration = {{ tokens = 4096 }} }}"
            );
            let (recipe, model) = small(&[&moh]);
            let work = Work::alone(&recipe, &recipe.stages[1], &model).unwrap();
            let cost = CalibrationCost::new(&work).unwrap().unwrap();
            let dense = ModelConfig { moh: None, ..model };
            let tokens = CalibrationTokens::new(vec![1; 4096], 32, 4096, &dense).unwrap();
            let moh = work.model.moh.clone().unwrap();
            let shared = SharedChoice::Calibrated;
            let options =
                moh_calibrate::CalibrationOptions { moh, shared, refit: true, stored: None };
            let (before, mut allocated) = (Cpu.allocated(), 0);
            let found = calibrate::<Cpu, moh_calibrate::Error>(
                &Cpu,
                &dense,
                &options,
                &tokens,
                &mut |_, _| Ok(()),
                &mut Nothing,
                Watch {
                    progress: &mut |_, _| allocated = Cpu.allocated() - before,
                    is_stopped: &|| true,
                },
            );
            assert_eq!(found.unwrap(), None);
            // Except the sums of a step.
            assert!(cost.device_bytes.abs_diff(allocated) < 4096, "{router}: {cost:?} {allocated}");
        }
    }
}
