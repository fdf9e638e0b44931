//! The GPU of a test.

use std::sync::OnceLock;

use moh_kernels::Cuda;

/// Returns the first GPU if the variable MOH_TEST_GPU is set: a machine that compiles for GPUs need not
/// have a GPU. Each thread, and so each test, opens it once.
pub fn gpu() -> Option<Cuda> {
    // The driver's context is destroyed with the process's last GPU, and is slow to create again.
    static FIRST: OnceLock<Cuda> = OnceLock::new();
    thread_local! {
        static OWN: Cuda = Cuda::new(0).unwrap();
    }
    std::env::var_os("MOH_TEST_GPU")?;
    FIRST.get_or_init(|| Cuda::new(0).unwrap());
    Some(OWN.with(Cuda::clone))
}
