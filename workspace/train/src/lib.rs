//! The training loop: the inputs of a run, starting and resuming it, saving, export, comparisons and replays.

mod calibration;
pub mod comparison;
mod disk_space;
mod error;
mod event;
mod export;
pub mod model_card;
mod open_device;
mod replay;
mod run;
mod run_data;
mod run_inputs;
mod source;
mod step_speed;
mod teacher;
mod time_limit;
mod trainer;

pub use calibration::{LayerLog, calibrated_layer, calibration_identity};
pub use comparison::{Comparison, Variant};
pub use disk_space::{FreeSpace, free_space};
pub use error::{Error, Result};
pub use event::{Event, Outcome};
pub use open_device::{connect, open_device, share_text};
pub use replay::{Replay, SampleSource, replay, replay_from};
pub use run::{RunOptions, first_that_keeps_model, run};
pub use source::{ModelSource, parts_identity};
pub use time_limit::TimeLimit;
