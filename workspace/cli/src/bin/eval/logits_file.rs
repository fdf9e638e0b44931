//! Reads token ids as JSON, and writes logits as safetensors, for comparison with other implementations.

use std::borrow::Cow;
use std::path::Path;

use moh_model::ModelOutput;
use safetensors::tensor::{Dtype, TensorView};

use moh_files::FileError;

/// Maximum bytes of a list of ids, which a single pass computes.
const MAX_FILE_BYTES: u64 = 1 << 28;

/// Reads a JSON list of equally long lists of ids. Fails if the file has other contents, or a sequence is longer than
/// `positions`.
pub(crate) fn read_ids(path: &Path, positions: usize) -> Result<Vec<Vec<u32>>, FileError> {
    let io = |source| moh_files::io(path)(source);
    let refuse = |reason: String| Err(moh_files::unusable(path, reason));
    let bytes = std::fs::metadata(path).map_err(io)?.len();
    if bytes > MAX_FILE_BYTES {
        return refuse(format!("{bytes} bytes are too many ids for one pass: give fewer"));
    }
    let ids: Vec<Vec<u32>> = match serde_json::from_slice(&std::fs::read(path).map_err(io)?) {
        Ok(ids) => ids,
        Err(error) => {
            return refuse(format!("not a list of lists of token ids, [[1, 2], [3, 4]]: {error}"));
        }
    };
    let length = ids.first().map_or(0, Vec::len);
    if length == 0 {
        return refuse("contains no ids".into());
    }
    if let Some(row) = ids.iter().position(|row| row.len() != length) {
        return refuse(format!(
            "list {row} has {} ids, but list 0 has {length}: give lists of equal length",
            ids[row].len()
        ));
    }
    if length > positions {
        return refuse(format!(
            "{length} ids exceed the model's {positions} positions: shorten the lists"
        ));
    }
    Ok(ids)
}

/// Writes `logits` f32 and, for a Mixture-of-Head model, the heads that tokens selected, u8. They are in `routed_mask`
/// or, if layers differ, in `routed_mask.N` of each layer N that routes. Fails if the file cannot be written, and then
/// leaves no partial file.
pub(crate) fn write_logits(output: &ModelOutput, path: &Path) -> Result<(), FileError> {
    let io = |source| moh_files::io(path)(source);
    let refuse = |error: safetensors::SafeTensorError| moh_files::unusable(path, error.to_string());
    let bytes: Vec<u8> = output.logits.iter().flat_map(|value| value.to_le_bytes()).collect();
    let shape = vec![output.batch, output.length, output.vocab_size];
    let logits = TensorView::new(Dtype::F32, shape, &bytes).map_err(refuse)?;
    let mut tensors = vec![("logits".to_owned(), logits)];
    let masks = masks(output);
    for (name, shape, mask) in &masks {
        let mask = TensorView::new(Dtype::U8, shape.clone(), mask).map_err(refuse)?;
        tensors.push((name.clone(), mask));
    }
    let serialized = safetensors::serialize(tensors, None).map_err(refuse)?;
    moh_files::write(path, &serialized).map_err(io)
}

/// Returns names, shapes and contents of the tables of selected heads. If all layers route equally many heads, it is
/// `routed_mask`, `[layers, batch, length, routed heads]`. Otherwise it is `routed_mask.N`,
/// `[batch, length, routed heads]`, of each layer N that routes.
fn masks(output: &ModelOutput) -> Vec<(String, Vec<usize>, Cow<'_, [u8]>)> {
    let rows = output.batch * output.length;
    let layers = output.routed_mask.iter().enumerate();
    let of_each: Vec<_> = layers
        .filter(|(_, mask)| !mask.is_empty())
        .map(|(layer, mask)| {
            let shape = vec![output.batch, output.length, mask.len() / rows];
            (format!("routed_mask.{layer}"), shape, Cow::from(mask))
        })
        .collect();
    let all = output.routed_mask.len();
    match of_each.first() {
        Some((_, first, _)) if of_each.iter().filter(|mask| mask.1 == *first).count() == all => {
            let shape = [&[all], first.as_slice()].concat();
            vec![("routed_mask".to_owned(), shape, output.routed_mask.concat().into())]
        }
        _ => of_each,
    }
}
