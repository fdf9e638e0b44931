//! A router of one's own, trained with the model: a linear layer of the block's input scores the heads,
//! and each token computes the best of them, weighted by their gates.
//!
//!     cargo run --release -p moh-model --example own_router

use std::sync::Arc;

use moh_kernels::linear::{Linear, LinearBackwardInput, LinearForward};
use moh_kernels::router::{Routers, RoutingShape, SharedHeads};
use moh_kernels::{Accumulation, Cpu, Heads, Result};
use moh_model::router::{Router, RouterBackward, RouterForward, RouterParameter};
use moh_model::{
    Activations, Architecture, AuxiliaryLosses, Error, FlatBuffers, LossConfig, Model, ModelConfig,
    ModelParallel, PassShape, Recompute, RopeConfig, StepSums, initial,
};

/// With H heads, of the block's input x: gates = softmax(W x), W `[H, C]`; a token selects the `top_k`
/// largest, and weights the heads by H times their gates.
struct LinearRouter {
    heads: usize,
    top_k: usize,
    width: usize,
}

impl LinearRouter {
    /// The gates of each token, `[tokens, H]`.
    fn gates(&self, x: &[f32], weight: &[f32]) -> Result<Vec<f32>> {
        let mut gates = vec![0.0; x.len() / self.width * self.heads];
        let product = LinearForward::<Cpu, f32>::new(self.width, x, weight, &mut gates);
        Cpu.linear_forward(product)?;
        for gates in gates.chunks_mut(self.heads) {
            let largest = gates.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            gates.iter_mut().for_each(|gate| *gate = (*gate - largest).exp());
            let sum: f32 = gates.iter().sum();
            gates.iter_mut().for_each(|gate| *gate /= sum);
        }
        Ok(gates)
    }
}

impl Router<Cpu, f32> for LinearRouter {
    fn routing_shape(&self, tokens: usize, heads: Heads) -> Result<RoutingShape> {
        let columns = self.heads;
        Ok(RoutingShape { tokens, heads, columns, saved_per_token: 0, weighted: true, logits: 0 })
    }

    fn shared_heads(&self) -> SharedHeads {
        SharedHeads::default()
    }

    fn parameters(&self, hidden_size: usize) -> Vec<RouterParameter> {
        let name = "self_attn.router.weight".to_owned();
        vec![RouterParameter { name, shape: [self.heads, hidden_size] }]
    }

    fn forward(&self, cpu: &Cpu, args: RouterForward<'_, Cpu, f32>) -> Result<()> {
        let RouterForward { shape, x, parameters, routing, .. } = args;
        routing.begin(shape.tokens(), self.shared_heads())?;
        let gates = self.gates(x, parameters.get(0)?)?;
        let rows = gates.chunks(self.heads).zip(routing.selected_mut().chunks_mut(self.heads));
        for (gates, selected) in rows {
            let larger = |gate: f32| gates.iter().filter(|&&other| other > gate).count();
            for (selected, &gate) in selected.iter_mut().zip(gates) {
                *selected = u8::from(larger(gate) < self.top_k);
            }
        }
        for (weight, gate) in routing.weights_mut().iter_mut().zip(&gates) {
            *weight = self.heads as f32 * gate;
        }
        routing.gates_mut().copy_from_slice(&gates);
        cpu.complete_routing(routing)
    }

    fn backward(&self, cpu: &Cpu, args: RouterBackward<'_, Cpu, f32>) -> Result<()> {
        let (inputs, weight, routing) =
            (self.width, args.parameters.get(0)?, args.gradient.routing);
        let mut d_scores = routing.gates().to_vec();
        let Some(delta) = args.gradient.delta else { return Ok(()) };
        // The gradient of a selected head's weight is delta; that of the balance loss is left out.
        let rows = d_scores.chunks_mut(self.heads).zip(delta.chunks(self.heads));
        for ((gates, delta), selected) in rows.zip(routing.selected().chunks(self.heads)) {
            let d_gate = |head: usize| self.heads as f32 * delta[head] * f32::from(selected[head]);
            let inner: f32 = (0..self.heads).map(|head| gates[head] * d_gate(head)).sum();
            for (head, gate) in gates.iter_mut().enumerate() {
                *gate *= d_gate(head) - inner;
            }
        }
        args.d_parameters.add_linear(0, inputs, args.x, &d_scores)?;
        let accumulation = Accumulation::Add;
        cpu.linear_backward_input(LinearBackwardInput::<Cpu, f32> {
            inputs,
            d_y: &d_scores,
            weight,
            d_x: args.d_x,
            accumulation,
        })
    }
}

fn main() -> std::result::Result<(), Error> {
    let config = ModelConfig {
        architecture: Architecture::Llama,
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 8,
        max_position_embeddings: 32,
        rms_norm_eps: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: None },
        tie_word_embeddings: true,
        initializer_range: 0.02,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        moh: None,
    };
    // The first layer computes all heads, the second one five of eight.
    let router: Arc<dyn Router<Cpu, f32>> =
        Arc::new(LinearRouter { heads: 8, top_k: 5, width: config.hidden_size });
    let parallel = ModelParallel::whole(&config);
    let mut model = Model::with_routers::<Error>(
        Cpu,
        config,
        32,
        parallel,
        vec![None, Some(router)],
        |tensor, values| {
            initial::initialize(1, 0.2, &tensor.name, tensor.shape(), values);
            Ok(())
        },
    )?;

    // Plain gradient descent on one sequence.
    let shape = PassShape { training: true, ..PassShape::evaluation(1, 32, Recompute::None) };
    let ids: Vec<u32> = (0..33).map(|i| i * i % 64).collect();
    let mut activations = Activations::new(&model, shape)?;
    activations.upload(&Cpu, &ids[..32], &ids[1..], &[])?;
    let mut gradients = FlatBuffers::<Cpu, f32>::zeros(&Cpu, model.layout())?;
    let mut sums = StepSums::new(&Cpu)?;
    let scale = LossConfig {
        cross_entropy: 1.0 / 32.0,
        auxiliary: AuxiliaryLosses::all(0.0),
        straight_through: true,
    };
    for step in 0..40 {
        gradients.mark_stale();
        model.forward_backward(&mut activations, &mut gradients, scale, &mut sums)?;
        for flat in 0..model.layout().flats.len() {
            let weights = model.weights_mut().flat_mut(flat).iter_mut();
            weights
                .zip(gradients.flat(flat))
                .for_each(|(weight, gradient)| *weight -= 0.3 * gradient);
        }
        let loss = sums.take(&Cpu)?.cross_entropy / 32.0;
        if step % 13 == 0 {
            println!("step {step}: loss {loss:.3}");
        }
    }
    Ok(())
}
