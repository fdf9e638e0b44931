//! `moh-eval logits`: computes the logits of given ids, and the heads that they select.

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use crate::logits_file::{read_ids, write_logits};
use anyhow::Context as _;
use moh_kernels::open_device::{DeviceName, OnDevice};
use moh_kernels::{Backend, ElementType};
use moh_program::models::NamedModel;
use moh_program::options;

#[derive(clap::Args)]
pub(crate) struct LogitsArguments {
    /// Model: a directory, an id on the hub, or a run's checkpoint, RUN or RUN@STEP
    #[arg(long)]
    model: String,
    /// Branch, tag or commit of the hub's model
    #[arg(long)]
    revision: Option<String>,
    /// JSON file: a list of equally long lists of token ids
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// Safetensors file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace --out if it exists
    #[arg(long)]
    force: bool,
    /// Element type of the computation [default: the type of the model's weights]
    #[arg(long, value_parser = options::element_types())]
    dtype: Option<ElementType>,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
}

impl LogitsArguments {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        make_room(&self.out, self.force)?;
        let named = NamedModel::open(&self.model, self.revision.as_deref())?;
        let dtype = named.element_type(self.dtype)?;
        options::open_device(self.device)?.run(Logits(self, named, dtype))
    }
}

/// The computation of a model's logits.
struct Logits<'a>(&'a LogitsArguments, NamedModel, ElementType);

impl OnDevice for Logits<'_> {
    type Output = anyhow::Result<()>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let Logits(arguments, named, dtype) = self;
        let ids = read_ids(&arguments.ids, named.config.max_position_embeddings)?;
        let length = ids.first().map_or(0, Vec::len);
        let mut model = named.load(backend, dtype, length)?;
        let output = model.run(&ids)?;
        write_logits(&output, &arguments.out)?;
        writeln!(
            stdout(),
            "{}: logits of {} x {} tokens",
            arguments.out.display(),
            output.batch,
            output.length
        )?;
        Ok(())
    }
}

/// Creates the directory of the file of `--out`. Fails if the file exists and `--force` is not given.
fn make_room(path: &Path, force: bool) -> anyhow::Result<()> {
    if !force && path.exists() {
        anyhow::bail!(
            "{}: already exists: choose another name, or replace it with --force",
            path.display()
        );
    }
    moh_files::create_parents(path).with_context(|| path.display().to_string())
}
