//! Hardware profiles: the achieved speed of a device, a node and their network, from a TOML file. The keys are
//! documented in `docs/plan.md`. Profiles of common machines are in `recipes/hardware`.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::Path;

use moh_kernels::ElementType;
use moh_recipe::lines::Lines;
use moh_recipe::{KeyFault, Origins, is_below, reader};
use serde::Deserialize;
use toml::Value;

use super::rate::{Basis, Rate};
use crate::Error;

const MAX_FILE_BYTES: u64 = 1 << 20;
/// Maximum of rates and times. Products of several rates still fit an f64.
const MAX_NUMBER: f64 = 1e12;
const MIN_SHARE: f64 = 1e-3;
const MAX_BYTES: u64 = 1 << 50;
const MAX_RANKS: usize = 1 << 20;

/// Share of a device's memory that suggested layouts leave free.
const FREE_SHARE: f64 = 0.08;

/// A machine's achieved speeds, not its data sheet's.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Name in the plan.
    pub name: String,
    /// The device of one rank.
    pub device: DeviceRates,
    /// A node of several devices.
    pub node: Node,
    /// The network.
    pub network: Network,
}

/// `[device]`: one GPU, or one rank's share of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRates {
    pub memory_bytes: u64,
    pub reserved_bytes: u64,
    pub matmul_bf16_tflops: Rate,
    pub matmul_f32_tflops: Rate,
    pub attention_share: Rate,
    pub memory_gb_per_s: Rate,
}

/// `[node]`: ranks on one machine.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    pub ranks: usize,
    #[serde(default)]
    pub filesystem_write_gb_per_s: Option<Rate>,
    #[serde(default)]
    pub hash_gb_per_s: Option<Rate>,
}

/// `[network]`: communication between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    pub within_node_gb_per_s: Rate,
    pub between_nodes_gb_per_s: Rate,
    pub latency_us: Rate,
    pub data_overlap: Rate,
}

impl Hardware {
    /// Reads the profile at `path`.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is not TOML. Fails for unknown and missing keys and for values out of range,
    /// with the line if it is known.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let bytes = moh_files::read_bounded(path, MAX_FILE_BYTES, "a profile")?;
        Self::parse(&moh_files::utf8(path, bytes)?, path)
    }

    /// Loads a profile from `text`. Messages name it `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, Error> {
        let invalid = |error: moh_recipe::Error| Error::Invalid(error.to_string());
        let table = reader::parse_table(text)
            .map_err(|reason| invalid(moh_recipe::Error::at_key(path, "", reason)))?;
        let table = Value::Table(table);
        let reading = reader::read::<Hardware>(&table);
        let mut faults: Vec<KeyFault> = reading.problems.into_iter().map(KeyFault::from).collect();
        let is_known =
            |key: &str| !reading.stand_ins.iter().any(|stand_in| is_below(key, stand_in));
        // The reserved memory is compared with the device's memory.
        let depends = |key: &str| match key {
            "device.reserved_bytes" => is_known("device.memory_bytes"),
            _ => true,
        };
        if let Some(hardware) = &reading.value {
            let found = hardware.faults().into_iter();
            faults.extend(found.filter(|fault| is_known(&fault.key) && depends(&fault.key)));
        }
        match reading.value {
            Some(hardware) if faults.is_empty() => Ok(hardware),
            _ => {
                let faults = Origins::new(path, Lines::new(text)).name(faults);
                Err(invalid(moh_recipe::Error::Recipe { faults }))
            }
        }
    }

    /// Returns a fault for each value out of range.
    fn faults(&self) -> Vec<KeyFault> {
        let Hardware { device, node, network, .. } = self;
        let (memory, reserved) = (device.memory_bytes, device.reserved_bytes);
        let smaller = format!("must be below memory_bytes = {memory}");
        let optional = |key: &str, value: Option<Rate>| value.and_then(|value| rate(key, value));
        let found = [
            within("device.memory_bytes", memory, 1..=MAX_BYTES),
            refuse(reserved < memory, "device.reserved_bytes", reserved, smaller),
            rate("device.matmul_bf16_tflops", device.matmul_bf16_tflops),
            rate("device.matmul_f32_tflops", device.matmul_f32_tflops),
            within("device.attention_share", device.attention_share.value, MIN_SHARE..=10.0),
            rate("device.memory_gb_per_s", device.memory_gb_per_s),
            within("node.ranks", node.ranks, 1..=MAX_RANKS),
            optional("node.filesystem_write_gb_per_s", node.filesystem_write_gb_per_s),
            optional("node.hash_gb_per_s", node.hash_gb_per_s),
            rate("network.within_node_gb_per_s", network.within_node_gb_per_s),
            rate("network.between_nodes_gb_per_s", network.between_nodes_gb_per_s),
            within("network.latency_us", network.latency_us.value, 0.0..=MAX_NUMBER),
            within("network.data_overlap", network.data_overlap.value, 0.0..=1.0),
        ];
        found.into_iter().flatten().collect()
    }

    fn matmul_tflops(&self, dtype: ElementType) -> Rate {
        match dtype {
            ElementType::F32 => self.device.matmul_f32_tflops,
            ElementType::BF16 => self.device.matmul_bf16_tflops,
        }
    }

    /// Returns the FLOPs per second of matmuls in `dtype`.
    pub fn matmul(&self, dtype: ElementType) -> f64 {
        1e12 * self.matmul_tflops(dtype).value
    }

    /// Returns the bytes of memory that are available to a rank.
    pub fn usable_bytes(&self) -> u64 {
        self.device.memory_bytes.saturating_sub(self.device.reserved_bytes)
    }

    /// Returns the bytes of memory that a suggested layout may use: 8% of the device's memory stay free.
    pub fn suggested_bytes(&self) -> u64 {
        let most = (1.0 - FREE_SHARE) * self.device.memory_bytes as f64;
        self.usable_bytes().min(most as u64)
    }

    /// Returns the seconds in which all nodes of `ranks` ranks write a checkpoint of `bytes`, after each rank has
    /// hashed its part. Returns `None` if one of the rates is unknown.
    pub fn checkpoint_seconds(&self, bytes: u64, ranks: usize) -> Option<f64> {
        let (write, hash) = (self.node.filesystem_write_gb_per_s?, self.node.hash_gb_per_s?);
        let write = 1e9 * write.value * self.nodes(ranks) as f64;
        let hash = 1e9 * hash.value * ranks as f64;
        Some(bytes as f64 / write + bytes as f64 / hash)
    }

    /// Returns the basis of the rates of computation in `dtype`.
    pub(super) fn compute_basis(&self, dtype: ElementType) -> Basis {
        let DeviceRates { attention_share, memory_gb_per_s, .. } = self.device;
        let matmul = self.matmul_tflops(dtype).basis;
        matmul.max(attention_share.basis).max(memory_gb_per_s.basis)
    }

    /// Returns the basis of the rates of the network between `ranks` ranks.
    pub(super) fn network_basis(&self, ranks: usize) -> Basis {
        let Network { within_node_gb_per_s, between_nodes_gb_per_s, latency_us, .. } = self.network;
        let basis = within_node_gb_per_s.basis.max(latency_us.basis);
        if self.nodes(ranks) > 1 { basis.max(between_nodes_gb_per_s.basis) } else { basis }
    }

    /// Returns the basis of the rates of a checkpoint.
    pub(super) fn checkpoint_basis(&self) -> Option<Basis> {
        let Node { filesystem_write_gb_per_s, hash_gb_per_s, .. } = self.node;
        Some(filesystem_write_gb_per_s?.basis.max(hash_gb_per_s?.basis))
    }

    /// Returns the rates of a plan, each with its name and unit.
    pub(super) fn rates(&self) -> Vec<(&'static str, Rate, &'static str)> {
        let (device, node, network) = (self.device, self.node, self.network);
        let rates = [
            ("matrix products, bf16", Some(device.matmul_bf16_tflops), "TFLOP/s"),
            ("matrix products, f32", Some(device.matmul_f32_tflops), "TFLOP/s"),
            ("attention core", Some(device.attention_share), "of products"),
            ("memory", Some(device.memory_gb_per_s), "GB/s"),
            ("network within a node", Some(network.within_node_gb_per_s), "GB/s"),
            ("network between nodes", Some(network.between_nodes_gb_per_s), "GB/s"),
            ("latency", Some(network.latency_us), "us"),
            ("overlap of the data ranks' exchange", Some(network.data_overlap), "of it"),
            ("checkpoints, written by a node", node.filesystem_write_gb_per_s, "GB/s"),
            ("checkpoints, hashed by a rank", node.hash_gb_per_s, "GB/s"),
        ];
        let known = rates.into_iter().filter_map(|(name, rate, unit)| Some((name, rate?, unit)));
        known.collect()
    }

    /// Returns the number of nodes of `ranks` ranks.
    pub fn nodes(&self, ranks: usize) -> usize {
        ranks.div_ceil(self.node.ranks.max(1)).max(1)
    }

    /// Returns the bytes per second that each of `members` ranks, `stride` apart, sends in a ring. Between
    /// nodes every member has its own link, and a group uses the links of all its members in a
    /// node.
    pub(super) fn ring(&self, members: usize, stride: usize) -> f64 {
        let Network { within_node_gb_per_s, between_nodes_gb_per_s, .. } = self.network;
        let within = 1e9 * within_node_gb_per_s.value;
        if members.saturating_mul(stride) <= self.node.ranks {
            return within;
        }
        let per_node = (self.node.ranks / stride.max(1)).max(1);
        within.min(1e9 * between_nodes_gb_per_s.value * per_node as f64)
    }

    /// Returns the bytes per second of a send between two ranks; between nodes unless all `ranks` are in one
    /// node.
    pub(super) fn to_neighbour(&self, ranks: usize) -> f64 {
        let Network { within_node_gb_per_s, between_nodes_gb_per_s, .. } = self.network;
        let within = ranks <= self.node.ranks;
        1e9 * if within { within_node_gb_per_s } else { between_nodes_gb_per_s }.value
    }

    pub(super) fn latency(&self) -> f64 {
        1e-6 * self.network.latency_us.value
    }
}

/// Checks a rate, by which times are divided.
fn rate(key: &str, rate: Rate) -> Option<KeyFault> {
    within(key, rate.value, 1.0 / MAX_NUMBER..=MAX_NUMBER)
}

/// Returns the fault of a value out of range. NaN is always out of range.
fn within<T: PartialOrd + Display>(
    key: &str,
    value: T,
    limits: RangeInclusive<T>,
) -> Option<KeyFault> {
    let reason = format!("must be from {} to {}", limits.start(), limits.end());
    refuse(limits.contains(&value), key, value, reason)
}

fn refuse(fine: bool, key: &str, value: impl Display, reason: String) -> Option<KeyFault> {
    let reason = format!("{reason}, not {value}");
    let (origin, key) = (String::new(), key.to_owned());
    (!fine).then_some(KeyFault { origin, key, value: None, reason })
}

#[cfg(test)]
pub(crate) mod tests {
    use moh_testkit::assert_refused;
    use proptest::prelude::*;

    use super::*;

    fn profile() -> String {
        include_str!("../../../recipes/hardware/h100-sxm.toml").to_string()
    }

    fn parse(text: &str) -> Result<Hardware, Error> {
        Hardware::parse(text, Path::new("h.toml"))
    }

    pub(crate) fn h100() -> Hardware {
        parse(&profile()).unwrap()
    }

    fn refused(old: &str, new: &str) -> String {
        let text = profile();
        assert!(text.contains(old), "{old}");
        parse(&text.replacen(old, new, 1)).unwrap_err().to_string()
    }

    #[test]
    fn every_profile_of_ours_is_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/hardware");
        let mut count = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let hardware = Hardware::load(&path).unwrap();
            assert!(!hardware.name.is_empty() && hardware.usable_bytes() > 0);
            count += 1;
        }
        assert_eq!(count, 5);
    }

    #[test]
    fn faults_name_line_and_key() {
        let text = profile();
        let line = |key: &str| {
            text.lines().position(|line| line.trim_start().starts_with(key)).unwrap() + 1
        };
        let at = |key: &str, rest: &str| format!("h.toml: line {}: {rest}", line(key));
        let unknown = |key: &str, found: &str| {
            at(key, &format!("network.{found}: unknown key, did you mean network.{key}"))
        };
        for (old, new, expected) in [
            ("latency_us", "latency_ms", unknown("latency_us", "latency_ms")),
            ("data_overlap", "data_overlaps", unknown("data_overlap", "data_overlaps")),
            ("ranks = 8", "ranks = 0", at("ranks", "node.ranks: must be from 1 to 1048576, not 0")),
            (
                "ranks = 8",
                "ranks = 1.5",
                at("ranks", "node.ranks: must be a whole number from 0, not 1.5"),
            ),
            ("ranks = 8", "", at("[node]", "node.ranks: missing")),
            ("ranks = 8", "ranks = = 8", at("ranks", "")),
        ] {
            let message = refused(old, new);
            assert!(message.starts_with(&expected), "{message}\n{expected}");
        }
    }

    #[test]
    fn a_rate_says_how_it_is_known() {
        let basis = |rate: &str| {
            let text = profile().replace("{ value = 675, basis = \"assumed\" }", rate);
            let hardware = parse(&text)?;
            assert_eq!(hardware.device.matmul_bf16_tflops.value, 600.0);
            Ok::<Basis, Error>(hardware.device.matmul_bf16_tflops.basis)
        };
        for (rate, expected) in [
            ("600", Basis::Assumed),
            ("600.0", Basis::Assumed),
            ("{ value = 600, basis = \"measured\" }", Basis::Measured),
            ("{ value = 6e2, basis = \"published\" }", Basis::Published),
        ] {
            assert_eq!(basis(rate).unwrap(), expected);
        }
        for (rate, expected) in [
            ("{ value = 600 }", "matmul_bf16_tflops.basis: missing"),
            ("{ basis = \"assumed\" }", "matmul_bf16_tflops.value: missing"),
            ("{ value = 600, basis = \"guessed\" }", "must be \"measured\" or \"published\" or"),
            ("{ value = \"600\", basis = \"assumed\" }", "value: must be a number"),
            (
                "{ value = 600, basis = \"assumed\", of = 1 }",
                "unknown key of, expected one of value",
            ),
            ("\"600\"", "must be a number, or a table such as { value = 675, basis ="),
        ] {
            let message = basis(rate).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }

    #[test]
    fn a_checkpoint_is_hashed_by_ranks_and_written_by_nodes() {
        let mut hardware = h100();
        assert_eq!(hardware.checkpoint_seconds(80, 16), None);
        let rate = |value| Some(Rate { value, basis: Basis::Measured });
        hardware.node.filesystem_write_gb_per_s = rate(2.0);
        assert_eq!(hardware.checkpoint_seconds(80, 16), None);
        hardware.node.hash_gb_per_s = rate(1.0);
        // Two nodes at 2 GB/s, 16 ranks at 1 GB/s.
        assert_eq!(hardware.checkpoint_seconds(80_000_000_000, 16), Some(20.0 + 5.0));
    }

    #[test]
    fn all_faults_of_a_profile_come_at_once() {
        let text = profile().replace("reserved_bytes", "reserved").replace("latency_us = ", "# ");
        let text = text.replace("value = 0.9", "value = 1.9") + "more = 1\n";
        let message = parse(&text).unwrap_err().to_string();
        for expected in [
            "device.reserved: unknown key, did you mean device.reserved_bytes",
            "network.latency_us: missing",
            "network.data_overlap: must be from 0 to 1, not 1.9",
            "network.more: unknown key, expected one of",
        ] {
            assert!(message.contains(expected), "{expected}\n{message}");
        }
        assert_eq!(message.lines().count(), 4, "{message}");
    }

    #[test]
    fn values_out_of_their_limits_are_refused() {
        let number = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key)).unwrap();
            line.split('#').next().unwrap().trim_end().to_string()
        };
        for key in ["filesystem_write_gb_per_s", "hash_gb_per_s"] {
            let message = refused("ranks = 8", &format!("ranks = 8\n{key} = 0"));
            assert!(message.contains(&format!("node.{key}: must be from")), "{message}");
        }
        let text = profile();
        for (key, values) in [
            ("matmul_bf16_tflops", &["0", "-1", "nan", "inf", "1e300"][..]),
            ("attention_share", &["0", "nan", "11"]),
            ("data_overlap", &["-0.1", "1.1", "nan"]),
            ("latency_us", &["-1", "inf"]),
            ("memory_bytes", &["0", "9e15", "-1", "\"80 GB\""]),
            ("reserved_bytes", &["1e14"]),
            ("ranks", &["0", "9e9"]),
        ] {
            for value in values {
                let message = refused(&number(&text, key), &format!("{key} = {value}"));
                assert!(message.contains(key) && message.contains("must be"), "{message}");
            }
        }
    }

    #[test]
    fn files_that_are_no_profiles_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h.toml");
        assert_refused(Hardware::load(&path), "h.toml: No such file");
        std::fs::write(&path, b"\xff\xfe").unwrap();
        assert_refused(Hardware::load(&path), "not text in UTF-8");
        std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
        assert_refused(Hardware::load(&path), "a profile has at most");
        std::fs::write(&path, "[".repeat(100_000)).unwrap();
        assert_refused(Hardware::load(&path), "line 1: ");
    }

    #[test]
    fn a_group_uses_the_links_of_all_its_members_in_a_node() {
        let mut hardware = h100();
        hardware.network.within_node_gb_per_s.value = 300.0;
        hardware.network.between_nodes_gb_per_s.value = 40.0;
        // 8 in a node; 64 ranks side by side, 4 apart (two in each node), 8 apart.
        assert_eq!(hardware.ring(8, 1), 300e9);
        assert_eq!(hardware.ring(2, 4), 300e9);
        assert_eq!(hardware.ring(64, 1), 300e9);
        assert_eq!(hardware.ring(16, 4), 80e9);
        assert_eq!(hardware.ring(8, 8), 40e9);
        assert_eq!(hardware.ring(2, 100), 40e9);
        assert_eq!((hardware.to_neighbour(8), hardware.to_neighbour(16)), (300e9, 40e9));
        assert_eq!((hardware.nodes(1), hardware.nodes(8), hardware.nodes(9)), (1, 1, 2));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC*") {
            let _ = parse(&text);
        }
    }
}
