//! Loads a checkpoint's tensors into a model and its optimiser. Each data rank reads its shard, and the ranks
//! then exchange the weights, so that together they read every shard once.

use moh_comm::Group;
use moh_kernels::Backend;
use moh_model::{Model, Segment};
use moh_step::OptimizerState;

use crate::{ReadError, Result, StoredCheckpoint, TensorRequest};

/// Fills this rank's shard of the model's weights and the optimiser's state. The tensors named in `added` are not
/// in the checkpoint and start as zeros.
pub fn load<B: Backend + Clone>(
    stored: &StoredCheckpoint,
    model: &mut Model<B>,
    optimizer: &mut OptimizerState<B>,
    added: &[String],
) -> Result<(), ReadError> {
    optimizer.fill(model, |kind, segment: &Segment, range, values: &mut [f32]| {
        if added.contains(&segment.name) {
            values.fill(0.0);
            return Ok(());
        }
        let wanted = TensorRequest { name: &segment.name, slice: &segment.slice, range };
        stored.read(kind, &wanted, values)
    })
}

/// Completes the weights of each data rank from the shards of the others.
pub fn gather_weights<B: Backend>(model: &mut Model<B>, data: &Group) -> Result<()> {
    if data.size() == 1 {
        return Ok(());
    }
    for flat in 0..model.layout().flats.len() {
        let weights = model.weights_mut();
        if !weights.flat(flat).is_empty() {
            let gathered = data.start_all_gather(weights.take(flat))?;
            weights.put(flat, gathered.wait()?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use moh_kernels::{AnyBuffer, Cpu, ElementType};
    use moh_model::{ModelConfig, ModelParallel, Shard};
    use moh_recipe::CheckpointOptions;
    use moh_step::TensorKind;
    use serde_json::Map;

    use super::super::{RunState, Snapshot, begin, prune, publish, write_part};
    use super::*;
    use crate::{Error, RunDirectory};
    use moh_testkit::tiny_model;

    const RANKS: usize = 4;

    fn config() -> ModelConfig {
        tiny_model(1, 22, false)
    }

    /// Returns zeros for the part of a rank that shares the optimiser's state with `ranks - 1` other ranks.
    fn part(rank: usize, ranks: usize) -> (Model<Cpu>, OptimizerState<Cpu>) {
        let parallel = ModelParallel::whole(&config());
        let f32 = ElementType::F32;
        let model = Model::zeros_of_part(Cpu, f32, config(), 8, parallel, ranks).unwrap();
        let optimizer = OptimizerState::new(&model, f32, Shard { rank, size: ranks }).unwrap();
        (model, optimizer)
    }

    /// Returns a value for every element of each kind of a tensor.
    fn value(kind: TensorKind, name: &str, at: usize) -> f32 {
        (name.len() * 1000 + at * 4 + kind as usize) as f32
    }

    fn write_on(ranks: usize, run: &RunDirectory) {
        std::fs::create_dir_all(run.root()).unwrap();
        let pending = begin(run, 5).unwrap();
        let parts = (0..ranks).map(|rank| {
            let (mut model, mut optimizer) = part(rank, ranks);
            optimizer
                .fill(&mut model, |kind, segment, range, values| {
                    for (i, out) in range.zip(values) {
                        *out = value(kind, &segment.name, i);
                    }
                    Ok::<(), moh_model::Error>(())
                })
                .unwrap();
            let f32 = ElementType::F32;
            let mut snapshot = Snapshot::new(model.layout(), optimizer.shard(), f32, f32).unwrap();
            snapshot.copy(&model, &optimizer).unwrap();
            write_part(run, 5, rank, ranks, &snapshot).unwrap()
        });
        let parts: Vec<_> = parts.collect();
        let state = RunState { step: 5, ..RunState::default() };
        publish(run, pending, state, Map::new(), &parts).unwrap();
    }

    fn floats(buffer: &AnyBuffer<Cpu>) -> &[f32] {
        buffer.whole().typed()
    }

    fn check(run: &RunDirectory, rank: usize, ranks: usize) {
        let stored = StoredCheckpoint::of_step(run, 5).unwrap();
        let stored = stored.read_by(Shard { rank, size: ranks });
        let (mut model, mut optimizer) = part(rank, ranks);
        load(&stored, &mut model, &mut optimizer, &[]).map_err(Error::from).unwrap();
        for (flat, segment) in model.layout().segments() {
            let range = Shard { rank, size: ranks }.range(model.layout().flats[flat].len);
            let local = moh_model::parameters::overlap(&segment.range, &range);
            for i in local {
                let expect = |kind| value(kind, &segment.name, i - segment.range.start);
                let moment = i - range.start;
                assert_eq!(floats(model.weights().flat(flat))[i], expect(TensorKind::Weight));
                let first = floats(optimizer.first_moment.flat(flat))[moment];
                assert_eq!(first, expect(TensorKind::FirstMoment), "{} {i}", segment.name);
                let second = floats(optimizer.second_moment.flat(flat))[moment];
                assert_eq!(second, expect(TensorKind::SecondMoment), "{} {i}", segment.name);
            }
        }
    }

    #[test]
    fn any_number_of_ranks_loads_what_any_number_has_written() {
        let dir = tempfile::tempdir().unwrap();
        for written in [1, 3, RANKS] {
            let run = RunDirectory::new(dir.path().join(written.to_string()));
            write_on(written, &run);
            for ranks in [1, 2, 3, RANKS, 7] {
                (0..ranks).for_each(|rank| check(&run, rank, ranks));
            }
            prune(&run, &CheckpointOptions::default()).unwrap();
            assert_eq!(run.checkpoint_steps().unwrap(), [5]);
        }
    }

    #[test]
    fn a_rank_opens_the_files_that_it_needs_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(dir.path());
        write_on(RANKS, &run);
        let files: Vec<_> = std::fs::read_dir(run.checkpoint(5)).unwrap().flatten().collect();
        for file in files {
            let name = file.file_name().into_string().unwrap();
            if name.contains("-of-") && !name.contains("-00002-of-") {
                std::fs::remove_file(file.path()).unwrap();
            }
        }
        check(&run, 1, RANKS);
        let stored = StoredCheckpoint::of_step(&run, 5).unwrap();
        let (mut model, mut optimizer) = part(2, RANKS);
        let missing = load(&stored, &mut model, &mut optimizer, &[]).unwrap_err();
        assert!(matches!(missing, ReadError::Missing(_)), "{missing:?}");
    }
}
