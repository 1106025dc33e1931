//! Where a checkpoint's files are: a directory, or inside the program.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::header;
use crate::Error;

/// A mapped file. Miri cannot map files: under Miri it is read into memory.
#[cfg(not(miri))]
type Map = memmap2::Mmap;
#[cfg(miri)]
type Map = Vec<u8>;

/// Bytes that stay put for as long as the checkpoint lives.
#[derive(Debug)]
pub(super) enum Bytes {
    /// A file, mapped.
    Mapped { map: Map, file: File },
    /// Embedded in the program.
    #[cfg_attr(not(feature = "bundled-demo"), allow(dead_code))]
    Static(&'static [u8]),
    /// No bytes: an empty file, which the system refuses to map, or a remote file.
    Empty,
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped { map, .. } => map,
            Bytes::Static(bytes) => bytes,
            Bytes::Empty => &[],
        }
    }
}

impl Bytes {
    /// Copies the bytes from `at` on to `out`. A file is read instead of copied from its map, which takes less than
    /// half of the time that mapping its pages one after another takes.
    pub(super) fn read(&self, at: usize, out: &mut [u8]) -> io::Result<()> {
        match self {
            Bytes::Mapped { file, .. } => file.read_exact_at(out, at as u64),
            Bytes::Static(_) | Bytes::Empty => {
                let bytes = self.get(at..at + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                out.copy_from_slice(bytes);
                Ok(())
            }
        }
    }
}

/// The beginning of a safetensors file, up to the end of its header, or less if the file ends before.
pub(crate) struct Header {
    pub(crate) bytes: Vec<u8>,
    /// Bytes of the whole file.
    pub(crate) file_length: u64,
}

/// Files that are not on this machine. Only small files, and headers, are read.
#[cfg_attr(not(feature = "hub"), allow(dead_code))]
pub(crate) trait RemoteFiles {
    /// The path that messages give for a file.
    fn path(&self, name: &str) -> PathBuf;
    /// Whether there is a file of that name.
    fn has(&self, name: &str) -> bool;
    /// Content of a file that is there.
    fn read(&self, name: &str) -> Result<Vec<u8>, Error>;
    /// Header of a safetensors file that is there.
    fn header(&self, name: &str) -> Result<Header, Error>;
}

/// A set of files by name.
#[derive(Clone)]
pub(super) enum Files<'a> {
    Dir(PathBuf),
    #[cfg_attr(not(feature = "hub"), allow(dead_code))]
    Remote(&'a dyn RemoteFiles),
    /// Name and content of each file.
    #[cfg_attr(not(feature = "bundled-demo"), allow(dead_code))]
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl Files<'_> {
    /// The path that messages give for a file.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        match self {
            Files::Dir(dir) => dir.join(name),
            Files::Remote(files) => files.path(name),
            Files::Embedded(_) => Path::new("demo").join(name),
        }
    }

    /// Whether there is a file of that name.
    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Files::Dir(dir) => dir.join(name).is_file(),
            Files::Remote(files) => files.has(name),
            Files::Embedded(files) => embedded(files, name).is_some(),
        }
    }

    /// Content of a file, or `None` if there is none of that name.
    pub(super) fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, Error> {
        match self {
            Files::Dir(dir) => read_regular(&dir.join(name)).map(|bytes| bytes.map(Cow::Owned)),
            Files::Remote(files) => files.has(name).then(|| files.read(name).map(Cow::Owned)).transpose(),
            Files::Embedded(files) => Ok(embedded(files, name).map(Cow::Borrowed)),
        }
    }

    /// Content of a file that must be there.
    pub(super) fn require(&self, name: &str, mend: &'static str) -> Result<Cow<'static, [u8]>, Error> {
        self.read(name)?.ok_or_else(|| Error::MissingFile { path: self.path(name), mend })
    }

    /// Maps a safetensors file into memory and reads its header, or gives `None` if there is no file of that name. Of a
    /// remote file only the header is read: its bytes are `Bytes::Empty`.
    pub(super) fn shard(&self, name: &str) -> Result<Option<(Bytes, Vec<header::Entry>)>, Error> {
        let bytes = match self {
            Files::Dir(dir) => map(&dir.join(name))?,
            Files::Remote(files) if files.has(name) => {
                let Header { bytes, file_length } = files.header(name)?;
                let entries = header::read(&bytes, file_length, &self.path(name))?;
                return Ok(Some((Bytes::Empty, entries)));
            }
            Files::Remote(_) => None,
            Files::Embedded(files) => embedded(files, name).map(Bytes::Static),
        };
        let Some(bytes) = bytes else { return Ok(None) };
        let entries = header::read(&bytes, bytes.len() as u64, &self.path(name))?;
        Ok(Some((bytes, entries)))
    }
}

/// Maps a regular file into memory, or gives `None` if there is nothing at `path`.
fn map(path: &Path) -> Result<Option<Bytes>, Error> {
    let failed = |source| Error::Io { path: path.to_owned(), source };
    let Some(file) = open_regular(path)? else { return Ok(None) };
    if file.metadata().map_err(failed)?.len() == 0 {
        return Ok(Some(Bytes::Empty));
    }
    #[cfg(not(miri))]
    // SAFETY: the map is private to this process and read only. Another process that truncates the
    // file while we run would end ours with SIGBUS; every program that maps weights accepts that.
    let map = unsafe { Map::map(&file) }.map_err(failed)?;
    #[cfg(miri)]
    let map = read_all(&file).map_err(failed)?;
    Ok(Some(Bytes::Mapped { map, file }))
}

/// Content of a regular file, or `None` if there is nothing at `path`.
pub(crate) fn read_regular(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let Some(file) = open_regular(path)? else { return Ok(None) };
    read_all(&file).map(Some).map_err(|source| Error::Io { path: path.to_owned(), source })
}

fn read_all(mut file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file, or gives `None` if there is nothing at `path`. Opening a FIFO would wait for a writer, and a
/// device may have no end. So the kind of the file is checked before it is opened, and again once it is open.
fn open_regular(path: &Path) -> Result<Option<File>, Error> {
    let opened = || -> io::Result<Option<File>> {
        let metadata = std::fs::metadata(path)?;
        if metadata.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if !metadata.is_file() {
            return Ok(None);
        }
        let file = File::open(path)?;
        Ok(file.metadata()?.is_file().then_some(file))
    };
    match opened() {
        Ok(Some(file)) => Ok(Some(file)),
        Ok(None) => Err(Error::NotAFile { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path: path.to_owned(), source }),
    }
}

fn embedded(files: &[(&str, &'static [u8])], name: &str) -> Option<&'static [u8]> {
    files.iter().find(|(n, _)| *n == name).map(|(_, bytes)| *bytes)
}
