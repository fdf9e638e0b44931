//! A device's name on the command line: `cpu`, `cuda` or `cuda:N`.

use std::fmt;
use std::str::FromStr;

/// A device that is not open yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by its number on this machine.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| plain)
        };
        match text.split_once(':') {
            None if text == "cpu" => Ok(DeviceName::Cpu),
            None if text == "cuda" => Ok(DeviceName::Cuda(0)),
            Some(("cuda", digits)) if let Some(ordinal) = number(digits) => {
                Ok(DeviceName::Cuda(ordinal))
            }
            _ => Err("expected cpu, cuda or cuda:N".to_owned()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(0) => f.write_str("cuda"),
            DeviceName::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_kind_and_number() {
        for (text, expected) in [
            ("cpu", DeviceName::Cpu),
            ("cuda", DeviceName::Cuda(0)),
            ("cuda:3", DeviceName::Cuda(3)),
        ] {
            assert_eq!(text.parse(), Ok(expected));
            assert_eq!(expected.to_string(), text);
        }
        for text in ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "CUDA"] {
            assert!(text.parse::<DeviceName>().is_err(), "{text}");
        }
    }
}
