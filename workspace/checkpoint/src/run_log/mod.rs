//! The records that a run writes: `metrics.jsonl` and `routing.jsonl`, TensorBoard's event files, timelines of steps,
//! `machine.json` and `summary.json`. Writers and readers get paths. The run directory chooses them.

mod calibration;
mod evaluation;
mod json_lines;
mod machine;
pub mod metrics;
mod part_times;
pub mod routing_log;
mod speed;
mod summary;
mod tensorboard;
mod trace;

pub use calibration::{CalibratedLayer, StageCalibration};
pub use evaluation::{EvaluatedText, Evaluation, EvaluationPoint, label};
pub use machine::Machine;
pub use metrics::{MetricsWriter, SkippedStep, StepMetrics, Validation};
pub use part_times::PartTimes;
pub use routing_log::{RoutingLine, RoutingMoment, RoutingOf, RoutingWriter};
pub use speed::Speed;
pub use summary::Summary;
pub use tensorboard::TensorBoard;
pub use trace::{StepTrace, TraceSteps};
