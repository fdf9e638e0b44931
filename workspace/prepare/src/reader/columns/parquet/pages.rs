//! The pages of a column, and how large they are before one is read. What a damaged or hostile table says about
//! its sizes is compared with the file and the column before memory is taken, and no page becomes larger than
//! it says: the crate itself sets no limit to what gzip and Brotli unpack to.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use parquet::arrow::arrow_reader::RowGroups;
use parquet::basic::{Compression, Encoding, Type};
use parquet::column::page::{Page, PageIterator, PageMetadata, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::file::properties::ReaderProperties;
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::serialized_reader::SerializedPageReader;

use super::{delta, plan};
use crate::Result;

/// Bytes of a page's header that are read at once.
const HEADER_BYTES: usize = 1 << 10;
/// Maximum pages of a column in a row group.
const MAX_PAGES: usize = 1 << 20;
/// Bytes that Brotli's decoder reads at once.
const BROTLI_BYTES: usize = 1 << 12;

type ParquetResult<T> = std::result::Result<T, ParquetError>;

/// A file whose length is known, and the sizes in the last page header that was read of it.
pub(super) struct Bounded {
    file: File,
    bytes: u64,
    sizes: Arc<Mutex<Option<Sizes>>>,
}

/// What a page's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    unpacked: u64,
    packed: u64,
}

/// Reads from a place of a file on. If that is a page's header, its sizes are noted.
pub(super) struct Header {
    input: BufReader<File>,
    /// Until the first bytes are read.
    sizes: Option<Arc<Mutex<Option<Sizes>>>>,
}

impl Bounded {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(moh_files::io(path))?;
        let bytes = file.metadata().map_err(moh_files::io(path))?.len();
        Ok(Self { file, bytes, sizes: Arc::default() })
    }

    /// The same file, for another column.
    fn another(&self) -> ParquetResult<Arc<Self>> {
        let file = self.file.try_clone()?;
        Ok(Arc::new(Self { file, bytes: self.bytes, sizes: Arc::default() }))
    }

    fn sizes(&self) -> ParquetResult<Sizes> {
        let sizes = *self.sizes.lock().unwrap_or_else(PoisonError::into_inner);
        sizes.ok_or_else(|| fault("a page's header is not one".to_owned()))
    }
}

fn fault(reason: String) -> ParquetError {
    ParquetError::General(reason)
}

impl Length for Bounded {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for Bounded {
    type T = Header;

    fn get_read(&self, start: u64) -> ParquetResult<Header> {
        let mut file = self.file.try_clone()?;
        file.seek(SeekFrom::Start(start))?;
        let input = BufReader::with_capacity(HEADER_BYTES, file);
        Ok(Header { input, sizes: Some(Arc::clone(&self.sizes)) })
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        match start.checked_add(length as u64) {
            Some(end) if end <= self.bytes => self.file.get_bytes(start, length),
            _ => Err(ParquetError::EOF(format!(
                "{length} bytes at byte {start} of a file of {} bytes",
                self.bytes
            ))),
        }
    }
}

impl Read for Header {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(sizes) = self.sizes.take() {
            let found = Sizes::of(self.input.fill_buf()?);
            *sizes.lock().unwrap_or_else(PoisonError::into_inner) = found;
        }
        self.input.read(buffer)
    }
}

impl Sizes {
    /// The sizes in a page header that starts with these bytes: the second and the third of its fields, after its
    /// kind, in Thrift's compact protocol.
    fn of(start: &[u8]) -> Option<Self> {
        let mut bytes = start.iter().copied();
        let mut field = || {
            // Thirty-two bits, with a number one above that of the field before.
            let is_next = bytes.next()? == 0x15;
            let mut value = 0;
            for shift in (0..35).step_by(7) {
                let byte = bytes.next()?;
                value |= u64::from(byte & 0x7f) << shift;
                if byte & 0x80 == 0 {
                    // The lowest bit is the sign.
                    return (is_next && value & 1 == 0).then_some(value >> 1);
                }
            }
            None
        };
        let (_kind, unpacked, packed) = (field()?, field()?, field()?);
        Some(Self { unpacked, packed })
    }
}

/// The pages of a column in a row group.
pub(super) struct Pages {
    inner: SerializedPageReader<Bounded>,
    file: Arc<Bounded>,
    kind: Type,
    /// Whether values may be null.
    has_levels: bool,
    /// The compression of pages that are unpacked here.
    unpacks: Option<Compression>,
}

impl Pages {
    fn open(file: &Bounded, column: &ColumnChunkMetaData, rows: usize) -> ParquetResult<Self> {
        let file = file.another()?;
        let compression = column.compression();
        let is_unlimited = matches!(compression, Compression::GZIP(_) | Compression::BROTLI(_));
        // Then the crate gives out pages as they are stored.
        let stored = column.clone().into_builder().set_compression(Compression::UNCOMPRESSED);
        let column = if is_unlimited { &stored.build()? } else { column };
        // The only other compression without a limit, older than what the format says.
        let properties = ReaderProperties::builder().set_backward_compatible_lz4(false).build();
        let inner = SerializedPageReader::new_with_properties(
            Arc::clone(&file),
            column,
            rows,
            None,
            Arc::new(properties),
        )?;
        let unpacks = is_unlimited.then_some(compression);
        let has_levels = column.column_descr().max_def_level() > 0;
        Ok(Self { inner, file, kind: column.column_type(), has_levels, unpacks })
    }

    /// A page as if it had not been compressed.
    fn unpacked(&self, page: Page, compression: Compression) -> ParquetResult<Page> {
        let unpacked = self.file.sizes()?.unpacked as usize;
        let unpack = |stored: &[u8], levels| unpack(stored, levels, unpacked, compression);
        Ok(match page {
            Page::DictionaryPage { buf, num_values, encoding, is_sorted } => {
                Page::DictionaryPage { buf: unpack(&buf, 0)?, num_values, encoding, is_sorted }
            }
            Page::DataPage {
                buf,
                num_values,
                encoding,
                def_level_encoding,
                rep_level_encoding,
                statistics,
            } => Page::DataPage {
                buf: unpack(&buf, 0)?,
                num_values,
                encoding,
                def_level_encoding,
                rep_level_encoding,
                statistics,
            },
            Page::DataPageV2 {
                buf,
                num_values,
                encoding,
                num_nulls,
                num_rows,
                def_levels_byte_len,
                rep_levels_byte_len,
                is_compressed,
                statistics,
            } => Page::DataPageV2 {
                buf: match is_compressed {
                    true => {
                        let levels = def_levels_byte_len as usize + rep_levels_byte_len as usize;
                        unpack(&buf, levels)?
                    }
                    false => buf,
                },
                num_values,
                encoding,
                num_nulls,
                num_rows,
                def_levels_byte_len,
                rep_levels_byte_len,
                is_compressed: false,
                statistics,
            },
        })
    }
}

/// What a page of `unpacked` bytes has, of which the first `levels` are not compressed.
fn unpack(
    stored: &[u8],
    levels: usize,
    unpacked: usize,
    compression: Compression,
) -> ParquetResult<Bytes> {
    let Some((levels, rest)) = stored.split_at_checked(levels) else {
        return Err(fault("a page is shorter than its levels".to_owned()));
    };
    let mut bytes = Vec::with_capacity(unpacked);
    bytes.extend_from_slice(levels);
    let missing = unpacked.saturating_sub(levels.len());
    if missing > 0 {
        let mut decoder: Box<dyn Read + '_> = match compression {
            Compression::BROTLI(_) => Box::new(brotli::Decompressor::new(rest, BROTLI_BYTES)),
            _ => Box::new(flate2::read::MultiGzDecoder::new(rest)),
        };
        decoder.by_ref().take(missing as u64).read_to_end(&mut bytes)?;
        if bytes.len() < unpacked || decoder.read(&mut [0])? > 0 {
            return Err(fault(format!(
                "a page does not unpack to the {unpacked} bytes that it says"
            )));
        }
    }
    Ok(Bytes::from(bytes))
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        let Some(page) = self.inner.get_next_page()? else { return Ok(None) };
        let page = match self.unpacks {
            Some(compression) => self.unpacked(page, compression)?,
            None => page,
        };
        if let Page::DictionaryPage { buf, num_values, .. } = &page {
            // Room for so many values is taken before they are read.
            let least = if self.kind == Type::BYTE_ARRAY { size_of::<u32>() } else { 1 };
            if *num_values as usize > buf.len() / least {
                let reason = format!("a dictionary of {num_values} values in {} bytes", buf.len());
                return Err(fault(reason));
            }
        }
        if delta::has_too_many_lengths(&page, self.has_levels) {
            return Err(fault("a page with more lengths than values".to_owned()));
        }
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        self.inner.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> ParquetResult<bool> {
        self.inner.at_record_boundary()
    }
}

impl Iterator for Pages {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

/// The sizes of a column's pages, by their headers alone.
pub(super) fn sizes(file: &Bounded, column: &ColumnChunkMetaData) -> ParquetResult<plan::Column> {
    let mut pages = Pages::open(file, column, 0)?;
    let is_packed = column.compression() != Compression::UNCOMPRESSED;
    let has = |encoding| column.encodings().any(|other| other == encoding);
    let expands = has(Encoding::DELTA_BYTE_ARRAY);
    // Lengths, which are decoded before the values: two of 32 bits each.
    let row_bytes = if expands || has(Encoding::DELTA_LENGTH_BYTE_ARRAY) { 8 } else { 0 };
    let mut found = plan::Column { expands, ..Default::default() };
    while let Some(page) = pages.peek_next_page()? {
        let Sizes { unpacked, packed } = pages.file.sizes()?;
        let all = column.uncompressed_size().max(0) as u64;
        if unpacked > all {
            return Err(fault(format!("a page of {unpacked} bytes in a column of {all}")));
        }
        let (unpacked, packed) = if is_packed { (unpacked, packed) } else { (packed, 0) };
        if page.is_dict {
            found.dictionary = found.dictionary.saturating_add(unpacked + packed);
        } else {
            let rows = page.num_rows.or(page.num_levels).unwrap_or(0) as u64;
            let packed = packed.saturating_add(rows.saturating_mul(row_bytes));
            found.pages.push(plan::Page { rows, unpacked, packed });
        }
        if found.pages.len() > MAX_PAGES {
            return Err(fault(format!("a column of more than {MAX_PAGES} pages")));
        }
        pages.skip_next_page()?;
    }
    Ok(found)
}

/// A row group of a file.
pub(super) struct Group<'a> {
    pub(super) file: &'a Bounded,
    pub(super) metadata: &'a ParquetMetaData,
    pub(super) number: usize,
}

/// The pages of a column in one row group.
struct Chunk(Option<Pages>);

impl RowGroups for Group<'_> {
    fn num_rows(&self) -> usize {
        self.metadata.row_group(self.number).num_rows().max(0) as usize
    }

    fn column_chunks(&self, column: usize) -> ParquetResult<Box<dyn PageIterator>> {
        let column = self.metadata.row_group(self.number).column(column);
        Ok(Box::new(Chunk(Some(Pages::open(self.file, column, self.num_rows())?))))
    }

    fn row_groups(&self) -> Box<dyn Iterator<Item = &RowGroupMetaData> + '_> {
        Box::new(std::iter::once(self.metadata.row_group(self.number)))
    }

    fn metadata(&self) -> &ParquetMetaData {
        self.metadata
    }
}

impl Iterator for Chunk {
    type Item = ParquetResult<Box<dyn PageReader>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.take().map(|pages| Ok(Box::new(pages) as Box<dyn PageReader>))
    }
}

impl PageIterator for Chunk {}

#[cfg(test)]
mod tests {
    use parquet::basic::{BrotliLevel, GzipLevel};

    use super::*;

    #[test]
    fn a_page_that_unpacks_to_more_than_it_says_is_not_unpacked_any_further() {
        let text = vec![b'a'; 10_000_000];
        let mut gzip = flate2::read::GzEncoder::new(&text[..], flate2::Compression::fast());
        let mut brotli = brotli::CompressorReader::new(&text[..], 4096, 1, 20);
        let (mut gzipped, mut brotlied) = (b"levels".to_vec(), b"levels".to_vec());
        gzip.read_to_end(&mut gzipped).unwrap();
        brotli.read_to_end(&mut brotlied).unwrap();
        let gzip = Compression::GZIP(GzipLevel::default());
        let brotli = Compression::BROTLI(BrotliLevel::default());
        for (stored, compression) in [(gzipped, gzip), (brotlied, brotli)] {
            let whole = unpack(&stored, 6, text.len() + 6, compression).unwrap();
            assert!(whole.starts_with(b"levelsaaa") && whole.len() == text.len() + 6);
            for says in [text.len() + 5, text.len() + 7, 7] {
                let error = unpack(&stored, 6, says, compression).unwrap_err().to_string();
                let part = format!("a page does not unpack to the {says} bytes that it says");
                assert!(error.contains(&part), "{error}");
            }
            assert!(unpack(&stored[..5], 6, text.len(), compression).is_err());
        }
    }

    #[test]
    fn the_sizes_of_a_page_are_in_its_header() {
        // parquet-format, PageHeader: type 0, uncompressed_page_size 300, compressed_page_size 5.
        let header = [0x15, 0, 0x15, 0xd8, 0x04, 0x15, 0x0a, 0x2c];
        assert_eq!(Sizes::of(&header), Some(Sizes { unpacked: 300, packed: 5 }));
        assert_eq!(Sizes::of(&header[..6]), None);
        // A negative size, another type, a number that does not end.
        assert_eq!(Sizes::of(&[0x15, 0, 0x15, 0x01, 0x15, 0x0a]), None);
        assert_eq!(Sizes::of(&[0x15, 0, 0x16, 0x02, 0x15, 0x0a]), None);
        assert_eq!(Sizes::of(&[0x15, 0, 0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]), None);
    }
}
