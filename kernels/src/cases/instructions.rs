//! The vector and matrix instructions that the operators know, for reports of measurements.

#[cfg(any(target_arch = "x86_64", doc))]
use crate::matmul::Bf16Path;

/// The instruction sets that the operators know, this processor has and the system lets programs
/// use. Which of them multiply bf16 matrices is [`Bf16Path`]'s choice.
pub fn instruction_sets() -> Vec<&'static str> {
    let known: Vec<(&str, bool)> = vec![
        #[cfg(target_arch = "x86_64")]
        ("AVX2", pulp::x86::V3::try_new().is_some()),
        #[cfg(target_arch = "x86_64")]
        ("AVX-512", pulp::x86::V4::try_new().is_some()),
        #[cfg(target_arch = "x86_64")]
        ("AVX512-BF16", Bf16Path::supported().any(|path| path == Bf16Path::Avx512)),
        #[cfg(target_arch = "aarch64")]
        ("NEON", std::arch::is_aarch64_feature_detected!("neon")),
    ];
    known.into_iter().filter(|(_, available)| *available).map(|(name, _)| name).collect()
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use super::instruction_sets;

    #[test]
    fn instruction_sets_are_those_that_linux_lists() {
        let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = processors.lines().find(|line| line.starts_with("flags")).unwrap();
        let found = instruction_sets();
        let flags: Vec<&str> = flags.split_whitespace().collect();
        for (name, flag) in
            [("AVX2", "avx2"), ("AVX-512", "avx512dq"), ("AVX512-BF16", "avx512_bf16")]
        {
            assert_eq!(found.contains(&name), flags.contains(&flag), "{name}: {found:?}");
        }
    }
}
