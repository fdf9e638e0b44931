//! A model in a directory: its configuration, and its weights, which fit the configuration.

use std::path::Path;

use moh_kernels::{Backend, ElementType};
use moh_model::tensors::{EMBEDDING, OUTPUT_HEAD};
use moh_model::{Model, ModelConfig};
use serde_json::json;

use crate::{ConfigFile, Error, WeightFiles};

/// Elements that are compared at a time.
const BLOCK_ELEMENTS: usize = 1 << 16;

/// A model in a directory, with mapped weights.
#[derive(Debug)]
pub struct StoredModel {
    /// The configuration. It is untied if the files have an output head that differs from the
    /// embedding.
    pub file: ConfigFile,
    /// The weights: exactly the tensors of the configuration.
    pub weights: WeightFiles,
    /// A sentence for the user about the files.
    pub warning: Option<String>,
}

impl StoredModel {
    /// Opens the model in `dir`.
    ///
    /// As in transformers, a model with `tie_word_embeddings` is not tied if its files have an output head
    /// that differs from the embedding.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let mut file = ConfigFile::read(dir)?;
        let mut weights = WeightFiles::open(dir)?;
        if file.config.tie_word_embeddings {
            weights.embed_with_head();
        }
        weights.check(&file.config)?;
        let mut warning = None;
        if has_own_head(&file.config, &weights)? {
            file.config.tie_word_embeddings = false;
            file.fields.insert("tie_word_embeddings".to_string(), json!(false));
            warning = Some(format!(
                "{}: tie_word_embeddings is true, but {OUTPUT_HEAD} differs from {EMBEDDING}: both \
                 are kept, and the model is not tied",
                dir.display()
            ));
        }
        Ok(StoredModel { file, weights, warning })
    }

    /// Loads the model to a device, for sequences of up to `positions` tokens. Weights of another
    /// type than `element` are converted.
    pub fn load<B: Backend>(
        &self,
        backend: B,
        element: ElementType,
        positions: usize,
    ) -> Result<Model<B>, Error> {
        Model::new(backend, element, self.file.config.clone(), positions, |segment, values| {
            self.weights.read_f32(&segment.name, values)
        })
    }
}

/// Returns whether the files of a tied model have an output head with other values than the embedding.
fn has_own_head(config: &ModelConfig, weights: &WeightFiles) -> Result<bool, Error> {
    if !config.tie_word_embeddings || !weights.names().any(|name| name == OUTPUT_HEAD) {
        return Ok(false);
    }
    let (embedding, head) = (weights.get(EMBEDDING)?, weights.get(OUTPUT_HEAD)?);
    if embedding.dtype == head.dtype {
        return Ok(embedding.bytes != head.bytes);
    }
    let blocks = |bytes, size| <[u8]>::chunks(bytes, BLOCK_ELEMENTS * size);
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let pairs = blocks(embedding.bytes, embedding.dtype.bytes())
        .zip(blocks(head.bytes, head.dtype.bytes()));
    for (embedding_block, head_block) in pairs {
        a.resize(embedding_block.len() / embedding.dtype.bytes(), 0.0);
        b.resize(head_block.len() / head.dtype.bytes(), 0.0);
        embedding.dtype.read(embedding_block, &mut a);
        head.dtype.read(head_block, &mut b);
        if a != b {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_file::tests::small_llama;
    use crate::model_directory::{Contents, TensorSpec, write_model};
    use moh_kernels::DType;
    use moh_model::tensors::tensor_shapes;

    /// Writes a tied model with an output head of this type. The head has the embedding's values, except the
    /// last value, which is larger by `added`.
    fn model(dir: &Path, dtype: DType, added: f32) {
        let file = small_llama(true);
        let spec = |(name, shape)| TensorSpec { name, shape, dtype: DType::F32 };
        let mut tensors: Vec<_> = tensor_shapes(&file.config).into_iter().map(spec).collect();
        tensors.push(TensorSpec { name: OUTPUT_HEAD.into(), shape: vec![6, 4], dtype });
        let contents = Contents::new(&file.fields, &tensors, u64::MAX);
        write_model::<Error>(dir, false, &contents, &mut |spec, sink| {
            let mut values = vec![1.0; spec.shape.iter().product()];
            if spec.name == OUTPUT_HEAD
                && let Some(last) = values.last_mut()
            {
                *last += added;
            }
            let mut bytes = vec![0; values.len() * spec.dtype.bytes()];
            spec.dtype.write(&values, &mut bytes);
            sink(&bytes)
        })
        .unwrap();
    }

    #[test]
    fn an_output_head_of_its_own_unties_the_model() {
        for dtype in [DType::F32, DType::BF16] {
            let dir = tempfile::tempdir().unwrap();
            model(&dir.path().join("same"), dtype, 0.0);
            let same = StoredModel::open(&dir.path().join("same")).unwrap();
            assert!(same.file.config.tie_word_embeddings && same.warning.is_none());

            model(&dir.path().join("other"), dtype, 0.5);
            let other = StoredModel::open(&dir.path().join("other")).unwrap();
            assert!(!other.file.config.tie_word_embeddings);
            assert_eq!(other.file.fields["tie_word_embeddings"], false);
            let warning = other.warning.unwrap();
            assert!(warning.contains("lm_head.weight differs from"), "{warning}");
            other.weights.check(&other.file.config).unwrap();
        }
    }
}
