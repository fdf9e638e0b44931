//! Operators compiled once, in this crate and with its optimisation.
//!
//! A generic function is compiled in every crate that calls it, with the optimisation of that crate. Operators
//! are slow without optimisation, and take long to compile. [`compiled!`] calls an instance that was compiled in this
//! crate: programs and tests link it.

use std::any::Any;

/// An instance of a function, as a pointer of the function's type.
pub(crate) type Instance = &'static (dyn Any + Send + Sync);

/// `compiled!(function::<T>(argument: type) -> type)` calls `function::<T>` with these variables as arguments of these
/// types, and works with two or three element types too. Without a result type, the result is `Result<()>`. The
/// function is compiled in this crate for every choice of f32 and bf16.
macro_rules! compiled {
    ($function:ident::<$($t:ident),+>($($argument:ident: $type:ty),*)) => {
        compiled!($function::<$($t),+>($($argument: $type),*) -> $crate::error::Result<()>)
    };
    ($function:ident::<$($t:ident),+>($($argument:ident: $type:ty),*) -> $result:ty) => {
        compiled!(@each [$($t),+] $function, ($($argument),*), fn($($type),*) -> $result)
    };
    (@each [$t:ident] $($call:tt)*) => {
        compiled!(@call [$t], [f32] [half::bf16], $($call)*)
    };
    (@each [$t:ident, $u:ident] $($call:tt)*) => {
        compiled!(
            @call [$t, $u],
            [f32, f32] [f32, half::bf16] [half::bf16, f32] [half::bf16, half::bf16],
            $($call)*
        )
    };
    (@each [$t:ident, $u:ident, $v:ident] $($call:tt)*) => {
        compiled!(
            @call [$t, $u, $v],
            [f32, f32, f32] [f32, f32, half::bf16] [f32, half::bf16, f32] [f32, half::bf16, half::bf16]
            [half::bf16, f32, f32] [half::bf16, f32, half::bf16]
            [half::bf16, half::bf16, f32] [half::bf16, half::bf16, half::bf16],
            $($call)*
        )
    };
    (@call [$($t:ident),+], $([$($element:ty),+])+, $function:ident, ($($argument:ident),*), $type:ty) => {{
        type Function<$($t),+> = $type;
        static INSTANCES: &[$crate::compiled::Instance] =
            &[$(&($function::<$($element),+> as Function<$($element),+>)),+];
        $crate::compiled::find::<Function<$($t),+>>(INSTANCES)($($argument),*)
    }};
}
pub(crate) use compiled;

pub(crate) fn find<F: Any>(instances: &[Instance]) -> &'static F {
    let found = instances.iter().find_map(|instance| instance.downcast_ref());
    // Element types are f32 and bf16: `compiled!` lists every choice of them.
    #[allow(clippy::expect_used)]
    found.expect("an instance for every choice of element types")
}
