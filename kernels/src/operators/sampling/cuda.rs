//! The choice of tokens on a GPU: one block per row.

use bytemuck::Zeroable;

use super::{
    LogProbabilities, LogitChange, RowChoice, RowRequest, RowToken, Sample, SampleArgs, check,
};
use crate::cuda::parameters::sampling::{Change, Parameters, Row};
use crate::cuda::{Cuda, name};
use crate::{Element, Result};

/// As the given token: the token must be chosen. As the chosen token: a logit of the row is not a number or is
/// infinity.
const NONE: u32 = u32::MAX;

impl Sample for Cuda {
    fn sample<T: Element>(&self, args: SampleArgs<'_, Self, T>) -> Result<Vec<Option<RowChoice>>> {
        let SampleArgs { vocabulary, known, logits, rows } = args;
        check(vocabulary, known, logits.len, rows)?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let (inputs, changes) = inputs(rows);
        let likeliest = rows.iter().filter_map(|row| row.log_probabilities).max().unwrap_or(0);
        let likeliest = likeliest.min(vocabulary);
        let mut chosen = vec![0u32; rows.len() * (2 + 2 * likeliest)];
        let areas = [
            rows.len() * vocabulary * size_of::<f32>(),
            size_of_val(&inputs[..]),
            size_of_val(&changes[..]),
            size_of_val(&chosen[..]),
        ];
        let scratch = self.scratch(areas.iter().sum())?;
        let [row_address, change_address, chosen_address] =
            [1, 2, 3].map(|area: usize| scratch + areas[..area].iter().sum::<usize>() as u64);
        self.device().upload(bytemuck::cast_slice(&inputs), row_address)?;
        if !changes.is_empty() {
            self.device().upload(bytemuck::cast_slice(&changes), change_address)?;
        }
        let parameters = Parameters {
            logits: logits.address,
            scratch,
            rows: row_address,
            changes: change_address,
            chosen: chosen_address,
            vocab_size: vocabulary as u64,
            known: known as u32,
            most_likely: likeliest as u32,
        };
        self.launch(&name::<T>("sample"), [rows.len(), 1], 0, &parameters)?;
        self.device().download(chosen_address, bytemuck::cast_slice_mut(&mut chosen))?;
        let chosen = chosen.chunks_exact(2 + 2 * likeliest);
        Ok(rows.iter().zip(chosen).map(|(row, words)| choice(row, words)).collect())
    }
}

/// Returns the kernel's inputs: the rows, and the changes of all rows.
fn inputs(rows: &[RowRequest]) -> (Vec<Row>, Vec<Change>) {
    let mut changes = Vec::new();
    let inputs = rows
        .iter()
        .map(|row| {
            let first_change = changes.len() as u32;
            let end_change = first_change;
            let mut input =
                Row { given: NONE, top_p: 1.0, first_change, end_change, ..Row::zeroed() };
            match &row.token {
                RowToken::Given(id) => input.given = *id,
                RowToken::Sampled(sampling) => {
                    changes.extend(sampling.changes.iter().map(Change::from));
                    input = Row {
                        inverse_temperature: sampling.inverse_temperature(),
                        min_p: sampling.min_p as f32,
                        top_p: sampling.top_p as f32,
                        random: sampling.random,
                        // A number above u32 exceeds every vocabulary, and 0 also keeps all tokens.
                        top_k: u32::try_from(sampling.top_k).unwrap_or(0),
                        end_change: changes.len() as u32,
                        ..input
                    };
                }
            }
            input
        })
        .collect();
    (inputs, changes)
}

impl From<&LogitChange> for Change {
    fn from(change: &LogitChange) -> Self {
        let LogitChange { token, bias, repetition, penalty } = *change;
        Change { token, bias, repetition, penalty }
    }
}

/// Returns the choice of a row from the kernel's output.
fn choice(row: &RowRequest, words: &[u32]) -> Option<RowChoice> {
    let [token, of_token, most_likely @ ..] = words else { return None };
    let value = |bits: u32| f64::from(f32::from_bits(bits));
    let log_probabilities = |count: usize| LogProbabilities {
        of_token: value(*of_token),
        most_likely: (most_likely.as_chunks::<2>().0.iter().take(count))
            .map(|&[id, bits]| (id, value(bits)))
            .collect(),
    };
    (*token != NONE).then(|| RowChoice {
        token: *token,
        log_probabilities: row.log_probabilities.map(log_probabilities),
    })
}
