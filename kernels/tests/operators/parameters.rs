//! Declaration of kernels' parameters by the build (build/parameters.rs).

#[path = "../../build/parameters.rs"]
mod declaration;

use declaration::Structs;

/// Returns the Rust code of a source.
fn declared(source: &str) -> Result<String, String> {
    let mut structs = Structs::default();
    structs.read(source)?;
    Ok(structs.text())
}

const SOURCE: &str = "\
struct alignas(128) PARAMETERS Map {
    uint64_t words[16];
};

namespace attention {
// Not the host's.
struct Tile {
    int rows;
};

// Of one pass.
struct PARAMETERS Pass {
    // Keys, and
    // values.
    const bf16 *k, *v;
    void* out;

    rope::Angles angles;
    uint32_t heads, width;
    float scale;
    double eps;

    // Elements of a token.
    __device__ __forceinline__ uint32_t row() const {
        return heads * width;
    }
};
}  // namespace attention
";

const DECLARED: &str = "\
#[repr(C, align(128))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Map {
pub(crate) words: [u64; 16],
}
pub(crate) mod attention {
#[allow(unused_imports)]
use super::*;
/// Of one pass.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Pass {
/// Keys, and
/// values.
pub(crate) k: u64,
pub(crate) v: u64,
pub(crate) out: u64,
pub(crate) angles: rope::Angles,
pub(crate) heads: u32,
pub(crate) width: u32,
pub(crate) scale: f32,
pub(crate) eps: f64,
}
}
";

#[test]
fn marked_structs_are_declared_in_rust() {
    assert_eq!(declared(SOURCE).unwrap(), DECLARED);
}

#[test]
fn other_fields_are_refused() {
    for field in [
        "uint32_t heads",
        "uint32_t heads = 1;",
        "uint32_t heads : 3;",
        "uint32_t heads; // comment",
        "unsigned char* rows;",
        "const bf16* k, v;",
        "static constexpr int ROWS = 3;",
        "uint32_t row() const { return heads; }",
        "}",
    ] {
        let fault = declared(&SOURCE.replace("double eps;", field)).unwrap_err();
        assert!(fault.starts_with(&format!("{field}: expected a field")), "{fault}");
    }
    assert_eq!(declared("struct PARAMETERS Open {").unwrap_err(), "a struct does not end");
}
