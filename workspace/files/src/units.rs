//! Formats quantities for users: numbers with nouns, grouped thousands, and units that keep numbers short.

/// Formats a number and its noun: `1 token`, `2 tokens`.
pub fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Formats a number with commas between thousands.
pub fn group_digits(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a value in the largest of `units` that it reaches. Each unit is `base` times the previous unit.
fn scaled(mut value: f64, base: f64, units: &[&str]) -> String {
    let mut index = 0;
    while value >= base && index + 1 < units.len() {
        value /= base;
        index += 1;
    }
    let unit = units.get(index).copied().unwrap_or_default();
    match index {
        0 => format!("{value:.0} {unit}"),
        _ => format!("{value:.2} {unit}"),
    }
}

/// Formats a number of bytes.
pub fn bytes(count: u64) -> String {
    scaled(count as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// Formats the bytes of traffic, in the powers of ten of network links.
pub fn traffic(count: f64) -> String {
    scaled(count, 1000.0, &["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

/// Formats a number of floating-point operations.
pub fn flops(count: f64) -> String {
    let units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"];
    scaled(count, 1000.0, &units)
}

/// Formats a share in percent.
pub fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// Formats a long time.
pub fn duration(seconds: f64) -> String {
    let (minute, hour, day) = (60.0, 3600.0, 86_400.0);
    match seconds {
        s if s >= 2.0 * day => format!("{:.1} days", s / day),
        s if s >= 2.0 * hour => format!("{:.1} hours", s / hour),
        s if s >= 2.0 * minute => format!("{:.1} minutes", s / minute),
        s => format!("{s:.1} seconds"),
    }
}

/// Formats a time within a step, which may be much shorter than a second.
pub fn moment(seconds: f64) -> String {
    match seconds {
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.1} ms", 1e3 * s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_print_in_readable_units() {
        assert_eq!(group_digits(0), "0");
        assert_eq!(group_digits(999), "999");
        assert_eq!(group_digits(1000), "1,000");
        assert_eq!(group_digits(1_234_567), "1,234,567");
        assert_eq!(
            [0, 1, 2].map(|number| counted(number, "token")),
            ["0 tokens", "1 token", "2 tokens"]
        );
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(3 << 29), "1.50 GiB");
        assert_eq!(traffic(2.5e9), "2.50 GB");
        assert_eq!(flops(5.334e10), "53.34 GFLOP");
        assert_eq!(percent(0.1234), "12.3%");
        assert_eq!(duration(90.0), "90.0 seconds");
        assert_eq!(duration(86_400.0 * 3.5), "3.5 days");
        assert_eq!(moment(12.34), "12.3 s");
        assert_eq!(moment(0.0123), "12.3 ms");
    }
}
