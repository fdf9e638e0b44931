//! Operators compiled once, in this crate and with its optimisation.
//!
//! A generic function is compiled in every crate that calls it, with the optimisation of that crate. Operators
//! are most of a program's code and run slowly unless they are optimised: [`compiled!`] calls instances that
//! this crate has compiled for all element types, so that programs and tests only link them.

use std::any::Any;

/// An instance of a function, as a pointer of its type.
pub(crate) type Instance = &'static (dyn Any + Send + Sync);

/// Calls `function::<T>(arguments)`, or with two or three element types, of the given type. The function is
/// compiled here for every choice of its element types.
macro_rules! compiled {
    ($function:ident::<$t:ident>($($argument:expr),*): $type:ty) => {
        compiled!(@call $function, [$t], [f32] [half::bf16], ($($argument),*), $type)
    };
    ($function:ident::<$t:ident, $u:ident>($($argument:expr),*): $type:ty) => {
        compiled!(
            @call $function, [$t, $u],
            [f32, f32] [f32, half::bf16] [half::bf16, f32] [half::bf16, half::bf16],
            ($($argument),*), $type
        )
    };
    ($function:ident::<$t:ident, $u:ident, $v:ident>($($argument:expr),*): $type:ty) => {
        compiled!(
            @call $function, [$t, $u, $v],
            [f32, f32, f32] [f32, f32, half::bf16] [f32, half::bf16, f32] [f32, half::bf16, half::bf16]
            [half::bf16, f32, f32] [half::bf16, f32, half::bf16]
            [half::bf16, half::bf16, f32] [half::bf16, half::bf16, half::bf16],
            ($($argument),*), $type
        )
    };
    (@call $function:ident, [$($t:ident),+], $([$($element:ty),+])+, ($($argument:expr),*), $type:ty) => {{
        type Function<$($t),+> = $type;
        static INSTANCES: &[$crate::compiled::Instance] =
            &[$(&($function::<$($element),+> as Function<$($element),+>)),+];
        $crate::compiled::find::<Function<$($t),+>>(INSTANCES)($($argument),*)
    }};
}
pub(crate) use compiled;

/// The instance of this type.
pub(crate) fn find<F: Any>(instances: &[Instance]) -> &'static F {
    let found = instances.iter().find_map(|instance| instance.downcast_ref());
    // Element types are f32 and bf16: `compiled!` lists every choice of them.
    #[allow(clippy::expect_used)]
    found.expect("an instance for every choice of element types")
}
