//! Trains a tiny Mixture-of-Head model to continue numbers that repeat, with the trainer's own step: accumulated
//! micro-batches, clipping, AdamW in f32.
//!
//!     cargo run --release -p moh-step --example train_tiny

use moh_comm::World;
use moh_hf::ConfigFile;
use moh_kernels::{Cpu, ElementType};
use moh_model::layout::Segment;
use moh_model::parameters::Shard;
use moh_model::{AuxiliaryLosses, Generator, Model, Recompute, Sampler, Sampling, initial};
use moh_step::guard::Limits;
use moh_step::{Hyperparameters, OptimizerState, StepConfig, StepGroups, Stepper, Update};

const LENGTH: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // One head of four is shared, and each token selects one of the other three.
    let fields = serde_json::json!({
        "model_type": "moh_llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "moh_router": "query-norm", "moh_shared_heads": 1, "moh_routed_top_k": 1,
    });
    let config = ConfigFile::from_value(fields, "config.json".as_ref())?.config;
    let mut model =
        Model::new(Cpu, ElementType::F32, config, LENGTH, |tensor: &Segment, values| {
            initial::initialize(1, 0.1, &tensor.name, tensor.shape(), values);
            Ok::<_, moh_model::Error>(())
        })?;

    // This process is the only rank: it has the whole model and the whole state of AdamW.
    let all = World::single().group().clone();
    let mut optimizer = OptimizerState::new(&model, ElementType::F32, Shard::from_group(&all))?;
    let config = StepConfig {
        stage: "tiny".into(),
        sequence_length: LENGTH,
        micro_batch: 4,
        micro_batches: 2,
        document_mask: false,
        recompute: Recompute::None,
        auxiliary_weights: AuxiliaryLosses::all(0.01),
        distillation: None,
        optimizer: Hyperparameters::default(),
        gradients: ElementType::F32,
        reduce: ElementType::F32,
    };
    let samples = config.batch_sequences();
    let mut stepper = Stepper::new(&model, config, StepGroups { data: all.clone(), all })?;

    // Sample n counts from n on, up to 63 and from 0 again.
    let read = |sample: u64, window: &mut [u32], _: Option<&mut [u32]>| {
        window.iter_mut().zip(sample..).for_each(|(id, count)| *id = (count % 64) as u32);
        Ok(())
    };
    for number in 1..=60 {
        let update = Update { number, learning_rate: 1e-2, limits: Limits::FINITE };
        let step =
            stepper.step(&mut model, &mut optimizer, read, (number - 1) * samples, update)?;
        if number % 20 == 0 {
            println!("step {number}: loss {:.3}, gradient norm {:.2}", step.loss, step.grad_norm);
        }
    }
    stepper.wait_for_weights(&mut model)?;
    let logits = Generator::new(&model, LENGTH)?.extend(&[7, 8, 9])?;
    let mut greedy = Sampler::new(1, Sampling::default(), logits.len());
    println!("after 7, 8, 9: {}", greedy.sample(&logits)?);
    Ok(())
}
