//! The compression of an input, by its first bytes, and the decoders. Other encodings are rejected with a remedy.

use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::GzDecoder;

use crate::prepare::names::is_standard_input;
use crate::prepare::reader::kinds;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstandard,
    Bzip2,
    Xz,
}

/// bzip2's first bytes, except the level, a digit after the first three bytes.
const BZIP2: (&[u8], &[u8]) = (b"BZh", b"1AY&SY");
/// bzip2's bytes after the level, for a file without content.
const EMPTY_BZIP2: &[u8] = b"\x17\x72\x45\x38\x50\x90";
/// Encodings that are not decoded: their first bytes, their name, and a program that decodes them to
/// standard output.
const REFUSED: [(&[u8], &str, &str); 3] = [
    (b"\x04\x22\x4d\x18", "LZ4", "lz4cat"),
    (b"PK\x03\x04", "zip", "unzip -p"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", "7z x -so"),
];
/// Byte-order marks of text that is not UTF-8, and the name of its encoding; longer marks first.
const BYTE_ORDER_MARKS: [(&[u8], &str); 4] = [
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
];
/// The base 2 logarithms of the smallest and of the largest window limit of a decoder. Files written without options
/// need the smallest limit.
const WINDOW_LOGS: (u32, u32) = (23, 31);

impl Compression {
    pub(crate) const NAMES: [&str; 5] = ["gz", "zst", "bz2", "xz", "gzip"];

    /// Returns the compression of an input that starts with these bytes.
    pub(crate) fn of(start: &[u8]) -> Self {
        let (first, block) = BZIP2;
        // A frame of Zstandard without text, as pzstd writes.
        let is_skippable_frame = matches!(start, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]);
        if start.starts_with(b"\x1f\x8b") {
            Compression::Gzip
        } else if start.starts_with(b"\x28\xb5\x2f\xfd") || is_skippable_frame {
            Compression::Zstandard
        } else if start.starts_with(b"\xfd7zXZ\0") {
            Compression::Xz
        } else if start.starts_with(first)
            && start.get(first.len() + 1..).is_some_and(|rest| rest == block || rest == EMPTY_BZIP2)
        {
            Compression::Bzip2
        } else {
            Compression::None
        }
    }

    pub(super) fn decoder<R: BufRead + Send + 'static>(
        self,
        source: R,
        max_window_bytes: usize,
    ) -> io::Result<Box<dyn Read + Send>> {
        let (least, most) = WINDOW_LOGS;
        let window_log = max_window_bytes.max(1).ilog2().clamp(least, most);
        Ok(match self {
            Compression::None => Box::new(source),
            Compression::Gzip => Box::new(Members::new(source)),
            Compression::Zstandard => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(source)?;
                decoder.window_log_max(window_log)?;
                Box::new(decoder)
            }
            Compression::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(source)),
            Compression::Xz => {
                let limit = max_window_bytes.max(1 << least) as u64;
                let stream = liblzma::stream::Stream::new_stream_decoder(
                    limit,
                    liblzma::stream::CONCATENATED,
                )
                .map_err(io::Error::other)?;
                Box::new(liblzma::bufread::XzDecoder::new_stream(source, stream))
            }
        })
    }
}

/// Returns why an input that starts with these bytes cannot be read, or `None`.
pub(crate) fn refusal(path: &Path, start: &[u8]) -> Option<String> {
    let name = match is_standard_input(path) {
        true => PathBuf::from("FILE"),
        false => path.to_path_buf(),
    };
    let shown = name.display();
    let is_json = |name: &Path| {
        name.extension()
            .is_some_and(|end| ["json", "jsonl"].iter().any(|json| end.eq_ignore_ascii_case(json)))
    };
    let is_zip = start.starts_with(b"PK\x03\x04") && !is_standard_input(path);
    let end = name.extension().and_then(|end| end.to_str()).filter(|end| *end != "zip" && is_zip);
    if let Some(reason) = end.and_then(|end| kinds::refusal(path, Some(end), &[])) {
        return Some(reason);
    }
    if let Some((_, encoding, program)) =
        REFUSED.into_iter().find(|(magic, ..)| start.starts_with(magic))
    {
        let inner = name.with_extension("");
        let format = if is_json(&inner) || is_standard_input(path) { "jsonl" } else { "text" };
        return Some(format!(
            "compressed with {encoding}: decompress it into standard input, as in \
             `{program} {shown} | moh-data prepare --format {format} ... -`"
        ));
    }
    let (_, encoding) = BYTE_ORDER_MARKS.into_iter().find(|(mark, _)| start.starts_with(mark))?;
    let format = if is_json(&name) || is_standard_input(path) { "jsonl" } else { "text" };
    Some(format!(
        "text in {encoding}: convert it to UTF-8, as in `iconv -f {encoding} -t UTF-8 {shown} | \
         moh-data prepare --format {format} ... -`"
    ))
}

const GZIP_MAGIC: &[u8] = b"\x1f\x8b";

/// Decodes the members of a gzip file one after another. Bytes after the last member are ignored, as by gzip itself:
/// zeros that fill a tape's block, or a signature.
struct Members<R> {
    /// `Some` between calls.
    member: Option<GzDecoder<R>>,
    is_finished: bool,
}

impl<R: BufRead> Members<R> {
    fn new(reader: R) -> Self {
        Self { member: Some(GzDecoder::new(reader)), is_finished: false }
    }
}

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let (Some(member), false) = (&mut self.member, self.is_finished || buffer.is_empty())
        {
            let read = member.read(buffer)?;
            if read > 0 {
                return Ok(read);
            }
            let Some(mut reader) = self.member.take().map(GzDecoder::into_inner) else { break };
            // A buffer of the reader may end between the two bytes. The first byte is enough to continue.
            let rest = reader.fill_buf()?;
            self.is_finished =
                rest.is_empty() || !GZIP_MAGIC.starts_with(&rest[..rest.len().min(2)]);
            self.member = Some(GzDecoder::new(reader));
        }
        Ok(0)
    }
}
