//! What the calibration of a stage's conversion takes on the first rank (crate `moh-calibrate`), before the stage's first
//! step. The formulas are in `docs/plan.md`.

mod operations;

use moh_calibrate::{CalibrationBuffers, Division, Shared};
use moh_kernels::{CountedDevice, CountingMemory, Purpose};
use moh_model::layout::ModelLayout;
use moh_model::model_parallel::ModelPart;
use moh_model::{
    Activations, ModelBuffers, ModelConfig, MohConfig, PassSizes, RouterKind, Slots, block_alone,
    ends_alone, most_windows, pass_alone, windows_of_pass,
};
use moh_recipe::{CalibrationOptions, DeviceKind, SharedChoice};
use operations::{Choices, Operations, search_tokens};

use super::memory::fits_address_space;
use super::work::Work;
use crate::Error;

/// Operations a second of the fits on the host, in f64: assumed, of some 16 cores.
pub(crate) const HOST_FLOPS: f64 = 1e11;
/// Bytes of f32 and f64.
const F32: u64 = 4;
const F64: u64 = 8;

/// What crate `moh-calibrate` chooses for `moh.calibration.shared` of a stage that otherwise has the heads `moh`, in a
/// model of `layers` layers.
pub fn measured_heads(choice: SharedChoice, moh: &MohConfig, layers: usize) -> Shared {
    match choice {
        SharedChoice::Calibrated => Shared::Calibrated,
        SharedChoice::CalibratedNumber => Shared::CalibratedNumber,
        SharedChoice::CalibratedTotal => {
            Shared::CalibratedTotal((0..layers).map(|layer| moh.layer(layer).active()).sum())
        }
        SharedChoice::Given => Shared::Given,
    }
}

/// What a calibration takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CalibrationCost {
    /// Calibration tokens, in whole sequences.
    pub tokens: u64,
    /// Most operations of passes and of products over tokens, on the device.
    pub device_flops: f64,
    /// Most operations of fits, on the host.
    pub host_flops: f64,
    /// Memory of the device, beside the weights and the optimiser's state.
    pub device_bytes: u64,
    /// Memory of the host.
    pub host_bytes: u64,
    /// Bytes of the file with the output projections and the routers' matrices.
    pub file_bytes: u64,
}

impl CalibrationCost {
    /// Of the stage of `work`; `None` if it has no calibration.
    pub(super) fn new(work: &Work) -> Result<Option<Self>, Error> {
        let Some(calibration) = work.stage.calibration() else { return Ok(None) };
        // The heads as the stage gives them, before any are chosen.
        let dense = ModelConfig { moh: None, ..work.model.clone() };
        let Some(moh) = work.stage.moh_config(&dense)? else { return Ok(None) };
        let (length, model) = (work.sequence_length(), &work.model);
        let tokens = calibration.sequences(length).saturating_mul(length as u64);
        let shared = measured_heads(calibration.shared, &moh, model.num_hidden_layers);
        let division = division(work, shared, &moh, tokens);
        let choices = Choices { calibration, moh: &moh, shared, division: division.as_ref() };
        let Operations { device, host } = operations::of_calibration(work, &choices, tokens);
        let (n, m) = (model.query_width() as u64, model.hidden_size as u64);
        let streams = tokens.saturating_mul(3).saturating_add(division.map_or(0, |division| {
            // The dense one before the first layer, and those of all numbers.
            let layers = model.num_hidden_layers.saturating_mul(division.numbers.len());
            tokens.saturating_add(layers.saturating_mul(division.carried_tokens) as u64)
        }));
        Ok(Some(CalibrationCost {
            tokens,
            device_flops: device,
            host_flops: host,
            device_bytes: device_bytes(work, moh.router)?,
            host_bytes: host_bytes(tokens, streams, n, m),
            file_bytes: calibration_bytes(&calibration, &moh, model),
        }))
    }
}

/// Bytes of the file with the matrices that a calibration of a stage with the routing `moh` fits, but for its header.
pub fn calibration_bytes(
    calibration: &CalibrationOptions,
    moh: &MohConfig,
    model: &ModelConfig,
) -> u64 {
    let projections = if calibration.refit { model.query_width() } else { 0 };
    let routers = if moh.router.has_matrices() { model.num_attention_heads } else { 0 };
    let elements = ((projections + routers) as u64).saturating_mul(model.hidden_size as u64);
    elements.saturating_mul(model.num_hidden_layers as u64).saturating_mul(F32)
}

/// Memory of the host: residual streams, of so many tokens together; the sample of a search, twice while it is built; sums
/// and factors of a fit.
fn host_bytes(tokens: u64, streams: u64, n: u64, m: u64) -> u64 {
    let streams = streams.saturating_mul(m);
    let sample = search_tokens(tokens, n).saturating_mul(2 * n + m);
    let fit = (2 * n + 4 * m).saturating_mul(n * F64);
    streams.saturating_add(sample).saturating_mul(F32).saturating_add(fit)
}

/// What is measured of each layer, if active heads are divided among layers.
fn division(work: &Work, shared: Shared, moh: &MohConfig, tokens: u64) -> Option<Division> {
    let Shared::CalibratedTotal(total) = shared else { return None };
    let length = work.sequence_length();
    let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
    let pass = windows_of_pass(tokens / length.max(1), length).saturating_mul(length);
    Some(Division::new(&work.model, moh.router, total, tokens, pass))
}

/// Memory of the device: a block and the ends alone in f32, with their passes, and the sums of products.
fn device_bytes(work: &Work, router: RouterKind) -> Result<u64, Error> {
    if !fits_address_space(work) {
        return Ok(u64::MAX);
    }
    let memory = CountingMemory::new(match work.recipe.run.device {
        DeviceKind::Cpu => CountedDevice::Cpu,
        DeviceKind::Cuda => CountedDevice::Gpu,
    });
    let (model, length) = (&work.model, work.sequence_length());
    let pass = pass_alone(most_windows(length), length);
    for config in [&block_alone(model)?, &ends_alone(model)] {
        let layout = ModelLayout::new(config);
        ModelBuffers::<_, f32>::zeros(&memory, config, &layout, length)?;
        let part = ModelPart::whole(config);
        let sizes = PassSizes::new(config, &layout, &part, pass)?;
        Activations::<_, f32>::with_slots(&memory, &sizes, Slots::ONE)?;
    }
    CalibrationBuffers::new(&memory, model, router, pass.tokens())?;
    Ok(Purpose::ALL.map(|purpose| memory.bytes(purpose)).into_iter().fold(0, u64::saturating_add))
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use moh_calibrate::{CalibrationTokens, calibrate};
    use moh_kernels::Cpu;

    use super::*;
    use crate::tests::{llama3_8b, small};

    const CALIBRATION: &str = "stage.moh.moh.calibration={ tokens = 65536 }";

    #[track_caller]
    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
    }

    #[test]
    fn operations_are_passes_products_and_fits() {
        let (recipe, model) = llama3_8b(&[CALIBRATION]);
        let work = Work::alone(&recipe, &recipe.stages[1], &model).unwrap();
        let cost = CalibrationCost::new(&work).unwrap().unwrap();
        assert_eq!(cost.tokens, 65_536);
        // As in the tests of a step's time; 1 + 8 x 8 judgements by half of the tokens, 24 of 32 heads.
        let (c, q, kv, tokens): (f64, f64, f64, f64) = (4096.0, 4096.0, 1024.0, 65_536.0);
        let (block, core) = (2.0 * 218_103_808.0, 4.0 * 4096.5 * 4096.0);
        let (qkv, products) = (2.0 * c * (q + 2.0 * kv), 2.0 * q * (q + c));
        let passes = 3.0 * block + 3.5 * core + qkv + products;
        let judged = 256.0;
        let search = 0.5 * (qkv + block + 2.0 * core + 65.0 * 2.0 * q * (q + judged));
        let head = 6.0 * 160_896.0 * c;
        close(cost.device_flops, tokens * (32.0 * (passes + search) + head));
        let fit = q * q * q / 3.0 + 6.0 * c * q * q;
        let judgement = q * q * q / 3.0 + 3.0 * judged * q * q;
        close(cost.host_flops, 32.0 * (65.0 * judgement + fit + 2.0 * c * q * q));
        assert_eq!(cost.file_bytes, 32 * 4096 * 4096 * 4);
        let streams = 3 * 65_536 * 4096 * 4;
        assert!(cost.host_bytes > streams && cost.host_bytes < 2 * streams, "{cost:?}");
        // With the given heads nothing is searched; without a fit nothing is refitted.
        let given = "stage.moh.moh.calibration={ tokens = 65536, shared = \"given\" }";
        let (recipe, model) = llama3_8b(&[given]);
        let work = Work::alone(&recipe, &recipe.stages[1], &model).unwrap();
        let cost = CalibrationCost::new(&work).unwrap().unwrap();
        close(cost.device_flops, tokens * (32.0 * passes + head));
        close(cost.host_flops, 32.0 * (fit + 2.0 * c * q * q));
        let dense = Work::alone(&recipe, &recipe.stages[0], &model).unwrap();
        assert_eq!(CalibrationCost::new(&dense).unwrap(), None);
        // 1 set of no heads; of 6, 12, 16 and 18 one each, and the exchanges of the best.
        let number = "stage.moh.moh.calibration={ tokens = 65536, shared = \"calibrated-number\" }";
        let (recipe, model) = llama3_8b(&[number]);
        let work = Work::alone(&recipe, &recipe.stages[1], &model).unwrap();
        let cost = CalibrationCost::new(&work).unwrap().unwrap();
        close(cost.host_flops, 32.0 * (69.0 * judgement + fit + 2.0 * c * q * q));
        let number_bytes = cost.host_bytes;
        let routing = work.model.moh.as_ref().unwrap().layer(0);
        assert_eq!((routing.shared.len(), routing.top_k), (0, 24));
        // Active heads that are divided among layers: 9 numbers of each, the even conversion and the best one.
        let total = "stage.moh.moh.calibration={ tokens = 65536, shared = \"calibrated-total\" }";
        let (recipe, model) = llama3_8b(&[total]);
        let work = Work::alone(&recipe, &recipe.stages[1], &model).unwrap();
        let cost = CalibrationCost::new(&work).unwrap().unwrap();
        let fits = |active: usize| {
            let router = RouterKind::QueryNorm;
            moh_calibrate::most_fits(&model, router, Shared::CalibratedTotal(768), None, active)
        };
        // One set of no heads and one head; 0 to 3 of 4: 1 + 32 + an exchange of 2 and of 3, and so on.
        assert_eq!((fits(1), fits(4)), (1, 1 + 32 + 2 + 24));
        let of_numbers = [1, 4, 8, 12, 16, 20, 24, 28].map(fits);
        let all: usize = of_numbers.iter().sum();
        let refit = fit + 2.0 * c * q * q;
        // Numbers that are not measured are searched for in each of three conversions.
        let others = 3 * of_numbers.into_iter().max().unwrap();
        close(cost.host_flops, 32.0 * ((all + others) as f64 * judgement + (3.0 + 9.0) * refit));
        // 288 streams of a sequence have more than 1 GiB, and one of all tokens is the dense model's.
        assert_eq!(cost.host_bytes, number_bytes + (288 * 8192 + 65_536) * 4096 * 4);
        // A learned router alone.
        let learned = "stage.moh.moh={ router = \"linear\", shared_heads = 16, routed_top_k = 8, \
                       calibration = { tokens = 65536, shared = \"given\", refit = false } }";
        let (recipe, model) = llama3_8b(&[learned]);
        let learned = Work::alone(&recipe, &recipe.stages[1], &model).unwrap();
        let cost = CalibrationCost::new(&learned).unwrap().unwrap();
        let router = 2.0 * qkv + core + 2.0 * c * (c + 32.0);
        // The block has the router's matrix too.
        let passes = passes + 3.0 * 2.0 * 32.0 * c + router;
        close(cost.device_flops, tokens * (32.0 * passes + head));
        let rows = tokens * 2.0 * q * c + c * c * c / 3.0 + 6.0 * 32.0 * c * c;
        close(cost.host_flops, 32.0 * (rows + 2.0 * c * q * q));
        assert_eq!(cost.file_bytes, 32 * 32 * 4096 * 4);
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
            let tokens = CalibrationTokens::new(vec![1; 4096], 32, &dense).unwrap();
            let moh = work.model.moh.clone().unwrap();
            let shared = Shared::Calibrated;
            let options =
                moh_calibrate::CalibrationOptions { moh, shared, refit: true, stored: None };
            let (before, mut allocated) = (Cpu.allocated(), 0);
            let found = calibrate::<Cpu, moh_calibrate::Error>(
                &Cpu,
                &dense,
                &options,
                &tokens,
                &mut |_, _| Ok(()),
                &mut |_, _| Ok(()),
                &mut |_, _| {
                    allocated = Cpu.allocated() - before;
                    ControlFlow::Break(())
                },
            );
            assert_eq!(found.unwrap(), None);
            // But for the sums of a step.
            assert!(cost.device_bytes.abs_diff(allocated) < 4096, "{router}: {cost:?} {allocated}");
        }
    }
}
