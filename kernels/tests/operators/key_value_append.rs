//! Appending to the cache: keys and values are written to their rows, and no other row changes.

use crate::reference::{Random, cases, columns, download, place, qkv_shapes, upload};
use moh_kernels::key_value_cache::{KeyValueAppend, KeyValueCache};
use moh_kernels::{Backend, Cpu, QkvShape};

fn appends<B: Backend>(device: &B, shape: QkvShape, [block_length, free]: [usize; 2], seed: u64) {
    let (mut random, width) = (Random(seed), shape.kv_heads * shape.head_dim);
    let qkv: Vec<f32> = random.elements(shape.tokens() * shape.row());
    let capacity = (shape.tokens() + free).next_multiple_of(block_length);
    let before: Vec<f32> = random.elements(capacity * width);
    let rows: Vec<u32> = random.permutation(capacity)[..shape.tokens()].to_vec();
    let (qkv_buffer, row_buffer) = (upload(device, &qkv), upload(device, &rows));
    let (mut keys, mut values) = (upload(device, &before), upload(device, &before));
    let append = KeyValueAppend {
        shape: &shape,
        rows: B::whole(&row_buffer),
        block_length,
        qkv: B::whole(&qkv_buffer),
        keys: B::whole_mut(&mut keys),
        values: B::whole_mut(&mut values),
    };
    device.key_value_append(append).unwrap();
    let first = shape.heads * shape.head_dim;
    for (what, cache, start) in [("keys", keys, first), ("values", values, first + width)] {
        let mut expected = before.clone();
        let new = columns(&qkv, shape.row(), start..start + width);
        for (token, &row) in new.chunks_exact(width).zip(&rows) {
            place(&mut expected, token, row as usize, block_length, shape.head_dim);
        }
        assert!(download::<B, f32>(device, &cache) == expected, "{what}");
    }
}

#[test]
fn rows_beyond_the_cache_are_refused() {
    let shape = QkvShape { batch: 2, length: 1, heads: 1, kv_heads: 1, head_dim: 2 };
    let (qkv, mut keys, mut values) = ([0f32; 12], [0f32; 4], [0f32; 4]);
    let append = KeyValueAppend::<Cpu, f32> {
        shape: &shape,
        rows: &[0, 2],
        block_length: 2,
        qkv: &qkv,
        keys: &mut keys,
        values: &mut values,
    };
    let message = Cpu.key_value_append(append).unwrap_err().to_string();
    assert!(message.contains("row 2 of a cache of 2 tokens"), "{message}");
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn rows_land_where_they_belong(
        shape in qkv_shapes(1usize..3, 1usize..20, 1usize..4, 1usize..20),
        block_length in 1usize..5,
        free in 0usize..9,
        seed: u64,
    ) {
        on_each_device!(device => appends(device, shape, [block_length, free], seed));
    }
}
