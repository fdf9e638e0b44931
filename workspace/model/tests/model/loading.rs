//! Weights on their way from a source to the device.

use moh_kernels::Cpu;
use moh_model::layout::{ModelLayout, Segment};
use moh_model::{Error, Model, ModelConfig};

/// Elements that a device takes at a time.
const UPLOAD: usize = 1 << 20;

#[test]
fn a_tensor_of_several_uploads_is_loaded_in_order() {
    let embedding = UPLOAD / 48 + 5;
    let config = ModelConfig {
        vocab_size: embedding,
        num_hidden_layers: 0,
        ..moh_testkit::models::config(6, true, None)
    };
    let value = |at: usize| (at % 1009) as f32;
    let source = |_: &Segment, values: &mut [f32]| {
        values.iter_mut().enumerate().for_each(|(at, place)| *place = value(at));
        Ok::<_, Error>(())
    };
    let model = Model::<Cpu, f32>::new(Cpu::open().unwrap(), config, 64, source).unwrap();
    let segment = &model.layout().flats[ModelLayout::EMBEDDING].segments[0];
    let loaded = model.weights().read(model.backend(), ModelLayout::EMBEDDING, segment).unwrap();
    assert!(loaded.len() > UPLOAD && !loaded.len().is_multiple_of(UPLOAD));
    assert!(loaded.iter().enumerate().all(|(at, &found)| found == value(at)));
}
