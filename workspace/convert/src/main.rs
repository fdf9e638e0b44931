//! `moh-convert`: converts a Llama or Qwen3 checkpoint to a Mixture-of-Head model.

mod calibration_arguments;
mod calibration_text;
mod own_text;

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{CommandFactory, Parser, ValueEnum};
use indicatif::HumanCount;
use moh_checkpoint::run_directory::RunCheckpoint;
use moh_convert::{
    CalibrationReceipt, Conversion, ConversionOptions, Receipt, TargetAttention, TensorReceipt,
    TextReceipt, Verification, convert,
};
use moh_files::{PendingFile, Registered};
use moh_hf::{ConfigFile, is_base_model, is_license_id};
use moh_kernels::DType;
use moh_kernels::open_device::{DeviceName, OpenDevice};
use moh_model::{Active, HeadCounts, HeadRequest, RouterKind, SharedHeadSets};
use moh_program::arguments::{self, at_least, only};
use moh_program::models::{NamedModel, Place};
use moh_program::progress::Bar;
use moh_program::{exit, options};

use self::calibration_arguments::CalibrationArguments;

/// Convert a Llama or Qwen3 checkpoint to Mixture-of-Head attention
#[derive(Debug, Clone, Parser)]
#[command(
    name = "moh-convert",
    version,
    after_help = "Example, from the repository's root:\n  \
        moh-convert --from recipes/quickstart --active 0.75 --out quickstart-MoH\n\
        The paper's model, 16 shared heads and 8 of 16, from the hub (ask there for access first):\n  \
        moh-convert --from meta-llama/Meta-Llama-3-8B"
)]
struct Arguments {
    /// Model to convert: a directory in Hugging Face layout, a hub id, or a run directory of moh-train, with
    /// @STEP for another checkpoint than the newest good one
    #[arg(long, value_name = "DIR|ID|RUN[@STEP]")]
    from: String,
    /// Branch, tag or commit on the hub [default: main]
    #[arg(long)]
    revision: Option<String>,
    /// Download the model of the hub to its cache, print its directory there, and convert nothing
    #[arg(long, conflicts_with_all = ["out", "force", "receipt", "tokenizer", "pad_vocab_to"])]
    download: bool,
    /// Attention of the output [default: moh, or, of a run and without a number of heads, as it was trained]
    #[arg(long, value_enum)]
    attention: Option<AttentionKind>,
    /// Router: query-norm, group (whole groups of heads that read one key/value head), static (shared heads
    /// alone), or learned and fitted by --calibration: two-stage and one-stage, which weigh heads, and linear
    /// [default: a Mixture-of-Head model's own, or linear with --calibration, or query-norm]
    #[arg(long, value_name = "NAME", value_parser = options::routers())]
    router: Option<RouterKind>,
    /// Shared heads, for all layers or for each: 16 or 32,16,8 [default: a Mixture-of-Head model's own,
    /// or half of the heads, or half of the active heads if --active is at most 0.5]
    #[arg(long, value_name = "N[,N...]", value_parser = parse_head_counts)]
    #[arg(allow_hyphen_values = true)]
    shared_heads: Option<HeadCounts>,
    /// Fraction of the heads that are active for a token [default: a Mixture-of-Head model's own, or
    /// 0.75]
    #[arg(long, value_name = "R", conflicts_with = "routed_top_k")]
    active: Option<f64>,
    /// Active routed heads per token, for all layers or for each; 0 leaves the routed heads inactive
    #[arg(long, value_name = "K[,K...]", value_parser = parse_head_counts)]
    #[arg(allow_hyphen_values = true)]
    routed_top_k: Option<HeadCounts>,
    /// Element type of the output [default: the input's, or a run's run.dtype]
    #[arg(long, value_parser = output_types())]
    dtype: Option<DType>,
    /// Maximum size of a weight file, e.g. 500MB or 4GiB
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
    /// Directory to write [default: ./NAME-MoH]
    #[arg(long, visible_alias = "to", value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace an existing model directory, or the file of --receipt
    #[arg(long)]
    force: bool,
    /// Compare the output's weights, and its logits with all heads active, with the source's [default:
    /// if under 1 GB]
    #[arg(long, overrides_with = "no_verify")]
    verify: bool,
    /// Device for --calibration and for the comparison of logits: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// Do not compare weights and logits
    #[arg(long, overrides_with = "verify")]
    no_verify: bool,
    /// Directory of a tokenizer whose larger vocabulary the model adopts
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Grow the vocabulary to a multiple of N [default: 128 with --tokenizer]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(0))]
    pad_vocab_to: Option<usize>,
    /// Base model that the model card names, its id on the hub; repeat it for a merged model [default: the source
    /// on the hub, or what the README.md of its directory says]
    #[arg(long, value_name = "ID", value_parser = only(|id: &String| is_base_model(id), BASE_MODEL))]
    base_model: Vec<String>,
    /// Licence that the model card states, by its id on the hub, such as apache-2.0; with other, the source's
    /// license_name and license_link stay [default: what the source's README.md says]
    #[arg(long, value_name = "ID", value_parser = only(|id: &String| is_license_id(id), LICENSE))]
    license: Option<String>,
    /// Write a report of every tensor as JSON
    #[arg(long, value_name = "FILE")]
    receipt: Option<PathBuf>,
    #[command(flatten)]
    calibration: CalibrationArguments,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AttentionKind {
    /// Mixture-of-Head
    Moh,
    /// All heads active for every token, as before conversion
    Dense,
}

/// Returns the element types of an output, by their short names and by the names in `config.json`.
fn output_types() -> impl TypedValueParser<Value = DType> {
    const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
    let value = |dtype: DType| PossibleValue::new(dtype.name()).alias(dtype.torch_name());
    PossibleValuesParser::new(TYPES.map(value))
        .try_map(|name| DType::from_name(&name).ok_or("not an element type"))
}

/// Parses bytes in decimal (KB, MB, GB) or binary (KiB, MiB, GiB) units, as transformers does.
fn parse_size(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let factor: u64 = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KIB" => 1 << 10,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        _ => return Err("expected a size like 500MB or 5GB".to_string()),
    };
    match number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)) {
        Some(0) | None => Err("expected a size like 500MB or 5GB".to_string()),
        Some(bytes) => Ok(bytes),
    }
}

/// Parses a head count, or a count for each layer, separated by commas.
fn parse_head_counts(text: &str) -> Result<HeadCounts, String> {
    let count = |text: &str| {
        text.trim().parse::<usize>().map_err(|_| {
            "expected an integer of at least 0, or one for each layer, separated by commas"
                .to_string()
        })
    };
    match text.contains(',') {
        false => count(text).map(HeadCounts::All),
        true => text.split(',').map(count).collect(),
    }
}

const BASE_MODEL: &str = "expected an id on the hub, such as meta-llama/Llama-3.2-1B";
const LICENSE: &str = "expected the id of a licence, such as apache-2.0 or llama3";

fn main() -> ExitCode {
    exit::run(|| {
        run(&arguments::parse::<Arguments>()).map_err(|error| match error.downcast_ref() {
            Some(kept @ moh_convert::Error::Kept(..)) => {
                exit::StoppedEarly(kept.to_string()).into()
            }
            _ => error,
        })
    })
}

/// Returns the requested attention, or `None` if no argument requests any.
fn attention(arguments: &Arguments) -> Option<TargetAttention> {
    let Arguments { attention, router, shared_heads, active, routed_top_k, calibration, .. } =
        arguments.clone();
    let has_heads = router.is_some()
        || shared_heads.is_some()
        || active.is_some()
        || routed_top_k.is_some()
        || calibration.choose_heads();
    if attention.is_none() && !has_heads {
        return None;
    }
    if attention == Some(AttentionKind::Dense) {
        if has_heads {
            let message = "--attention dense cannot be combined with --router, --shared, --shared-heads, --active, \
                           --routed-top-k or --calibration";
            Arguments::command().error(clap::error::ErrorKind::ArgumentConflict, message).exit();
        }
        return Some(TargetAttention::Dense);
    }
    let active = routed_top_k.map(Active::RoutedTopK).or(active.map(Active::Share));
    let shared_heads = shared_heads.map(SharedHeadSets::First);
    Some(TargetAttention::Moh(HeadRequest { router, shared_heads, active }))
}

fn trained_attention(checkpoint: &RunCheckpoint) -> anyhow::Result<TargetAttention> {
    Ok(match checkpoint.config_file()?.config.moh {
        // A Mixture-of-Head model keeps its own heads.
        Some(_) => TargetAttention::Moh(HeadRequest::default()),
        None => TargetAttention::Dense,
    })
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let checked = arguments.calibration.check(arguments.shared_heads.as_ref());
    if let Err((kind, message)) = checked {
        Arguments::command().error(kind, message).exit();
    }
    if arguments.download {
        let directory =
            moh_program::models::locate(&arguments.from, arguments.revision.as_deref())?;
        return Ok(writeln!(std::io::stdout(), "{}", directory.display())?);
    }
    let attention = attention(arguments);
    let device = OpenDevice::open(arguments.device, true)
        .with_context(|| format!("--device {}", arguments.device))?;
    if let Some(path) = &arguments.receipt {
        check_receipt(path, arguments.force)?;
    }
    let place = Place::find(&arguments.from, arguments.revision.as_deref())?;
    let model = NamedModel::at(&arguments.from, place.clone())?;
    let (source, checkpoint) = match place {
        Place::Checkpoint(_) if arguments.verify => bail!(
            "{}: --verify compares with a model's files: the tensors of a run are compared with their hashes",
            arguments.from
        ),
        Place::Checkpoint(checkpoint) => (checkpoint.run.model(), Some(checkpoint)),
        Place::Directory(directory) => (directory, None),
    };
    let mut attention = match (attention, &checkpoint) {
        (Some(attention), _) => attention,
        (None, Some(checkpoint)) => trained_attention(checkpoint)?,
        (None, None) => TargetAttention::Moh(HeadRequest::default()),
    };
    if let TargetAttention::Moh(request) = &mut attention
        && model.config.moh.is_none()
        && arguments.calibration.has_text()
    {
        request.router.get_or_insert(RouterKind::Linear);
    }
    let dtype = match (arguments.dtype, &checkpoint) {
        (None, Some(checkpoint)) => Some(checkpoint.export_type()?),
        (dtype, _) => dtype,
    };
    let is_run = checkpoint.is_some();
    // A source with its own code may have had these heads, like the paper's released model.
    let was_dense = !is_run && {
        let file = ConfigFile::read(&source)?;
        file.config.moh.is_none() && !file.fields.contains_key("auto_map")
    };
    let out = arguments.out.clone().unwrap_or_else(|| {
        let suffix = if attention == TargetAttention::Dense { "Dense" } else { "MoH" };
        PathBuf::from(format!("./{}-{suffix}", model_name(&arguments.from)))
    });
    let mut options = ConversionOptions {
        base_models: arguments.base_model.clone(),
        license: arguments.license.clone(),
        attention,
        checkpoint,
        dtype,
        max_shard_bytes: arguments.max_shard_size,
        force: arguments.force,
        tokenizer: arguments.tokenizer.clone(),
        pad_vocab_to: arguments.pad_vocab_to,
        ..ConversionOptions::new(source, out)
    };
    if let Some(choice) = &arguments.calibration.shared {
        let sets = choice.sets(options.source_config()?.num_hidden_layers)?;
        if let (TargetAttention::Moh(request), Some(sets)) = (&mut options.attention, sets) {
            request.shared_heads = Some(sets);
        }
    }
    let stop = Arc::new(AtomicBool::new(false));
    exit::stop_on_signals(&stop).context("signals")?;
    let chooses_number = arguments.active.is_some() && arguments.shared_heads.is_none();
    let calibrated =
        arguments.calibration.measure(&options, &model, chooses_number, device.clone(), &stop)?;
    let options = ConversionOptions { calibrated, ..options };
    let mut bar = Bar::bytes("converting", 0);
    let conversion = convert(&options, &mut |bytes, total| {
        bar.update(bytes, total);
        match stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    drop(bar);
    if let Some(warning) = &conversion.receipt.warning {
        exit::stderr_line(format_args!("warning: {warning}"));
    }
    let verification = match is_run {
        true => None,
        false => {
            // Verification does not check `stop`: a signal ends the program.
            let _temporary = Registered::directory(conversion.path());
            let verify = || verify_output(arguments, &conversion, device);
            exit::removing_temporary_files_on_signals(verify).context("signals")??
        }
    };
    if stop.load(Ordering::Relaxed) {
        return Err(moh_convert::Error::Interrupted.into());
    }
    let receipt = conversion.publish()?;
    if let Some(path) = &arguments.receipt {
        write_receipt(path, &receipt, arguments.force)?;
    }
    print_receipt(&receipt, verification, &mut std::io::stdout().lock())?;
    if receipt.calibration.is_none() && was_dense && receipt.loses_heads() {
        exit::stderr_line(format_args!(
            "warning: the model is not usable before it is tuned: heads were left out without a measurement; \
             --calibration self measures them on text that the model samples, --calibration FILE on yours"
        ));
    }
    Ok(())
}

/// Compares weights and logits if the model is small or the user asked for it.
fn verify_output(
    arguments: &Arguments,
    conversion: &Conversion,
    device: OpenDevice,
) -> anyhow::Result<Option<Verification>> {
    let is_small = conversion.receipt.bytes < VERIFIED_BYTES;
    if arguments.no_verify || !(arguments.verify || is_small) {
        return Ok(None);
    }
    Ok(Some(conversion.verify(device)?))
}

/// Checks, before the conversion, that the receipt can be written.
fn check_receipt(path: &Path, force: bool) -> anyhow::Result<()> {
    let option = || format!("--receipt {}", path.display());
    if path.is_dir() {
        bail!("{}: is a directory, name a file", option());
    }
    if path.exists() && !force {
        bail!("{}: exists: choose another file, or --force to replace it", option());
    }
    // Missing directories are created with the receipt, so that a failed conversion creates no directory.
    let parents = moh_files::parent(path).ancestors();
    let place = parents.into_iter().find(|place| place.exists()).unwrap_or(Path::new("."));
    let file = place.join(path.file_name().unwrap_or_default());
    // Dropped, which removes the file.
    PendingFile::create(&file).with_context(option)?;
    Ok(())
}

fn write_receipt(path: &Path, receipt: &Receipt, force: bool) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(receipt)?;
    let write = || {
        moh_files::create_parents(path)?;
        let mut file = PendingFile::create(path)?;
        writeln!(file, "{json}")?;
        if force { file.replace() } else { file.publish() }
    };
    write().with_context(|| format!("--receipt {}", path.display()))
}

/// Returns the last component of a hub id or of a directory's canonical path.
fn model_name(from: &str) -> String {
    let path = Path::new(from);
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    path.file_name().map_or_else(|| "model".to_string(), |name| name.to_string_lossy().into_owned())
}

/// Larger models are compared only on request.
const VERIFIED_BYTES: u64 = 1_000_000_000;

fn print_receipt(
    receipt: &Receipt,
    verification: Option<Verification>,
    out: &mut impl Write,
) -> std::io::Result<()> {
    let [attention_before, attention] = receipt.attention_flops_per_token;
    let [before, after] = receipt.vocab_size;
    let counts = [&receipt.shared_heads, &receipt.routed_top_k];
    let by_layer =
        if counts.iter().all(|counts| counts.uniform().is_some()) { "" } else { ", by layer" };
    writeln!(out, "{}", receipt.out.display())?;
    writeln!(
        out,
        "  heads            {} shared + {} of {} routed = {} of {} active{by_layer}",
        receipt.shared_heads,
        receipt.routed_top_k,
        receipt.routed_heads,
        receipt.active_heads,
        receipt.heads
    )?;
    if let Some(calibration) = &receipt.calibration {
        let CalibrationReceipt { texts, tokens, loss_dense, loss, .. } = calibration;
        writeln!(
            out,
            "  measured on      {} tokens: held-out loss {loss:.4}, {loss_dense:.4} dense",
            HumanCount(*tokens as u64)
        )?;
        for TextReceipt { text, loss_dense, loss } in texts.iter().filter(|_| texts.len() > 1) {
            let losses = match loss.zip(*loss_dense) {
                Some((loss, dense)) => format!("{loss:.4}, {dense:.4} dense"),
                None => "none of its windows is held out".to_owned(),
            };
            writeln!(out, "                   {text}: {losses}")?;
        }
    }
    if let Some(remark) = &receipt.rounding {
        writeln!(out, "                   {remark}")?;
    }
    writeln!(out, "  parameters       {}", HumanCount(receipt.parameters))?;
    if before != after {
        writeln!(out, "  vocabulary       {before} -> {after}")?;
    }
    writeln!(
        out,
        "  attention FLOPs  {attention_before:.3e} -> {attention:.3e} per token at length {} ({:.0}%)",
        receipt.flops_length,
        100.0 * attention / attention_before
    )?;
    let left = |(length, share): &(usize, f64)| format!("{:.0}% at length {length}", 100.0 * share);
    let left: Vec<String> = receipt.flops_left.iter().map(left).collect();
    writeln!(out, "  model FLOPs      {}", left.join(", "))?;
    writeln!(out, "  tensors          {} (BLAKE3)", describe_tensors(receipt))?;
    if let Some(verification) = verification {
        print_verification(&verification, out)?;
    }
    writeln!(
        out,
        "  written          {} bytes in {} file{}, {:.2} s",
        HumanCount(receipt.bytes),
        receipt.shards,
        if receipt.shards == 1 { "" } else { "s" },
        receipt.seconds
    )
}

/// Returns the numbers of tensors that are unchanged, converted and new.
fn describe_tensors(receipt: &Receipt) -> String {
    let count = |is: fn(&TensorReceipt) -> bool| receipt.tensors.iter().filter(|it| is(it)).count();
    let (total, unchanged) = (receipt.tensors.len(), receipt.num_unchanged());
    let dtype = receipt.tensors.first().map(|tensor| tensor.dtype);
    let converted =
        count(|it| !it.refitted && it.source_dtype.is_some_and(|dtype| dtype != it.dtype));
    let refitted = count(|it| it.refitted && it.source_dtype.is_some());
    let fitted = count(|it| it.refitted && it.source_dtype.is_none());
    let added = count(|it| !it.refitted && it.source_dtype.is_none());
    let parts = [
        (unchanged, format!("of {total} unchanged, bit by bit")),
        (converted, format!("of {total} converted to {}", dtype.unwrap_or_default())),
        (refitted, "refitted".to_owned()),
        (fitted, "of routers fitted".to_owned()),
        (added, "of routers added, zeros".to_owned()),
        (total - unchanged - converted - refitted - fitted - added, "with new rows".to_owned()),
    ];
    let some = parts.iter().filter(|(count, _)| *count > 0);
    some.map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
}

fn print_verification(found: &Verification, out: &mut impl Write) -> std::io::Result<()> {
    let logits = format!("{} logits with all heads on", HumanCount(found.logits as u64));
    // A wider type represents the source's values exactly.
    match found.rounding.filter(|rounding| rounding.largest_difference > 0.0) {
        None => {
            let distance = distance(found.largest_difference.into(), "the source's");
            writeln!(out, "  verified         {logits} are {distance}")?;
        }
        Some(rounding) => {
            let dtype = rounding.dtype.name();
            let weights = distance(rounding.largest_difference, "the source's");
            let all = distance(found.largest_difference.into(), "the source's");
            let rest = distance(
                found.unexplained_difference.into(),
                &format!("those of its weights rounded to {dtype}"),
            );
            writeln!(
                out,
                "  verified         weights in {dtype} are {weights}, within their rounding\n                   \
                 {logits} are {all}, and {rest}"
            )?;
        }
    }
    match found.independent {
        Ok(largest_difference) => {
            let distance = distance(largest_difference.into(), "the output's");
            writeln!(out, "  candle           its logits of the last token are {distance}")
        }
        Err(reason) => writeln!(out, "  candle           not compared: {reason}"),
    }
}

/// Describes the largest difference between numbers.
fn distance(largest: f64, from: &str) -> String {
    match largest == 0.0 {
        true => format!("equal to {from}"),
        false => format!("within {largest:.1e} of {from}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_decimal_and_binary_units() {
        assert_eq!(parse_size("5GB"), Ok(5_000_000_000));
        assert_eq!(parse_size("2 MiB"), Ok(2 << 20));
        assert_eq!(parse_size("77"), Ok(77));
        for bad in ["", "GB", "0", "-1GB", "1.5GB", "99999999999GB", "5TBs"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn counts_of_heads_are_one_number_or_one_for_each_layer() {
        assert_eq!(parse_head_counts("4"), Ok(HeadCounts::All(4)));
        assert_eq!(parse_head_counts("8, 4,0"), Ok([8, 4, 0].into_iter().collect()));
        for bad in ["", "-1", "4,", ",4", "4;4", "4.0", "99999999999999999999,1"] {
            assert!(parse_head_counts(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }
}
