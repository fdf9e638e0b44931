//! The embedding against its reference: a gather, and a scatter-add into a gradient that is not
//! zero.

use crate::reference::{
    Random, added, assert_close, backward, cases, download, flat, garbage, gradient, operators,
    tensor, tolerance, upload, var,
};
use half::bf16;
use moh_kernels::embedding::{Embedding, EmbeddingBackward, EmbeddingForward};
use moh_kernels::ranks::VocabularyRows;
use moh_kernels::{Backend, Cpu, Element};

/// Returns the rows of some ids in a part of a table, and `before` with the gradient of that part added to the same
/// part.
pub(crate) fn run<B: Backend, T: Element, G: Element>(
    device: &B,
    rows: VocabularyRows,
    ids: &[u32],
    table: &[T],
    d_out: &[T],
    before: &[G],
) -> (Vec<T>, Vec<G>) {
    let width = d_out.len() / ids.len();
    let part = rows.first * width..(rows.first + rows.count) * width;
    let (ids, table) = (upload(device, ids), upload(device, &table[part.clone()]));
    let (ids, mut out) = (B::whole(&ids), garbage::<B, T>(device, d_out.len()));
    let (table, out_view) = (B::whole(&table), B::whole_mut(&mut out));
    let args = EmbeddingForward { width, rows, ids, table, out: out_view };
    device.embedding_forward::<T>(args).unwrap();
    let (d_out, mut d_table) = (upload(device, d_out), upload(device, &before[part]));
    let (d_out, d_table_view) = (B::whole(&d_out), B::whole_mut(&mut d_table));
    let args = EmbeddingBackward { width, rows, ids, d_out, d_table: d_table_view };
    device.embedding_backward::<T, G>(args).unwrap();
    (download::<B, T>(device, &out), download::<B, G>(device, &d_table))
}

fn agrees<B: Backend, T: Element, G: Element>(device: &B, rows: usize, width: usize, ids: &[u32]) {
    let mut random = Random(1);
    let table: Vec<T> = random.elements(rows * width);
    let d_out: Vec<T> = random.elements(ids.len() * width);
    let before: Vec<G> = random.elements(rows * width);
    let (out, d_table) = run(device, VocabularyRows::all(rows), ids, &table, &d_out, &before);

    let table = var(&table, (rows, width));
    let expected = operators::embedding(&table, ids).unwrap();
    let gradients = backward(&expected, &tensor(&d_out, (ids.len(), width)));
    assert_close("embedding", &out, &flat(&expected), 0.0);
    let expected = added(&before, &gradient(&gradients, &table));
    assert_close("d_table", &d_table, &expected, tolerance::<G>());
}

#[test]
fn rows_are_gathered_and_gradients_accumulate() {
    let mut random = Random(2);
    let ids: Vec<u32> = (0..61).map(|_| random.below(37) as u32).collect();
    on_each_device!(device, T => agrees::<_, T, f32>(device, 37, 24, &ids));
    on_each_device!(device => agrees::<_, bf16, bf16>(device, 37, 24, &ids));
}

#[test]
fn an_id_without_a_row_is_refused() {
    let (width, rows, ids) = (2, VocabularyRows::all(3), &[0, 3]);
    let (table, mut out) = ([0f32; 6], [0f32; 4]);
    let args = EmbeddingForward::<Cpu, f32> { width, rows, ids, table: &table, out: &mut out };
    let refused = Cpu.embedding_forward(args);
    assert_eq!(refused.unwrap_err().to_string(), "token id 3 is outside the vocabulary of 3");
    let mut d_table = [0f32; 6];
    let args = EmbeddingBackward::<Cpu, f32, f32> {
        width,
        rows,
        ids,
        d_out: &[0f32; 4],
        d_table: &mut d_table,
    };
    let refused = Cpu.embedding_backward(args);
    assert_eq!(refused.unwrap_err().to_string(), "token id 3 is outside the vocabulary of 3");
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_shape_agrees(rows in 1usize..20, width in 1usize..40, count in 1usize..40, seed: u64) {
        let mut random = Random(seed);
        let ids: Vec<u32> = (0..count).map(|_| random.below(rows) as u32).collect();
        on_each_device!(device => agrees::<_, f32, f32>(device, rows, width, &ids));
    }
}
