//! Rotary position embedding against its reference, forward and gradient, from a first position other
//! than 0.

use crate::reference::operators::Packed;
use crate::reference::{
    Random, assert_close, backward, cases, download, flat, gradient, qkv_shapes, rope_tables,
    tensor, tolerance, upload, var,
};
use moh_kernels::rope::{QkvShape, RopeArgs, RopeTable};
use moh_kernels::{Backend, Element};

fn agrees<B: Backend, T: Element>(device: &B, shape: QkvShape, first_position: usize, seed: u64) {
    let mut random = Random(seed);
    let qkv: Vec<T> = random.elements(shape.tokens() * shape.row());
    let d_qkv: Vec<T> = random.elements(qkv.len());
    let positions = first_position + shape.length + 3;
    let (cos, sin) = rope_tables(positions, shape.head_dim);

    let (cos_buffer, sin_buffer) = (upload(device, &cos), upload(device, &sin));
    let table =
        RopeTable { cos: B::whole(&cos_buffer), sin: B::whole(&sin_buffer), first_position };
    let (mut rotated, mut d_rotated) = (upload(device, &qkv), upload(device, &d_qkv));
    let args = RopeArgs { shape: &shape, table, qkv: B::whole_mut::<T>(&mut rotated) };
    device.rope_forward(args).unwrap();
    let args = RopeArgs { shape: &shape, table, qkv: B::whole_mut::<T>(&mut d_rotated) };
    device.rope_backward(args).unwrap();

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
    on_each_device!(device, T => agrees::<_, T>(device, shape, 5, 1));
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_even_head_dim_agrees(
        shape in qkv_shapes(1usize..3, 1usize..40, 1usize..4, 1usize..129),
        first_position in 0usize..9,
        seed: u64,
    ) {
        on_each_device!(device, T => agrees::<_, T>(device, shape, first_position, seed));
    }
}
