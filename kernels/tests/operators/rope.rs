//! Rotary position embedding against its reference, without a router: forward and gradient, from
//! a first position other than 0.

use crate::reference::operators::Packed;
use crate::reference::{
    Random, assert_close, backward, cases, download, flat, gradient, rope_tables, tensor,
    tolerance, upload, var, view, view_mut,
};
use half::bf16;
use moh_kernels::rope::{QkvShape, RopeTable};
use moh_kernels::{Backend, Element};

fn agrees<B: Backend, T: Element>(device: &B, shape: QkvShape, first_position: usize, seed: u64) {
    let mut random = Random(seed);
    let qkv: Vec<T> = random.numbers(shape.tokens() * shape.row());
    let d_qkv: Vec<T> = random.numbers(qkv.len());
    let positions = first_position + shape.length + 3;
    let (cos, sin) = rope_tables(positions, shape.head_dim);

    let (cos_buffer, sin_buffer) = (upload(device, &cos), upload(device, &sin));
    let table = RopeTable { cos: view::<B, f32>(&cos_buffer), sin: view::<B, f32>(&sin_buffer) };
    let (mut rotated, mut d_rotated) = (upload(device, &qkv), upload(device, &d_qkv));
    let rotated_view = view_mut::<B, T>(&mut rotated);
    device.rope_route_forward(&shape, table, first_position, rotated_view, None, None).unwrap();
    let (qkv_view, d_view) = (view::<B, T>(&rotated), view_mut::<B, T>(&mut d_rotated));
    device.rope_route_backward(&shape, table, first_position, qkv_view, d_view, None).unwrap();

    let packed = Packed::new(&shape);
    let qkv = var(&qkv, packed.dims());
    let table = packed.table(&cos, &sin, first_position);
    let expected = packed.rotate(&qkv, &table).unwrap();
    let gradients = backward(&expected, &tensor(&d_qkv, packed.dims()));
    let rotated = download::<B, T>(device, &rotated);
    assert_close("rotated", &rotated, &flat(&expected), tolerance::<T>());
    let d_rotated = download::<B, T>(device, &d_rotated);
    assert_close("d_qkv", &d_rotated, &gradient(&gradients, &qkv), tolerance::<T>());
}

#[test]
fn queries_and_keys_turn_and_values_stay() {
    let shape = QkvShape { batch: 2, length: 37, heads: 6, kv_heads: 2, head_dim: 16 };
    on_each_device!(device => agrees::<_, f32>(device, shape, 5, 1));
    on_each_device!(device => agrees::<_, bf16>(device, shape, 5, 1));
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_even_head_dim_agrees(
        batch in 1usize..3,
        length in 1usize..40,
        kv_heads in 1usize..4,
        group in 1usize..4,
        half in 1usize..=128,
        first_position in 0usize..9,
        seed: u64,
    ) {
        let heads = kv_heads * group;
        let shape = QkvShape { batch, length, heads, kv_heads, head_dim: 2 * half };
        on_each_device!(device => agrees::<_, f32>(device, shape, first_position, seed));
        on_each_device!(device => agrees::<_, bf16>(device, shape, first_position, seed));
    }
}
