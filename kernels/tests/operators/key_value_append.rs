//! Appending to the cache: keys and values are written to their rows, and no other row changes.

use crate::reference::{Random, cases, columns, download, qkv_shapes, upload};
use moh_kernels::key_value_cache::{KeyValueAppend, KeyValueCache};
use moh_kernels::rope::QkvShape;
use moh_kernels::{Backend, Cpu};

fn appends<B: Backend>(device: &B, shape: QkvShape, first_position: usize, seed: u64) {
    let (mut random, width) = (Random(seed), shape.kv_heads * shape.head_dim);
    let qkv: Vec<f32> = random.elements(shape.length * shape.row());
    let before: Vec<f32> = random.elements((first_position + shape.length + 2) * width);
    let qkv_buffer = upload(device, &qkv);
    let (mut keys, mut values) = (upload(device, &before), upload(device, &before));
    let append = KeyValueAppend {
        shape: &shape,
        first_position,
        qkv: B::whole(&qkv_buffer),
        keys: B::whole_mut(&mut keys),
        values: B::whole_mut(&mut values),
    };
    device.key_value_append(append).unwrap();
    let first = shape.heads * shape.head_dim;
    for (what, cache, start) in [("keys", keys, first), ("values", values, first + width)] {
        let mut expected = before.clone();
        let new = columns(&qkv, shape.row(), start..start + width);
        expected[first_position * width..][..new.len()].copy_from_slice(&new);
        assert!(download::<B, f32>(device, &cache) == expected, "{what}");
    }
}

#[test]
fn the_cache_of_one_sequence_takes_one_sequence() {
    let shape = QkvShape { batch: 2, length: 1, heads: 1, kv_heads: 1, head_dim: 2 };
    let (qkv, mut keys, mut values) = ([0f32; 12], [0f32; 4], [0f32; 4]);
    let append = KeyValueAppend::<Cpu, f32> {
        shape: &shape,
        first_position: 0,
        qkv: &qkv,
        keys: &mut keys,
        values: &mut values,
    };
    assert!(Cpu.key_value_append(append).is_err());
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn rows_land_where_they_belong(
        shape in qkv_shapes(1usize..2, 1usize..20, 1usize..4, 1usize..20),
        first_position in 0usize..9,
        seed: u64,
    ) {
        on_each_device!(device => appends(device, shape, first_position, seed));
    }
}
