//! Options that change the layers and heads of the measured model.

use moh_model::{Active, HeadRequest, ModelConfig, RouterKind, SharedHeadSets};
use moh_program::arguments::at_least;
use moh_program::exit::Usage;
use moh_program::options;

#[derive(clap::Args)]
pub struct HeadArguments {
    /// Number of layers, instead of the model's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    layers: Option<u32>,
    /// Fraction of the heads that is active; by default half of all heads are shared, or half of the
    /// active heads if at most half are active
    #[arg(long, value_name = "SHARE")]
    active: Option<f64>,
    /// Shared heads, active for every token
    #[arg(long, value_name = "N", requires = "active", value_parser = at_least::<usize>(0))]
    shared_heads: Option<usize>,
    /// Router of the routed heads [default: query-norm]
    #[arg(long, value_name = "NAME", requires = "active", value_parser = options::routers())]
    router: Option<RouterKind>,
    /// Dense attention, even if the recipe or the configuration has Mixture-of-Head
    #[arg(long, conflicts_with = "active")]
    dense: bool,
}

impl HeadArguments {
    /// Changes a configuration. Returns a remark if a share was rounded to a count of heads.
    pub fn apply(&self, config: &mut ModelConfig) -> anyhow::Result<Option<String>> {
        if let Some(layers) = self.layers {
            config.num_hidden_layers = layers as usize;
        }
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let mut rounding = None;
        if self.dense {
            config.moh = None;
        } else if let Some(active) = self.active {
            let request = HeadRequest {
                router: self.router,
                shared_heads: self.shared_heads.map(SharedHeadSets::from),
                active: Some(Active::Share(active)),
            };
            let moh = request.resolve(heads, kv_heads, config.num_hidden_layers, None);
            config.moh = Some(moh.map_err(|error| Usage(error.to_string()))?);
            rounding = request.rounding(heads, kv_heads, None).map(|text| text.to_string());
        }
        if let Some(moh) = &config.moh {
            config.check_moh(moh)?;
        }
        if let Err(limit) = config.check_limits() {
            anyhow::bail!("the model has {}: at most {}", limit.what, limit.limit);
        }
        Ok(rounding)
    }
}
