//! The name of this machine's processor, for figures.

/// Identifies x86 processors: the vendor, the family and the model.
type Signature = (String, u8, u8);

/// Returns the processor's name, without marks, clock and number of cores, and its microarchitecture. If the
/// microarchitecture is unknown, returns family and model instead.
pub fn label() -> String {
    let (name, signature) = identity();
    labelled(short(&name), signature)
}

fn labelled(name: String, signature: Option<Signature>) -> String {
    let Some((vendor, family, model)) = signature else { return name };
    match microarchitecture(&vendor, family, model) {
        Some(microarchitecture) => format!("{name}, {microarchitecture}"),
        None => format!("{name}, family {family}, model {model}"),
    }
}

/// Returns the name of the processor's design, which a name in a virtual machine often omits.
///
/// Sources: Linux 6.11, `bsp_init_amd` in arch/x86/kernel/cpu/amd.c for AMD, and arch/x86/include/asm/intel-family.h
/// for Intel's servers.
fn microarchitecture(vendor: &str, family: u8, model: u8) -> Option<&'static str> {
    Some(match (vendor, family, model) {
        ("AuthenticAMD", 0x17, 0x00..=0x2f | 0x50..=0x5f) => "Zen",
        ("AuthenticAMD", 0x17, 0x30..=0x4f | 0x60..=0x7f | 0x90..=0x91 | 0xa0..=0xaf) => "Zen 2",
        ("AuthenticAMD", 0x19, 0x00..=0x0f | 0x20..=0x5f) => "Zen 3",
        ("AuthenticAMD", 0x19, 0x10..=0x1f | 0x60..=0xaf) => "Zen 4",
        ("AuthenticAMD", 0x1a, 0x00..=0x2f | 0x40..=0x4f | 0x60..=0x7f) => "Zen 5",
        ("GenuineIntel", 6, 0x55) => "Skylake",
        ("GenuineIntel", 6, 0x6a | 0x6c) => "Ice Lake",
        ("GenuineIntel", 6, 0x8f) => "Sapphire Rapids",
        ("GenuineIntel", 6, 0xcf) => "Emerald Rapids",
        ("GenuineIntel", 6, 0xad | 0xae) => "Granite Rapids",
        _ => return None,
    })
}

#[cfg(target_arch = "x86_64")]
fn identity() -> (String, Option<Signature>) {
    let cpuid = raw_cpuid::CpuId::new();
    let vendor = cpuid.get_vendor_info().map_or(String::new(), |vendor| vendor.as_str().to_owned());
    let features = cpuid.get_feature_info();
    let signature = features.map(|found| (vendor, found.family_id(), found.model_id()));
    let name = cpuid.get_processor_brand_string().map(|name| name.as_str().to_owned());
    (name.unwrap_or_default(), signature)
}

/// Returns the architecture, because only x86 processors can be asked for their name.
#[cfg(not(target_arch = "x86_64"))]
fn identity() -> (String, Option<Signature>) {
    (std::env::consts::ARCH.to_owned(), None)
}

/// Returns a processor's name without marks, clock, number of cores and words that all names have.
fn short(name: &str) -> String {
    let name = name.split(" @ ").next().unwrap_or_default();
    let name = ["(R)", "(r)", "(TM)", "(tm)"]
        .iter()
        .fold(name.to_owned(), |name, mark| name.replace(mark, ""));
    let says_nothing = |word: &&str| {
        matches!(*word, "CPU" | "Processor")
            || word.ends_with("-Core")
            || word.chars().any(char::is_control)
    };
    let words: Vec<&str> = name.split_whitespace().filter(|word| !says_nothing(word)).collect();
    if words.is_empty() { "unnamed processor".to_owned() } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_shortened_to_what_tells_processors_apart() {
        for (name, expected) in [
            ("AMD EPYC", "AMD EPYC"),
            ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654"),
            ("Intel(R) Xeon(R) Processor @ 2.60GHz", "Intel Xeon"),
            ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "Intel Xeon Platinum 8481C"),
            ("  13th Gen Intel(R) Core(TM) i7-1360P ", "13th Gen Intel Core i7-1360P"),
            ("", "unnamed processor"),
            ("Processor\u{1b}[2J \u{7}", "unnamed processor"),
        ] {
            assert_eq!(short(name), expected, "{name:?}");
        }
    }

    #[test]
    fn a_label_has_the_microarchitecture_or_the_numbers() {
        for (vendor, family, model, expected) in [
            ("AuthenticAMD", 25, 17, "A B, Zen 4"),
            ("AuthenticAMD", 26, 2, "A B, Zen 5"),
            ("GenuineIntel", 6, 143, "A B, Sapphire Rapids"),
            ("GenuineIntel", 25, 17, "A B, family 25, model 17"),
            ("other", 6, 143, "A B, family 6, model 143"),
        ] {
            let signature = (vendor.to_owned(), family, model);
            assert_eq!(labelled("A B".to_owned(), Some(signature)), expected);
        }
    }
}
