//! The embedding against its reference: a gather, and a scatter-add into a gradient that already
//! holds something.

use crate::reference::{
    Random, added, assert_close, backward, cases, download, garbage, gradient, operators, tensor,
    tolerance, upload, var, view, view_mut,
};
use half::bf16;
use moh_kernels::ranks::VocabularyRows;
use moh_kernels::{Backend, Element, Error};

fn agrees<B: Backend, T: Element, G: Element>(device: &B, rows: usize, width: usize, ids: &[u32]) {
    let mut random = Random(1);
    let table: Vec<T> = random.numbers(rows * width);
    let d_out: Vec<T> = random.numbers(ids.len() * width);
    let before: Vec<G> = random.numbers(rows * width);
    let id_buffer = upload(device, ids);

    let mut out = garbage::<B, T>(device, ids.len() * width);
    let table_buffer = upload(device, &table);
    let (id_view, table_view) = (view::<B, _>(&id_buffer), view::<B, _>(&table_buffer));
    let held = VocabularyRows::all(rows);
    let out_view = view_mut::<B, T>(&mut out);
    device.embedding_forward(width, held, id_view, table_view, out_view).unwrap();
    let mut d_table = upload(device, &before);
    let d_out_buffer = upload(device, &d_out);
    let d_out_view = view::<B, T>(&d_out_buffer);
    let d_table_view = view_mut::<B, G>(&mut d_table);
    device.embedding_backward(width, held, id_view, d_out_view, d_table_view).unwrap();

    let table = var(&table, (rows, width));
    let expected = operators::embedding(&table, ids).unwrap();
    let gradients = backward(&expected, &tensor(&d_out, (ids.len(), width)));
    assert_close(
        "embedding",
        &download::<B, T>(device, &out),
        &crate::reference::flat(&expected),
        0.0,
    );
    let d_table = download::<B, G>(device, &d_table);
    let expected = added(&before, &gradient(&gradients, &table));
    assert_close("d_table", &d_table, &expected, tolerance::<G>());
}

#[test]
fn rows_are_gathered_and_gradients_added_to_what_is_there() {
    let mut random = Random(2);
    let ids: Vec<u32> = (0..61).map(|_| random.below(37) as u32).collect();
    on_each_device!(device => agrees::<_, f32, f32>(device, 37, 24, &ids));
    on_each_device!(device => agrees::<_, bf16, f32>(device, 37, 24, &ids));
    on_each_device!(device => agrees::<_, bf16, bf16>(device, 37, 24, &ids));
}

#[test]
fn an_id_without_a_row_is_refused() {
    let (table, mut out) = ([0f32; 6], [0f32; 4]);
    let refused =
        moh_kernels::Cpu.embedding_forward(2, VocabularyRows::all(3), &[0, 3], &table, &mut out);
    assert_eq!(refused, Err(Error::Vocabulary { id: 3, vocab_size: 3 }));
    let mut d_table = [0f32; 6];
    let refused = moh_kernels::Cpu.embedding_backward(
        2,
        VocabularyRows::all(3),
        &[0, 3],
        &[0f32; 4],
        &mut d_table,
    );
    assert_eq!(refused, Err(Error::Vocabulary { id: 3, vocab_size: 3 }));
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
