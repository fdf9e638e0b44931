//! Targets that a mask leaves out, on every layout of ranks.

use super::*;

/// Samples with some tokens that are not targets.
#[derive(Clone, Copy)]
struct Masked {
    /// Whether token `at` of the window of `sample` is trained on.
    trains: fn(sample: u64, at: u64) -> bool,
    has_mask: bool,
}

impl Masked {
    fn by(trains: fn(u64, u64) -> bool) -> Self {
        Self { trains, has_mask: true }
    }
}

impl ReadSample for Masked {
    fn read_sample(
        &self,
        number: u64,
        window: &mut [u32],
        document_start: Option<&mut [u32]>,
    ) -> Result<()> {
        read_tokens(number, window, document_start)
    }

    fn read_mask(&self, number: u64, mask: &mut [u8]) -> Result<bool> {
        for (at, byte) in (0..).zip(mask) {
            *byte = u8::from((self.trains)(number, at));
        }
        Ok(self.has_mask)
    }

    fn trained_targets(&self, samples: Range<u64>) -> Result<Option<u64>> {
        let targets = samples.flat_map(|sample| (1..=LENGTH as u64).map(move |at| (sample, at)));
        let count = targets.filter(|&(sample, at)| (self.trains)(sample, at)).count();
        Ok(self.has_mask.then_some(count as u64))
    }
}

impl Rank {
    fn masked_step(&mut self, read: Masked) -> StepResult {
        self.take(read, 0, Update { number: 1, learning_rate: 1e-2, limits: Limits::FINITE })
    }
}

const LAYOUTS: [(usize, usize, usize); 5] = [(1, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)];

fn on_layouts(work: impl Fn(&World, Ranks) + Sync) {
    for (data, tensor, pipeline) in LAYOUTS {
        for tied in [true, false] {
            let ranks = Ranks { data, tensor, pipeline, tied, reduce: ElementType::F32 };
            ranks.run(|world| work(world, ranks));
        }
    }
}

/// Selects whole sequences and parts of them, so that data ranks have different numbers of targets.
fn some(sample: u64, at: u64) -> bool {
    sample != 1 && !(sample * 5 + at * 3).is_multiple_of(4) && (sample != 2 || at > 6)
}

#[test]
fn a_mask_of_ones_changes_no_bit() {
    on_layouts(|world, ranks| {
        let [mut masked, mut plain] = [(); 2].map(|()| Rank::new(world, ElementType::F32, ranks));
        let found = masked.masked_step(Masked::by(|_, _| true));
        let expected = plain.masked_step(Masked { trains: |_, _| true, has_mask: false });
        assert_eq!(found.targets, Some(SEQUENCES * LENGTH as u64));
        assert_eq!(StepResult { targets: None, ..found }, expected, "{ranks:?}");
        assert!(masked.state() == plain.state(), "{ranks:?}");
    });
}

#[test]
fn the_loss_is_the_mean_over_the_targets_of_the_whole_step() {
    on_layouts(|world, ranks| {
        let step = |read| Rank::new(world, ElementType::F32, ranks).masked_step(read);
        let all = step(Masked { trains: |_, _| true, has_mask: false });
        let (these, others) =
            (step(Masked::by(some)), step(Masked::by(|sample, at| !some(sample, at))));
        let sum = |found: &StepResult| found.loss * found.targets.unwrap() as f64;
        let targets = (SEQUENCES * LENGTH as u64) as f64;
        let whole = (sum(&these) + sum(&others)) / targets;
        assert!((whole / all.loss - 1.0).abs() < 1e-12, "{ranks:?}: {whole} {}", all.loss);
        // The routers see all tokens.
        assert_eq!(these.auxiliary, all.auxiliary);
        assert_ne!(these.loss, others.loss);
    });
}

#[test]
fn every_layout_takes_the_same_step() {
    let results = |data, tensor, pipeline| {
        let ranks = Ranks { data, tensor, pipeline, tied: false, reduce: ElementType::F32 };
        let found = ranks
            .run(|world| Rank::new(world, ElementType::F32, ranks).masked_step(Masked::by(some)));
        assert!(found.iter().all(|result| *result == found[0]), "all ranks have the same sums");
        found[0]
    };
    let alone = results(1, 1, 1);
    for (data, tensor, pipeline) in LAYOUTS {
        let found = results(data, tensor, pipeline);
        assert_eq!(found.targets, alone.targets);
        // The sums are added in other orders.
        assert!((found.loss / alone.loss - 1.0).abs() < 1e-6, "{found:?}");
        assert!((found.grad_norm / alone.grad_norm - 1.0).abs() < 1e-5, "{found:?}");
    }
}

#[test]
fn a_step_without_a_target_is_not_applied() {
    on_layouts(|world, ranks| {
        let mut rank = Rank::new(world, ElementType::F32, ranks);
        let before = rank.state();
        let found = rank.masked_step(Masked::by(|_, _| false));
        assert_eq!((found.loss, found.targets), (0.0, Some(0)));
        assert_eq!(found.skipped, Some(SkipReason::NoTargets));
        assert!(rank.state() == before && found.grad_norm.is_finite(), "{ranks:?}");
    });
}
