//! Where results go. They are appended a line at a time, so whatever stops the program leaves whole lines and at most
//! one torn end.
//!
//! A packed file is a row of gzip members or Zstandard frames, each of whole lines. Readers of either format take them
//! as one text. A torn end is a member that ends too soon. [`Output::open`] finds the end of what is whole and cuts off
//! the rest. Each member begins with bytes that mark it as this program's ([`Packing::begin`]). They tell a torn member
//! from another program's data, and from a damaged member that others follow. The file itself is locked while it is
//! written. The system releases the lock when the process ends, however that happens.

use std::fmt::Display;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};

use super::identity::Identity;
use super::input::{Packing, WHOSE};
use super::result::{Seal, Written};
use crate::output::{ClosedPipe, note};
use crate::resolve::is_standard;

/// Packed lines are written once there are this many bytes of them…
const FLUSH_BYTES: usize = 256 << 10;
/// …or the first of them has waited this long.
const FLUSH_AFTER: Duration = Duration::from_millis(200);

/// A file or stream that results are written to.
pub struct Output {
    path: PathBuf,
    sink: Sink,
    packer: Packer,
}

enum Sink {
    /// A file, and the length of its whole part.
    File(File, u64),
    /// A pipe, a device or standard output, which no later run can continue.
    Stream(Box<dyn Write>),
}

impl Output {
    /// Opens `path`, or standard output for `-`. Calls `found` with each line that an earlier run has left there, and
    /// cuts off its torn end.
    ///
    /// # Errors
    /// If another run writes there, if it holds something other than results, or if the system refuses.
    pub fn open(path: &Path, found: &mut dyn FnMut(Written) -> anyhow::Result<()>) -> anyhow::Result<Self> {
        let packing = Packing::of_name(path);
        let output = |sink| Self { path: path.to_owned(), sink, packer: Packer::new(packing) };
        if is_standard(path) {
            return Ok(output(Sink::Stream(Box::new(io::stdout()))));
        }
        let cannot_open = || format!("cannot open {}", path.display());
        if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            let stream = OpenOptions::new().write(true).open(path).with_context(cannot_open)?;
            return Ok(output(Sink::Stream(Box::new(stream))));
        }
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.with_context(cannot_open)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("another run is writing {}; wait for it, or name another output", path.display())
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
        let whole = scan(&mut file, path, packing, found)?;
        let cut = || format!("cannot cut the torn end of {}", path.display());
        file.set_len(whole).with_context(cut)?;
        file.seek(SeekFrom::Start(whole)).with_context(cut)?;
        Ok(output(Sink::File(file, whole)))
    }

    /// Takes a line, with its end.
    pub fn push(&mut self, line: &str) {
        self.packer.push(line.as_bytes());
    }

    /// Whether a later run can continue what is written here.
    pub fn can_go_on(&self) -> bool {
        matches!(self.sink, Sink::File(..))
    }

    /// Whether it is time to write what was gathered.
    pub fn is_due(&self) -> bool {
        self.packer.is_due()
    }

    /// Writes all that was gathered.
    ///
    /// # Errors
    /// If the disk is full, a pipe is closed, or the system says anything else. A file then ends with a whole line, as
    /// it did before, and what was gathered is lost.
    pub fn flush(&mut self) -> anyhow::Result<()> {
        let packed = self.packer.take()?;
        let written = match &mut self.sink {
            Sink::File(file, whole) => match file.write_all(&packed) {
                Ok(()) => {
                    *whole += packed.len() as u64;
                    Ok(())
                }
                Err(error) => {
                    // If this fails too, the next run cuts off the end.
                    let _ = file.set_len(*whole);
                    Err(error)
                }
            },
            Sink::Stream(stream) => stream.write_all(&packed).and_then(|()| stream.flush()),
        };
        match written {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ClosedPipe.into()),
            Err(error) => {
                let full = matches!(
                    error.kind(),
                    io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge | io::ErrorKind::QuotaExceeded
                );
                let again = match self.sink {
                    Sink::File(..) if full => {
                        "; what is there is whole: make room, and the same command goes on from there"
                    }
                    Sink::File(..) => "; what is there is whole, and the same command goes on from there",
                    Sink::Stream(_) => "",
                };
                bail!("cannot write to {}: {error}{again}", self.path.display())
            }
        }
    }

    /// Writes all that was gathered, and has the system put it on the disk.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn finish(mut self) -> anyhow::Result<()> {
        self.flush()?;
        match self.sink {
            Sink::File(file, _) => file.sync_data().with_context(|| format!("cannot write to {}", self.path.display())),
            Sink::Stream(_) => Ok(()),
        }
    }
}

/// Gathers lines into members.
pub struct Packer {
    packing: Packing,
    pending: Vec<u8>,
    since: Instant,
}

impl Packer {
    /// A packer with nothing in it.
    pub fn new(packing: Packing) -> Self {
        Self { packing, pending: Vec::new(), since: Instant::now() }
    }

    /// Takes a line, with its end.
    pub fn push(&mut self, line: &[u8]) {
        if self.pending.is_empty() {
            self.since = Instant::now();
        }
        self.pending.extend_from_slice(line);
    }

    /// Whether enough was gathered, or the first line has waited long enough.
    pub fn is_due(&self) -> bool {
        let waits = !self.pending.is_empty();
        waits
            && (self.packing == Packing::None
                || self.pending.len() >= FLUSH_BYTES
                || self.since.elapsed() >= FLUSH_AFTER)
    }

    /// What was gathered, packed; empty if nothing was.
    ///
    /// # Errors
    /// If packing fails.
    pub fn take(&mut self) -> anyhow::Result<Vec<u8>> {
        let pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            return Ok(pending);
        }
        pack(&pending, self.packing).context("cannot pack results")
    }
}

/// Packs whole lines as one member.
fn pack(lines: &[u8], packing: Packing) -> io::Result<Vec<u8>> {
    match packing {
        Packing::None => Ok(lines.to_vec()),
        Packing::Gz => {
            let member = flate2::GzBuilder::new().comment(WHOSE);
            let mut member = member.write(Vec::new(), flate2::Compression::default());
            member.write_all(lines)?;
            member.finish()
        }
        Packing::Zst => {
            let mut frame = zstd::stream::write::Encoder::new(packing.begin(), 0)?;
            frame.include_checksum(true)?;
            frame.write_all(lines)?;
            frame.finish()
        }
    }
}

/// Goes through what an earlier run has left. Returns the length of its whole part.
fn scan(
    file: &mut File,
    path: &Path,
    packing: Packing,
    found: &mut dyn FnMut(Written) -> anyhow::Result<()>,
) -> anyhow::Result<u64> {
    let cannot_read = || format!("cannot read {}", path.display());
    let damaged = |at: u64, why: &dyn Display| {
        anyhow!(
            "{} is damaged from byte {at} on ({why}); restore it from a copy, or name another output",
            path.display()
        )
    };
    file.rewind().with_context(cannot_read)?;
    let mut reader = Counted { inner: BufReader::with_capacity(1 << 20, &*file), count: 0 };
    let (mut whole, mut line) = (0, 0);
    loop {
        let next = reader.fill_buf().with_context(cannot_read)?;
        if next.is_empty() {
            return Ok(whole);
        }
        if !packing.may_begin(next) {
            // After a crash some file systems leave zeros where nothing was written.
            let mut rest = Vec::new();
            if whole > 0 && next[0] == 0 && reader.read_to_end(&mut rest).is_ok() && is_blank(&rest) {
                return Ok(whole);
            }
            bail!("{} holds something else than packed results of this program; name another output", path.display());
        }
        let is_ours = packing.begins(next);
        let part = match packing {
            Packing::None => read_line(&mut reader),
            Packing::Gz => read_member(&mut flate2::bufread::GzDecoder::new(&mut reader)),
            Packing::Zst => {
                let decoder = zstd::stream::read::Decoder::with_buffer(&mut reader).with_context(cannot_read)?;
                read_member(&mut decoder.single_frame())
            }
        };
        for written in part.lines {
            line += 1;
            match written {
                Some(written) if part.end.is_ok() => {
                    if written.seal == Seal::Broken {
                        return Err(changed(path, line));
                    }
                    found(written)?;
                }
                Some(_) => {}
                None => bail!(
                    "{} holds something else than results of this program (line {line}); name another output",
                    path.display()
                ),
            }
        }
        match part.end {
            Ok(()) => whole = reader.count,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(_) if whole == 0 && !is_ours => bail!(
                "{} holds something else than packed results of this program; name another output",
                path.display()
            ),
            Err(error) => return Err(damaged(whole, &error)),
        }
    }
    if packing != Packing::None {
        let mut rest = Vec::new();
        file.seek(SeekFrom::Start(whole)).and_then(|_| file.read_to_end(&mut rest)).with_context(cannot_read)?;
        if whole == 0 && !packing.begins(&rest) {
            bail!("{} holds something else than packed results of this program; name another output", path.display());
        }
        // Nothing follows a torn end.
        if rest.windows(packing.begin().len()).skip(1).any(|bytes| packing.begins(bytes)) {
            return Err(damaged(whole, &"it ends too soon, and others follow"));
        }
    }
    Ok(whole)
}

/// The error for line `number` of `path`, a result that was changed after it was written.
pub fn changed(path: &Path, number: u64) -> anyhow::Error {
    anyhow!(
        "line {number} of {} is a result that was changed since it was written (its digest is that of another); restore it from a copy, \
         or take the line out, so that its request is answered again",
        path.display()
    )
}

/// Warns of `count` results that have no digest.
pub fn warn_of_unsealed(count: u64) {
    if count > 0 {
        note(&format!(
            "warning: {count} results have no digest, as an older version wrote them; whether they were changed since is not known"
        ));
    }
}

/// A line, or a member with several.
struct Part {
    /// Each line; `None` for a line that is not ours. Of a torn line, as much as there is.
    lines: Vec<Option<Written>>,
    /// Whether the part is whole, and if not, why. A torn part has [`UnexpectedEof`](io::ErrorKind::UnexpectedEof).
    end: io::Result<()>,
}

/// Reads a line of an unpacked file.
fn read_line(reader: &mut dyn BufRead) -> Part {
    let mut line = Vec::new();
    match reader.read_until(b'\n', &mut line) {
        Ok(_) if line.ends_with(b"\n") => Part { lines: vec![Written::parse(&line)], end: Ok(()) },
        Ok(_) => Part { lines: vec![torn(&line)], end: Err(io::ErrorKind::UnexpectedEof.into()) },
        Err(error) => Part { lines: Vec::new(), end: Err(error) },
    }
}

/// Reads all of a member.
fn read_member(member: &mut dyn Read) -> Part {
    let mut reader = BufReader::new(member);
    let mut lines = Vec::new();
    loop {
        let mut line = Vec::new();
        let end = match reader.read_until(b'\n', &mut line) {
            Ok(0) => return Part { lines, end: Ok(()) },
            Ok(_) if line.ends_with(b"\n") => {
                lines.push(Written::parse(&line));
                continue;
            }
            Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => Err(error),
        };
        lines.push(torn(&line));
        return Part { lines, end };
    }
}

/// A torn line, if it can be ours: the beginning of a result, whose identity does not matter since it could have become
/// any, or zeros, which a crash may leave.
fn torn(line: &[u8]) -> Option<Written> {
    let is_ours = is_blank(line) || Written::begins(line);
    is_ours.then_some(Written { identity: Identity { line: 0, digest: 0 }, fingerprint: None, seal: Seal::None })
}

/// Whether all bytes are zeros.
fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Counts the bytes that are consumed.
struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(out)?;
        self.count += count as u64;
        Ok(count)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, amount: usize) {
        self.count += amount as u64;
        self.inner.consume(amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: u64) -> String {
        let id = Identity { line: number, digest: 7 };
        format!(
            "{{\"id\":\"{id}\",\"custom_id\":null,\"response\":null,\"error\":{{\"text\":\"{}\"}}}}\n",
            "x".repeat(20)
        )
    }

    fn lines_in(path: &Path) -> anyhow::Result<Vec<u64>> {
        let mut lines = Vec::new();
        Output::open(path, &mut |written| {
            lines.push(written.identity.line);
            Ok(())
        })?;
        Ok(lines)
    }

    /// Wherever a file is cut off, what is left is whole lines from the first on, and more can follow.
    #[test]
    fn a_torn_end_is_cut_wherever_it_is_torn() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst"] {
            let path = dir.path().join(name);
            let mut output = Output::open(&path, &mut |_| Ok(())).unwrap();
            let mut ends = vec![(0, 0)];
            for part in 0..3u64 {
                for number in 0..3 {
                    output.push(&line(1 + part * 3 + number));
                }
                output.flush().unwrap();
                ends.push((std::fs::metadata(&path).unwrap().len() as usize, 3 * (part + 1)));
            }
            output.finish().unwrap();
            let bytes = std::fs::read(&path).unwrap();
            for cut in 0..=bytes.len() {
                std::fs::write(&path, &bytes[..cut]).unwrap();
                let lines = lines_in(&path).unwrap_or_else(|e| panic!("{name} cut at {cut}: {e}"));
                let least = ends.iter().filter(|end| end.0 <= cut).map(|end| end.1).max().unwrap();
                assert_eq!(lines, (1..=lines.len() as u64).collect::<Vec<_>>(), "{name} cut at {cut}");
                assert!(lines.len() as u64 >= least, "{name} cut at {cut}: {lines:?}");
                // What is left is whole: a second look finds the same and cuts nothing.
                let length = std::fs::metadata(&path).unwrap().len();
                assert_eq!(lines_in(&path).unwrap(), lines);
                assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
            }
        }
    }

    #[test]
    fn what_is_not_ours_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        for text in ["hello", "hello\n", "{\"id\":\"batch_req_x\"}\n", "\n"] {
            std::fs::write(&path, text).unwrap();
            let error = lines_in(&path).unwrap_err().to_string();
            assert!(error.contains("something else") && error.contains("notes.txt"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        let noise: Vec<u8> = (0..1 << 18).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&noise).unwrap();
        let (gz, zst) = (gz.finish().unwrap(), zstd::stream::encode_all(&noise[..], 3).unwrap());
        let packed = pack(b"packed\n", Packing::Gz).unwrap();
        for (name, text) in [
            ("notes.gz", &b"not packed\n"[..]),
            ("notes.gz", &packed),
            // Torn before anything can be read.
            ("notes.gz", &gz[..15]),
            ("notes.gz", &gz),
            ("notes.zst", &zst[..15]),
            ("notes.zst", &zst),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            let error = lines_in(&path).unwrap_err().to_string();
            assert!(error.contains("something else") && error.contains(name), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), text);
        }
    }

    #[test]
    fn zeros_at_the_end_are_cut() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst"] {
            let path = dir.path().join(name);
            let mut output = Output::open(&path, &mut |_| Ok(())).unwrap();
            output.push(&line(1));
            output.finish().unwrap();
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, [&bytes[..], &[0; 100]].concat()).unwrap();
            assert_eq!(lines_in(&path).unwrap(), [1]);
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
    }

    #[test]
    fn members_begin_with_whose_they_are() {
        for packing in [Packing::Gz, Packing::Zst] {
            let member = pack(b"line\n", packing).unwrap();
            assert!(member.starts_with(&packing.begin()), "{member:?}");
        }
    }

    /// Only an end may be torn. What is damaged before it is not for this program to throw away.
    #[test]
    fn what_is_damaged_in_the_middle_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["packed.jsonl.gz", "packed.jsonl.zst"] {
            let path = dir.path().join(name);
            let mut output = Output::open(&path, &mut |_| Ok(())).unwrap();
            for number in 1..=4 {
                output.push(&line(number));
                output.flush().unwrap();
            }
            output.finish().unwrap();
            let bytes = std::fs::read(&path).unwrap();
            for at in 0..bytes.len() * 3 / 4 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x10;
                std::fs::write(&path, &damaged).unwrap();
                // Some bits do not matter, such as those of a name.
                if let Ok(lines) = lines_in(&path) {
                    assert_eq!(lines, [1, 2, 3, 4], "{name} damaged at {at}");
                }
                assert_eq!(std::fs::read(&path).unwrap(), damaged, "{name} damaged at {at}");
            }
        }
    }

    #[test]
    fn two_runs_do_not_share_an_output() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results.jsonl");
        let first = Output::open(&path, &mut |_| Ok(())).unwrap();
        let second = Output::open(&path, &mut |_| Ok(())).err().unwrap().to_string();
        assert!(second.contains("another run"), "{second}");
        drop(first);
        assert!(Output::open(&path, &mut |_| Ok(())).is_ok());
    }
}
