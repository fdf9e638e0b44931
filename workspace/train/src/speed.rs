//! Times, rates and memory of a step. None of them is reproducible, so `metrics.jsonl` has them in an
//! object of their own.

use moh_device::ResidentMemory;
use moh_kernels::{Backend, ElementType};
use moh_model::ModelConfig;
use moh_recipe::{Recipe, Stage};
use serde::{Deserialize, Serialize};

/// Peak rates of dense bf16 matrix products in TFLOP/s, from NVIDIA's data sheets, rounded as in
/// torchtitan. The first whose words are all in the device's name counts.
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

/// Times, rates and memory of a step on the first rank. Times are the host's: on a GPU, which the
/// host does not wait for in the passes, `gradient_norm` has what the device took longer.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// Seconds of the step, without evaluation and checkpoint.
    pub seconds: f64,
    /// Seconds of reading samples and copying them to the device.
    pub data: f64,
    /// Seconds of forward passes, without exchange.
    pub forward: f64,
    /// Seconds of backward passes, without exchange.
    pub backward: f64,
    /// Seconds of starting collectives and messages, and of waiting for them.
    pub exchange: f64,
    /// Seconds until the host knows the gradient norm, norms by block and the losses, without
    /// exchange.
    pub gradient_norm: f64,
    /// Seconds of clipping and AdamW, without exchange.
    pub optimizer: f64,
    /// Seconds of the evaluations after the step.
    pub evaluation: f64,
    /// Seconds of the checkpoint after the step before this one.
    pub checkpoint: f64,
    /// Model FLOP/s of a rank, in units of 10^12.
    pub tflops: f64,
    /// The model FLOPs utilization: `tflops` divided by the device's peak rate, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Resident memory of the process, if the system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
    /// The maximum of `resident_bytes` so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_resident_bytes: Option<u64>,
    /// Memory in use on the device, of all processes, if it has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<u64>,
}

impl Speed {
    /// The seconds of each part of the step, by name.
    pub(crate) fn parts(&self) -> [(&'static str, f64); 8] {
        [
            ("data", self.data),
            ("forward", self.forward),
            ("backward", self.backward),
            ("exchange", self.exchange),
            ("gradient_norm", self.gradient_norm),
            ("optimizer", self.optimizer),
            ("evaluation", self.evaluation),
            ("checkpoint", self.checkpoint),
        ]
    }
}

/// What the rates of a stage's steps follow from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    /// Model FLOPs of a step on each rank.
    flops: f64,
    /// Peak TFLOP/s of a rank's device.
    peak: Option<f64>,
}

impl Rates {
    /// The rates of the steps of `stage`, whose attention `model` has, on `ranks` ranks.
    pub(crate) fn new<B: Backend>(
        recipe: &Recipe,
        stage: &Stage,
        model: &ModelConfig,
        (backend, ranks): (&B, usize),
    ) -> Self {
        let per_token = model.flops_per_token(recipe.data.sequence_length).training();
        let device = || peak_tflops(&backend.name(), recipe.run.dtype);
        Rates {
            flops: per_token * stage.batch_tokens as f64 / ranks as f64,
            peak: recipe.log.peak_tflops.or_else(device),
        }
    }

    /// The speed of a step with these times.
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

/// The peak rate of a device for products in `dtype`; `None` if it is not known.
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
