//! Values of options of several programs: element types, routers, devices, and a generator's sizes.

use anyhow::Context as _;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use moh_kernels::open_device::{DeviceName, OpenDevice, available_memory};
use moh_kernels::{Backend, ElementType};
use moh_model::{BatchGenerator, BatchOptions, Model, RouterKind};

/// Returns the element types of a model's computation, as values of an option.
pub fn element_types() -> impl TypedValueParser<Value = ElementType> {
    let value = |dtype: ElementType| {
        PossibleValue::new(dtype.name()).alias(dtype.dtype().torch_name()).help(match dtype {
            ElementType::F32 => "32-bit float, for any stored type",
            ElementType::BF16 => "bfloat16 weights and activations",
        })
    };
    PossibleValuesParser::new(ElementType::ALL.map(value))
        .try_map(|name| ElementType::from_name(&name).ok_or("not an element type"))
}

/// Returns the routers, by their names in `config.json`, as values of an option.
pub fn routers() -> impl TypedValueParser<Value = RouterKind> {
    PossibleValuesParser::new(RouterKind::NAMES)
        .try_map(|name| RouterKind::from_name(&name).ok_or("not a router"))
}

/// Returns the sizes of a generator of up to `tokens` tokens. The weights get packed copies, unless these need more
/// than half of the machine's available memory.
pub fn batch_options<B: Backend>(model: &Model<B>, tokens: usize) -> BatchOptions {
    let packed = BatchGenerator::packed_bytes(model);
    let pack_weights = available_memory().is_none_or(|available| packed <= available / 2);
    BatchOptions { pack_weights, ..BatchOptions::for_tokens(tokens) }
}

/// Opens the device of the option `--device`.
pub fn open_device(device: DeviceName) -> anyhow::Result<OpenDevice> {
    OpenDevice::open(device, false).with_context(|| format!("--device {device}"))
}
