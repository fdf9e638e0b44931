//! The rates of steps: model FLOP/s, and their share of the device's peak rate.

use moh_checkpoint::run_log::Speed;
use moh_kernels::open_device::ResidentMemory;
use moh_kernels::{Backend, ElementType};
use moh_model::ModelConfig;
use moh_recipe::{Recipe, Stage};

/// Peak rates of dense bf16 matrix products in TFLOP/s, from NVIDIA's data sheets, rounded as in torchtitan. The first
/// entry with all its words in the device's name counts.
const PEAKS: [(&[&str], f64); 8] = [
    (&["GB200"], 2500.0),
    (&["B200"], 2250.0),
    (&["H200", "NVL"], 835.0),
    (&["H200"], 989.0),
    (&["H100", "NVL"], 835.0),
    (&["H100", "PCIe"], 756.0),
    (&["H100"], 989.0),
    (&["A100"], 312.0),
];

/// The numbers from which the rates of a stage's steps are computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    /// Model FLOPs of a step on each rank.
    flops: f64,
    /// Peak TFLOP/s of a rank's device.
    peak: Option<f64>,
}

impl Rates {
    /// Returns the rates of the steps of `stage` on `ranks` ranks. `model` has the stage's attention. A teacher's
    /// forward pass counts.
    pub(crate) fn new<B: Backend>(
        recipe: &Recipe,
        stage: &Stage,
        model: &ModelConfig,
        teacher: Option<&ModelConfig>,
        backend: &B,
        ranks: usize,
    ) -> Self {
        let length = recipe.stage_data(stage).sequence_length;
        let teacher = teacher.map_or(0.0, |teacher| teacher.flops_per_token(length).forward());
        let per_token = model.flops_per_token(length).training() + teacher;
        let device = || peak_tflops(&backend.name(), recipe.run.dtype);
        Rates {
            flops: per_token * stage.batch_tokens as f64 / ranks as f64,
            peak: recipe.log.peak_tflops.or_else(device),
        }
    }

    pub(crate) fn speed<B: Backend>(&self, backend: &B, times: Speed) -> Speed {
        let tflops = self.flops / times.seconds.max(1e-9) / 1e12;
        let memory = ResidentMemory::read();
        Speed {
            tflops,
            mfu: self.peak.map(|peak| tflops / peak),
            resident_bytes: memory.map(|memory| memory.now),
            peak_resident_bytes: memory.map(|memory| memory.peak),
            device_bytes: backend.memory_info().map(|memory| memory.used),
            ..times
        }
    }
}

/// Returns the peak rate of a device for products in `dtype`; `None` if it is not known.
fn peak_tflops(device: &str, dtype: ElementType) -> Option<f64> {
    let known = PEAKS.iter().find(|(words, _)| words.iter().all(|word| device.contains(word)));
    known.filter(|_| dtype == ElementType::BF16).map(|(_, peak)| *peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_those_of_the_devices_name_in_bf16() {
        for (device, peak) in [
            ("NVIDIA H100 80GB HBM3", Some(989.0)),
            ("NVIDIA H100 PCIe", Some(756.0)),
            ("NVIDIA H200", Some(989.0)),
            ("NVIDIA A100-SXM4-80GB", Some(312.0)),
            ("NVIDIA B200", Some(2250.0)),
            ("NVIDIA GB200", Some(2500.0)),
            ("AMD EPYC", None),
        ] {
            assert_eq!(peak_tflops(device, ElementType::BF16), peak, "{device}");
            assert_eq!(peak_tflops(device, ElementType::F32), None);
        }
    }

    #[test]
    fn the_rate_is_that_of_one_rank() {
        let times = Speed { seconds: 2.0, forward: 1.25, ..Speed::default() };
        let rates = Rates { flops: 3e12, peak: Some(2.0) };
        let speed = rates.speed(&moh_kernels::Cpu, times);
        assert_eq!((speed.seconds, speed.tflops, speed.mfu), (2.0, 1.5, Some(0.75)));
        assert_eq!(speed.forward, 1.25);
        let unknown = Rates { peak: None, ..rates }.speed(&moh_kernels::Cpu, times);
        assert_eq!(unknown.mfu, None);
        if cfg!(target_os = "linux") {
            assert!(speed.resident_bytes.unwrap() > 0);
            assert!(speed.peak_resident_bytes >= speed.resident_bytes);
        }
    }
}
