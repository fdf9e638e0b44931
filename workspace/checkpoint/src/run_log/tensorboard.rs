//! TensorBoard's event files, limited to scalars.
//!
//! An event file is a sequence of TFRecords: u64 length, masked crc32c of the length, data, masked
//! crc32c of the data, all little-endian. The data are `Event` messages of TensorFlow's protocol
//! buffers (event.proto, summary.proto), few enough to be encoded by hand. A resumed run starts a
//! new file with a session start, which makes TensorBoard drop later steps of older files.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use moh_model::router::{LayerRouting, RoutingStatistics};
use moh_step::Norms;

use crate::Result;
use crate::listing::names;
use crate::run_log::{Speed, StepMetrics};

const PREFIX: &str = "events.out.tfevents.";

// Field numbers of event.proto and summary.proto.
const EVENT_WALL_TIME: u64 = 1;
const EVENT_STEP: u64 = 2;
const EVENT_FILE_VERSION: u64 = 3;
const EVENT_SUMMARY: u64 = 5;
const EVENT_SESSION_LOG: u64 = 7;
const SUMMARY_VALUE: u64 = 1;
const VALUE_TAG: u64 = 1;
const VALUE_SIMPLE_VALUE: u64 = 2;
const SESSION_LOG_STATUS: u64 = 1;
const SESSION_START: u64 = 1;

// Wire types of protocol buffers.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const BYTES: u64 = 2;
const FIXED32: u64 = 5;

/// Writes the curves of one process.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
}

impl TensorBoard {
    /// Starts a new event file in `directory`, which is created if only its last component is missing. The run
    /// resumes from step `steps_kept` over all stages: later steps of older files no longer count.
    pub fn create(directory: &Path, steps_kept: u64) -> Result<Self> {
        moh_files::create_directory(directory).map_err(moh_files::io(directory))?;
        let mut known = names(directory)?;
        known.retain(|name| name.starts_with(PREFIX));
        let (path, file) = new_file(directory, &known)?;
        let mut board = TensorBoard { path, file };
        let mut version = event(0);
        put_bytes(&mut version, EVENT_FILE_VERSION, b"brain.Event:2");
        board.write_record(&version)?;
        if !known.is_empty() {
            let mut start = event(steps_kept + 1);
            let mut session = Vec::new();
            put_varint_field(&mut session, SESSION_LOG_STATUS, SESSION_START);
            put_bytes(&mut start, EVENT_SESSION_LOG, &session);
            board.write_record(&start)?;
        }
        Ok(board)
    }

    /// Adds a point to each curve. `step` counts over all stages.
    pub fn write(&mut self, step: u64, metrics: &StepMetrics) -> Result<()> {
        let validation = metrics.validation;
        let scalars = [
            ("loss", Some(metrics.loss)),
            ("learning_rate", Some(metrics.learning_rate)),
            ("grad_norm", Some(metrics.grad_norm)),
            ("tokens_per_second", Some(metrics.tokens_per_second)),
            ("validation_loss", validation.map(|v| v.loss)),
            ("validation_bits_per_byte", validation.and_then(|v| v.bits_per_byte)),
        ];
        let auxiliary = metrics.auxiliary.iter().map(|(loss, value)| (loss.name(), value));
        let scalars = scalars.into_iter().chain(auxiliary);
        let scalars = scalars.filter_map(|(tag, value)| Some((tag.to_owned(), value?)));
        let mut scalars: Vec<_> = scalars.collect();
        for (name, set) in &metrics.validation_sets {
            scalars.push((format!("validation/{name}/loss"), set.loss));
            let bits = set.bits_per_byte;
            scalars.extend(bits.map(|bits| (format!("validation/{name}/bits_per_byte"), bits)));
        }
        if let Some(norms) = &metrics.block_norms {
            scalars.extend(norm_scalars("gradient", &norms.gradient));
            scalars.extend(norm_scalars("weight", &norms.weight));
        }
        scalars.extend(metrics.speed.iter().flat_map(speed_scalars));
        self.write_scalars(step, &scalars)
    }

    /// Adds a point to the curves of each layer that routes: the gates' entropy, and the extremes
    /// of the heads' loads.
    pub fn write_routing(
        &mut self,
        step: u64,
        validation: &str,
        routing: &RoutingStatistics,
    ) -> Result<()> {
        let of = |layer: &LayerRouting| {
            let (smallest, largest) = layer.extreme_loads();
            let tag = |what| format!("routing/{validation}/layer_{:03}/{what}", layer.layer);
            [
                (tag("entropy"), layer.mean_entropy()),
                (tag("min_load"), smallest),
                (tag("max_load"), largest),
                (tag("imbalance"), layer.imbalance()),
            ]
        };
        let scalars: Vec<_> = routing.layers.iter().flat_map(of).collect();
        if scalars.is_empty() { Ok(()) } else { self.write_scalars(step, &scalars) }
    }

    fn write_scalars(&mut self, step: u64, scalars: &[(String, f64)]) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in scalars {
            let mut scalar = Vec::new();
            put_bytes(&mut scalar, VALUE_TAG, tag.as_bytes());
            put_varint(&mut scalar, VALUE_SIMPLE_VALUE << 3 | FIXED32);
            scalar.extend((*value as f32).to_le_bytes());
            put_bytes(&mut summary, SUMMARY_VALUE, &scalar);
        }
        let mut event = event(step);
        put_bytes(&mut event, EVENT_SUMMARY, &summary);
        self.write_record(&event)
    }

    fn write_record(&mut self, data: &[u8]) -> Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc(data).to_le_bytes());
        Ok(self.file.write_all(&record).map_err(moh_files::io(&self.path))?)
    }
}

/// Returns the curves of norms by block.
fn norm_scalars(of: &str, norms: &Norms) -> Vec<(String, f64)> {
    let tag = |part: &str| format!("norms/{of}/{part}");
    let blocks = norms.blocks.iter().enumerate();
    let blocks = blocks.map(|(block, norm)| (tag(&format!("block_{block:03}")), *norm));
    let ends = [(tag("embedding"), norms.embedding), (tag("final_norm"), norms.final_norm)];
    blocks.chain(ends).chain(norms.head.map(|head| (tag("head"), head))).collect()
}

/// Returns the curves of times, rates and memory.
fn speed_scalars(speed: &Speed) -> Vec<(String, f64)> {
    let seconds = [("seconds", speed.seconds)].into_iter().chain(speed.parts());
    let times = seconds.chain([("tflops", speed.tflops)]);
    let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
    let optional = [
        ("mfu", speed.mfu),
        ("resident_bytes", bytes(speed.resident_bytes)),
        ("peak_resident_bytes", bytes(speed.peak_resident_bytes)),
        ("device_bytes", bytes(speed.device_bytes)),
    ];
    let optional = optional.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let all = times.chain(optional);
    all.map(|(name, value)| (format!("speed/{name}"), value)).collect()
}

/// Creates a file with a name that sorts after the `known` names: TensorBoard reads files in that order.
fn new_file(directory: &Path, known: &[String]) -> Result<(PathBuf, File)> {
    let seconds = |name: &String| name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok();
    // A clock set back must not sort the new file before the old one.
    let newest = known.iter().filter_map(seconds).fold(now().as_secs(), u64::max);
    for number in 0..u32::MAX {
        let path = directory.join(format!("{PREFIX}{newest:010}.moh.{number:04}"));
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(moh_files::io(&path)(error).into()),
        }
    }
    Err(moh_files::io(directory)(std::io::ErrorKind::AlreadyExists.into()).into())
}

fn now() -> std::time::Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the checksum of TFRecords, rotated and offset, since data may contain checksums.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn event(step: u64) -> Vec<u8> {
    let mut event = Vec::new();
    put_varint(&mut event, EVENT_WALL_TIME << 3 | FIXED64);
    event.extend(now().as_secs_f64().to_le_bytes());
    put_varint_field(&mut event, EVENT_STEP, step);
    event
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_varint_field(out: &mut Vec<u8>, field: u64, value: u64) {
    put_varint(out, field << 3 | VARINT);
    put_varint(out, value);
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_varint(out, field << 3 | BYTES);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use moh_kernels::router::SharedHeads;
    use moh_step::BlockNorms;

    use super::*;
    use crate::run_log::Validation;

    /// A field of a message: its number, and its value as bytes or an integer.
    #[derive(Debug, PartialEq)]
    enum Field<'a> {
        Number(u64, u64),
        Bytes(u64, &'a [u8]),
    }

    fn varint(data: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = data[0];
            *data = &data[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }

    fn fields(mut data: &[u8]) -> Vec<Field<'_>> {
        let mut fields = Vec::new();
        while !data.is_empty() {
            let key = varint(&mut data);
            let field = key >> 3;
            let take = match key & 7 {
                VARINT => {
                    fields.push(Field::Number(field, varint(&mut data)));
                    continue;
                }
                FIXED64 => 8,
                FIXED32 => 4,
                BYTES => varint(&mut data) as usize,
                other => panic!("wire type {other}"),
            };
            fields.push(Field::Bytes(field, &data[..take]));
            data = &data[take..];
        }
        fields
    }

    fn records(mut file: &[u8]) -> Vec<&[u8]> {
        let mut records = Vec::new();
        while !file.is_empty() {
            let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let crc = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
            assert_eq!(crc(8), masked_crc(&file[..8]));
            let data = &file[12..12 + length];
            assert_eq!(crc(12 + length), masked_crc(data));
            records.push(data);
            file = &file[16 + length..];
        }
        records
    }

    fn metrics() -> StepMetrics {
        StepMetrics {
            loss: 2.5,
            learning_rate: 0.5,
            grad_norm: 1.25,
            tokens_per_second: 1e4,
            validation: Some(Validation { loss: 3.5, bits_per_byte: Some(1.5) }),
            ..StepMetrics::default()
        }
    }

    #[test]
    fn the_checksum_is_that_of_tfrecords() {
        // crc = 0xe3069283, the published crc32c of "123456789";
        // hex(((crc >> 15 | crc << 17) & 0xffffffff) + 0xa282ead8 & 0xffffffff)
        assert_eq!(masked_crc(b""), 0xa282_ead8);
        assert_eq!(masked_crc(b"123456789"), 0xc78a_b0e5);
    }

    fn scalars(record: &[u8]) -> (u64, Vec<(String, f32)>) {
        let event = fields(record);
        let [_, Field::Number(2, step), Field::Bytes(5, summary)] = event.as_slice() else {
            panic!("{event:?}");
        };
        let scalar = |value: Field<'_>| {
            let Field::Bytes(1, value) = value else {
                panic!("{value:?}");
            };
            match fields(value).as_slice() {
                [Field::Bytes(1, tag), Field::Bytes(2, number)] => (
                    String::from_utf8(tag.to_vec()).unwrap(),
                    f32::from_le_bytes((*number).try_into().unwrap()),
                ),
                other => panic!("{other:?}"),
            }
        };
        (*step, fields(summary).into_iter().map(scalar).collect())
    }

    #[test]
    fn sets_norms_speed_and_routing_have_tags_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(directory.path(), 0).unwrap();
        let norms = Norms { embedding: 1.0, blocks: vec![2.0], final_norm: 3.0, head: Some(4.0) };
        let set = Validation { loss: 5.0, bits_per_byte: None };
        let measured = StepMetrics {
            validation: None,
            validation_sets: BTreeMap::from([("code".to_owned(), set)]),
            block_norms: Some(BlockNorms { gradient: norms.clone(), weight: norms }),
            speed: Some(Speed { mfu: Some(0.5), ..Speed::default() }),
            ..metrics()
        };
        board.write(7, &measured).unwrap();
        let mut layer = LayerRouting::new(2, SharedHeads::first(1), 3);
        (layer.tokens, layer.selected) = (4, vec![1, 3]);
        board.write_routing(7, "code", &RoutingStatistics { layers: vec![layer] }).unwrap();
        let file = std::fs::read(&board.path).unwrap();
        let found: Vec<_> = records(&file)[1..].iter().map(|record| scalars(record)).collect();
        assert!(found.iter().all(|(step, _)| *step == 7));
        for (tag, value) in [
            ("validation/code/loss", 5.0),
            ("norms/gradient/block_000", 2.0),
            ("norms/weight/embedding", 1.0),
            ("norms/weight/final_norm", 3.0),
            ("norms/gradient/head", 4.0),
            ("speed/mfu", 0.5),
            ("speed/forward", 0.0),
            ("routing/code/layer_002/min_load", 0.25),
            ("routing/code/layer_002/max_load", 0.75),
            ("routing/code/layer_002/imbalance", 1.5),
            ("routing/code/layer_002/entropy", 0.0),
        ] {
            let mut all = found.iter().flat_map(|(_, scalars)| scalars);
            assert!(all.any(|scalar| *scalar == (tag.to_owned(), value)), "{tag}: {found:?}");
        }
    }

    #[test]
    fn written_scalars_decode() {
        let directory = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(&directory.path().join("new"), 0).unwrap();
        board.write(300, &metrics()).unwrap();
        let file = std::fs::read(&board.path).unwrap();
        let records = records(&file);
        assert_eq!(records.len(), 2);
        assert!(fields(records[0]).contains(&Field::Bytes(3, b"brain.Event:2")));
        let (step, scalars) = scalars(records[1]);
        assert_eq!(step, 300);
        let expected = [
            ("loss", 2.5),
            ("learning_rate", 0.5),
            ("grad_norm", 1.25),
            ("tokens_per_second", 1e4),
            ("validation_loss", 3.5),
            ("validation_bits_per_byte", 1.5),
        ];
        assert_eq!(scalars, expected.map(|(tag, value)| (tag.to_string(), value)));
    }

    #[test]
    fn a_continued_run_purges_from_its_first_step_in_a_later_file() {
        let directory = tempfile::tempdir().unwrap();
        let first = TensorBoard::create(directory.path(), 0).unwrap();
        assert_eq!(records(&std::fs::read(&first.path).unwrap()).len(), 1);
        let future = directory.path().join(format!("{PREFIX}9999999998.host.1"));
        std::fs::write(&future, b"").unwrap();
        let mut last = future;
        for kept in [0, 200] {
            let next = TensorBoard::create(directory.path(), kept).unwrap();
            assert!(last < next.path);
            last.clone_from(&next.path);
            let file = std::fs::read(&next.path).unwrap();
            let start = fields(records(&file)[1]);
            assert_eq!(start[1..], [Field::Number(2, kept + 1), Field::Bytes(7, &[8, 1])]);
        }
    }
}
