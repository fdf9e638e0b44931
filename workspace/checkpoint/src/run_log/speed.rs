//! Times, rates and memory of a step. They are not reproducible, so `metrics.jsonl` has them in an
//! object of their own.

use serde::{Deserialize, Serialize};

/// Times, rates and memory of a step on the first rank. Times are the host's. The host does not wait for
/// a GPU in the passes, so `gradient_norm` includes the time by which the GPU is behind.
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
    /// Seconds of the checkpoint after the previous step.
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
    /// Memory in use on the device, of all processes, if the device has its own memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<u64>,
}

impl Speed {
    /// Returns the seconds of each part of the step, by name.
    pub fn parts(&self) -> [(&'static str, f64); 8] {
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
