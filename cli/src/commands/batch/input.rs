//! Lines of requests, from a file or a pipe, packed or not.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use anyhow::Context;
use flate2::bufread::MultiGzDecoder;
use host::batch::BatchOptions;

use crate::resolve::is_standard;

/// Most bytes of a request's line. A longer line is refused and skipped, so that memory stays bounded.
pub const LONGEST: u64 = 64 << 20;
const BUFFER: usize = 256 << 10;
/// The byte order mark that some programs put before UTF-8 text, of which it is no part. Below, those of UTF-16 in
/// either byte order.
const MARK: &[u8] = b"\xef\xbb\xbf";
const UTF_16: [&[u8]; 2] = [b"\xff\xfe", b"\xfe\xff"];

/// Lines, one after the other.
pub struct Lines {
    reader: Box<dyn BufRead + Send>,
    /// Most bytes of a line.
    longest: u64,
    number: u64,
}

/// A line without its end.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// Counted from 1.
    pub number: u64,
    /// The line's bytes; `None` if it is longer than lines may be.
    pub bytes: Option<Vec<u8>>,
}

/// Whether `path` is a file, which can be read more than once.
pub fn is_file(path: &Path) -> bool {
    !is_standard(path) && path.is_file()
}

/// The number of requests in a file, if they are few. No more than that can run at once, so a device is prepared for
/// that many. `None` if there are more, if `path` is not a file, or if it cannot be read.
pub fn count_few(path: &Path) -> Option<u32> {
    // A pipe can be read only once.
    if !is_file(path) {
        return None;
    }
    let mut lines = Lines::open(path, LONGEST).ok()?;
    let mut count = 0;
    while count <= BatchOptions::DRAFT_ROWS {
        match lines.next() {
            Ok(Some(_)) => count += 1,
            Ok(None) => return Some(count.max(1)),
            Err(_) => return None,
        }
    }
    None
}

impl Lines {
    /// Opens a file, or standard input for `-`. Lines may have `longest` bytes.
    ///
    /// # Errors
    /// If it cannot be opened or read.
    pub fn open(path: &Path, longest: u64) -> anyhow::Result<Self> {
        let raw: Box<dyn Read + Send> = if is_standard(path) {
            Box::new(io::stdin())
        } else {
            Box::new(File::open(path).with_context(|| cannot_read(path))?)
        };
        Self::unpack(raw, longest).with_context(|| cannot_read(path))
    }

    /// Reads `raw`, which may be packed. The first bytes tell, so this works for a pipe as well.
    fn unpack(raw: Box<dyn Read + Send>, longest: u64) -> io::Result<Self> {
        let mut raw = raw;
        let mut first = Vec::new();
        raw.by_ref().take(4).read_to_end(&mut first)?;
        let packed_as = Packing::of_bytes(&first);
        let whole = BufReader::with_capacity(BUFFER, io::Cursor::new(first).chain(raw));
        let reader: Box<dyn BufRead + Send> = match packed_as {
            Packing::None => Box::new(whole),
            Packing::Gz => Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(whole))),
            Packing::Zst => {
                Box::new(BufReader::with_capacity(BUFFER, zstd::stream::read::Decoder::with_buffer(whole)?))
            }
        };
        Ok(Self { reader, longest, number: 0 })
    }

    /// The next line that is not blank.
    ///
    /// # Errors
    /// If it cannot be read, or packed data is broken.
    pub fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let mut bytes = Vec::new();
            let most = self.longest.saturating_add(1);
            let read = self.reader.by_ref().take(most).read_until(b'\n', &mut bytes)?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            let number = self.number;
            if number == 1 {
                if UTF_16.iter().any(|mark| bytes.starts_with(mark)) {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "it is UTF-16 text; save it as UTF-8"));
                }
                if bytes.starts_with(MARK) {
                    bytes.drain(..MARK.len());
                }
            }
            if bytes.last() != Some(&b'\n') && read as u64 > self.longest {
                self.reader.skip_until(b'\n')?;
                return Ok(Some(Line { number, bytes: None }));
            }
            while bytes.last().is_some_and(u8::is_ascii_whitespace) {
                bytes.pop();
            }
            if !bytes.is_empty() {
                return Ok(Some(Line { number, bytes: Some(bytes) }));
            }
        }
    }
}

/// The message if `path` cannot be read.
pub fn cannot_read(path: &Path) -> String {
    if is_standard(path) { "cannot read standard input".into() } else { format!("cannot read {}", path.display()) }
}

/// How a file is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Not at all.
    None,
    /// gzip.
    Gz,
    /// Zstandard.
    Zst,
}

impl Packing {
    /// The packing that a file's name asks for.
    pub fn of_name(path: &Path) -> Self {
        match path.extension().and_then(|e| e.to_str()) {
            Some("gz") => Packing::Gz,
            Some("zst") => Packing::Zst,
            _ => Packing::None,
        }
    }

    /// What packed data may begin with. gzip: RFC 1952. Zstandard: RFC 8878, a frame or a skippable frame.
    fn magic(self) -> &'static [&'static [u8]] {
        match self {
            Packing::None => &[&[]],
            Packing::Gz => &[&[0x1f, 0x8b]],
            Packing::Zst => &[&[0x28, 0xb5, 0x2f, 0xfd], SKIPPED],
        }
    }

    /// The packing of data that begins with `first`.
    pub fn of_bytes(first: &[u8]) -> Self {
        let is = |packing: &Packing| packing.magic().iter().any(|magic| first.starts_with(magic));
        [Packing::Gz, Packing::Zst].into_iter().find(is).unwrap_or(Packing::None)
    }

    /// Whether data of this packing may begin with these bytes, which may be cut short.
    pub fn may_begin(self, first: &[u8]) -> bool {
        self.magic().iter().any(|magic| magic.iter().zip(first).all(|(a, b)| a == b))
    }

    /// The bytes with which each member that this program writes begins, and which readers ignore: the comment of a
    /// gzip member, or a skippable frame before a Zstandard frame.
    pub fn begin(self) -> Vec<u8> {
        let name = WHOSE.as_bytes();
        match self {
            Packing::None => Vec::new(),
            // Deflate, with a comment, no time, and an unknown system.
            Packing::Gz => [&[0x1f, 0x8b, 8, 0x10, 0, 0, 0, 0, 0, 0xff], name, &[0]].concat(),
            Packing::Zst => [SKIPPED, &(name.len() as u32).to_le_bytes(), name].concat(),
        }
    }

    /// Whether these bytes, which may be cut short, begin a member of this program.
    pub fn begins(self, bytes: &[u8]) -> bool {
        self.begin().iter().zip(bytes).all(|(a, b)| a == b)
    }
}

/// Marks a packed file as this program's.
pub const WHOSE: &str = "warpdraft";
/// The magic number of a skippable frame.
const SKIPPED: &[u8] = &[0x50, 0x2a, 0x4d, 0x18];

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn lines(bytes: Vec<u8>) -> Vec<Line> {
        let mut lines = Lines::unpack(Box::new(io::Cursor::new(bytes)), LONGEST).unwrap();
        std::iter::from_fn(|| lines.next().unwrap()).collect()
    }

    fn line(number: u64, text: &str) -> Line {
        Line { number, bytes: Some(text.as_bytes().to_vec()) }
    }

    #[test]
    fn blank_lines_count_and_are_passed_over() {
        assert_eq!(lines(b"a\n\n \r\nb\r\nc".to_vec()), [line(1, "a"), line(4, "b"), line(5, "c")]);
        assert_eq!(lines(Vec::new()), []);
        assert_eq!(lines(b"\n\n".to_vec()), []);
    }

    #[test]
    fn few_requests_are_counted() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(count_few(file.path()), Some(1));
        for count in 1..=20 {
            file.write_all(b"{}\n\n").unwrap();
            assert_eq!(count_few(file.path()), (count <= BatchOptions::DRAFT_ROWS).then_some(count));
        }
        assert_eq!(count_few(Path::new("-")), None);
        assert_eq!(count_few(&file.path().join("none")), None);
    }

    #[test]
    fn packed_lines_are_told_by_their_first_bytes() {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(b"a\nb\n").unwrap();
        let gz = gz.finish().unwrap();
        // Several members in a row are one text.
        assert_eq!(lines([gz.clone(), gz].concat()).len(), 4);
        let zst = zstd::stream::encode_all(&b"a\nb\n"[..], 3).unwrap();
        assert_eq!(lines([zst.clone(), zst.clone()].concat()).len(), 4);
        assert_eq!(lines([Packing::Zst.begin(), zst].concat()).len(), 2);
    }

    #[test]
    fn marks_of_encodings_are_no_text() {
        assert_eq!(lines(b"\xef\xbb\xbfa\n\xef\xbb\xbfb".to_vec()), [line(1, "a"), line(2, "\u{feff}b")]);
        for text in [b"\xff\xfea\0\n\0", b"\xfe\xff\0a\0\n"] {
            let mut lines = Lines::unpack(Box::new(io::Cursor::new(text.to_vec())), LONGEST).unwrap();
            let error = lines.next().unwrap_err();
            assert!(error.to_string().contains("UTF-16"), "{error}");
        }
    }

    #[test]
    fn a_line_without_end_is_passed_over_in_bounded_memory() {
        let long = || Box::new(io::repeat(b'x').take(LONGEST + 10).chain(io::Cursor::new(b"\nnext\n".to_vec())));
        let mut lines = Lines::unpack(long(), LONGEST).unwrap();
        assert_eq!(lines.next().unwrap(), Some(Line { number: 1, bytes: None }));
        assert_eq!(lines.next().unwrap(), Some(line(2, "next")));
        // Results have no limit.
        let mut lines = Lines::unpack(long(), u64::MAX).unwrap();
        assert_eq!(lines.next().unwrap().unwrap().bytes.unwrap().len() as u64, LONGEST + 10);
    }
}
