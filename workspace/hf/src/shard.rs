//! Names of weight files of a model with several.

/// The name of file `number` of `count`, from 1, as transformers writes it.
pub(crate) fn name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// Whether [`name`] gives this name for some numbers.
pub(crate) fn is_name(text: &str) -> bool {
    let numbers = text
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"));
    let Some((number, count)) = numbers else { return false };
    match (number.parse(), count.parse()) {
        (Ok(number), Ok(count)) => text == name(number, count),
        _ => false,
    }
}
