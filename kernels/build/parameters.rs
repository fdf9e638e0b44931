//! The structs that kernels have as parameters: the CUDA sources declare them, and this module
//! writes the same structs in Rust.
//!
//! A field has the same size and alignment in both languages, so `repr(C)` gives it the same
//! offset, and `Pod` rejects a struct with padding.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The macro that marks a struct (`warp.cuh`).
const MARK: &str = "PARAMETERS ";

/// The marked structs of some sources in Rust, by namespace.
#[derive(Default)]
pub struct Structs(BTreeMap<String, String>);

impl Structs {
    /// Adds the structs of a source; fails at a field with a form that `fields` does not support.
    pub fn read(&mut self, source: &str) -> Result<(), String> {
        let (mut namespace, mut comment) = (String::new(), String::new());
        let mut lines = source.lines().map(str::trim);
        while let Some(line) = lines.next() {
            let opened = |kind| line.strip_prefix(kind)?.strip_suffix(" {");
            if let Some(text) = line.strip_prefix("//") {
                let _ = writeln!(comment, "///{text}");
                continue;
            } else if let Some(name) = opened("namespace ") {
                namespace = name.into();
            } else if line.starts_with("}  // namespace") {
                namespace.clear();
            } else if let Some((align, name)) = opened("struct ").and_then(|it| it.split_once(MARK))
            {
                let representation = match align.trim().strip_prefix("alignas") {
                    Some(bytes) => format!("C, align{bytes}"),
                    None => "C".into(),
                };
                let fields = fields_of(&mut lines)?;
                let _ = write!(
                    self.0.entry(namespace.clone()).or_default(),
                    "{comment}#[repr({representation})]\n\
                     #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]\n\
                     pub(crate) struct {name} {{\n{fields}}}\n",
                );
            }
            comment.clear();
        }
        Ok(())
    }

    /// Returns a module for each namespace. A module refers to the others' structs by their names in C++.
    pub fn text(&self) -> String {
        let module = |(namespace, structs): (&String, &String)| match namespace.as_str() {
            "" => structs.clone(),
            name => format!(
                "pub(crate) mod {name} {{\n#[allow(unused_imports)]\nuse super::*;\n{structs}}}\n"
            ),
        };
        self.0.iter().map(module).collect()
    }
}

/// Returns the fields of a struct, up to its first method or its end.
fn fields_of<'a>(lines: &mut impl Iterator<Item = &'a str>) -> Result<String, String> {
    let (mut text, mut comment) = (String::new(), String::new());
    let mut has_method = false;
    for line in lines {
        has_method |= line.starts_with("__device__");
        if line == "};" {
            return Ok(text);
        } else if has_method || line.is_empty() {
            continue;
        } else if let Some(line) = line.strip_prefix("//") {
            let _ = writeln!(comment, "///{line}");
        } else {
            let fields = fields(line).ok_or_else(|| {
                format!(
                    "{line}: expected a field as TYPE NAME; or TYPE* NAME; or TYPE NAME[COUNT];"
                )
            })?;
            text += &std::mem::take(&mut comment);
            text += &fields;
        }
    }
    Err("a struct does not end".into())
}

/// Returns the fields of a line: `TYPE NAME;`, `TYPE* NAME;`, `TYPE NAME[COUNT];`, or for several names
/// `TYPE NAME, NAME;` and `TYPE *NAME, *NAME;`.
fn fields(line: &str) -> Option<String> {
    let line = line.strip_suffix(';')?;
    let (kind, names) = line.strip_prefix("const ").unwrap_or(line).split_once(' ')?;
    let pointers = kind.ends_with('*');
    let kind = match kind {
        "uint32_t" => "u32",
        "uint64_t" => "u64",
        "float" => "f32",
        "double" => "f64",
        other => other,
    };
    let field = |name: &str| {
        let (name, pointer) = name.strip_prefix('*').map_or((name, pointers), |name| (name, true));
        let kind = if pointer { "u64" } else { kind };
        let (name, kind) = match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
            Some((name, count)) => (name, format!("[{kind}; {count}]")),
            None => (name, kind.into()),
        };
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        is_name.then(|| format!("pub(crate) {name}: {kind},\n"))
    };
    // In `TYPE* NAME, NAME` only the first would be a pointer.
    let several = names.contains(',');
    if pointers && several { None } else { names.split(", ").map(field).collect() }
}
