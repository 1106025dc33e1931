//! Where a checkpoint's files are: a directory, or inside the program.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::Error;

/// Bytes that stay put for as long as the checkpoint lives.
#[derive(Debug)]
pub(super) enum Bytes {
    /// A file, mapped.
    Mapped { map: Mmap, file: File },
    /// Embedded in the program.
    #[cfg_attr(not(feature = "bundled-demo"), allow(dead_code))]
    Static(&'static [u8]),
    /// The mapping of an empty file, which the system refuses to make.
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
    /// Copies the bytes from `at` on to `out`. Of a file they are read, which takes less than half of what it takes to map
    /// its pages one after another.
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

/// A set of files by name.
#[derive(Debug, Clone)]
pub(super) enum Files {
    Dir(PathBuf),
    /// Name and content of each file.
    #[cfg_attr(not(feature = "bundled-demo"), allow(dead_code))]
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl Files {
    /// The path that messages give for a file.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        match self {
            Files::Dir(dir) => dir.join(name),
            Files::Embedded(_) => Path::new("demo").join(name),
        }
    }

    /// Content of a file, or `None` if there is none of that name.
    pub(super) fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, Error> {
        match self {
            Files::Dir(dir) => {
                let path = dir.join(name);
                match std::fs::read(&path) {
                    Ok(bytes) => Ok(Some(bytes.into())),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(source) => Err(Error::Io { path, source }),
                }
            }
            Files::Embedded(files) => Ok(embedded(files, name).map(Cow::Borrowed)),
        }
    }

    /// Content of a file that must be there.
    pub(super) fn require(&self, name: &str, mend: &'static str) -> Result<Cow<'static, [u8]>, Error> {
        self.read(name)?.ok_or_else(|| Error::MissingFile { path: self.path(name), mend })
    }

    /// Maps a file into memory, or `None` if there is none of that name.
    pub(super) fn map(&self, name: &str) -> Result<Option<Bytes>, Error> {
        match self {
            Files::Dir(dir) => {
                let path = dir.join(name);
                let file = match File::open(&path) {
                    Ok(file) => file,
                    Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                    Err(source) => return Err(Error::Io { path, source }),
                };
                let length = file.metadata().map_err(|source| Error::Io { path: path.clone(), source })?.len();
                if length == 0 {
                    return Ok(Some(Bytes::Empty));
                }
                // SAFETY: the map is private to this process and read only. Another process that truncates the
                // file while we run would end ours with SIGBUS; every program that maps weights accepts that.
                let map = unsafe { Mmap::map(&file) }.map_err(|source| Error::Io { path, source })?;
                Ok(Some(Bytes::Mapped { map, file }))
            }
            Files::Embedded(files) => Ok(embedded(files, name).map(Bytes::Static)),
        }
    }
}

fn embedded(files: &[(&str, &'static [u8])], name: &str) -> Option<&'static [u8]> {
    files.iter().find(|(n, _)| *n == name).map(|(_, bytes)| *bytes)
}
