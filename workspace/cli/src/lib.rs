//! Parts of the programs here: commands to paste, the model of a run, the view of a run, the tables of a replayed step,
//! signals and time limits.

pub mod command_line;
pub mod model_location;
pub mod replay_table;
pub mod run_view;
pub mod signals;
pub mod time_limit;
