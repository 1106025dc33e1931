//! Files that get their name once they are whole. Until then they have another name in the same folder. They are
//! removed if the program fails, and if a signal ends it.

use std::io::{Error, Result, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::{Builder, NamedTempFile};

/// Where the files are that have not got their name.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that has not got its name. It is removed when it is dropped.
#[derive(Debug)]
pub struct Unfinished(Option<NamedTempFile>);

impl Unfinished {
    /// Creates a file that can become `path`.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn beside(path: &Path) -> Result<Self> {
        let mut builder = Builder::new();
        // As with any new file, the umask decides who may read it. Temporary files are private by default.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        // Held until the file is listed, so that a signal finds it.
        let mut all = all();
        let file = builder.tempfile_in(folder_of(path)).map_err(without_path)?;
        all.push(file.path().to_owned());
        Ok(Self(Some(file)))
    }

    /// Writes `bytes` at the end.
    ///
    /// # Errors
    /// If the disk is full, or the system says anything else.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.as_mut().map_or(Ok(()), |file| file.write_all(bytes))
    }

    /// Names the file `path`, and replaces what has that name.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn replace(self, path: &Path) -> Result<()> {
        self.end(|file| file.persist(path).map(|_| ()).map_err(|error| error.error))
    }

    /// Has the system put the file on the disk, and names it `path`, which nothing else must be called.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn name_new(self, path: &Path) -> Result<()> {
        self.end(|file| {
            file.as_file().sync_data()?;
            file.persist_noclobber(path).map(|_| ()).map_err(|error| error.error)
        })
    }

    fn end(mut self, how: impl FnOnce(NamedTempFile) -> Result<()>) -> Result<()> {
        let Some(file) = self.0.take() else { return Ok(()) };
        let path = file.path().to_owned();
        let ended = how(file);
        all().retain(|one| *one != path);
        ended
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(file) = self.0.take() else { return };
        let path = file.path().to_owned();
        drop(file);
        all().retain(|one| *one != path);
    }
}

/// Removes all unfinished files, for ways out of the program that run no destructors. None can be created after that.
pub fn remove_all() {
    let all = all();
    remove(&all);
    std::mem::forget(all);
}

fn remove(files: &[PathBuf]) {
    for path in files {
        let _ = std::fs::remove_file(path);
    }
}

/// The folder that `path` is in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The error without the name of a temporary file, which means nothing to a person.
pub fn without_path(error: Error) -> Error {
    match error.to_string().split_once(" at path ") {
        Some((text, _)) => Error::new(error.kind(), text.to_owned()),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_whole_stays() {
        let folder = tempfile::tempdir().unwrap();
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        let path = folder.path().join("whole");
        let written = |text: &str| {
            let mut file = Unfinished::beside(&path).unwrap();
            file.write(text.as_bytes()).unwrap();
            file
        };
        written("one").replace(&path).unwrap();
        assert!(written("two").name_new(&path).is_err());
        drop(written("three"));
        assert_eq!((std::fs::read_to_string(&path).unwrap().as_str(), files()), ("one", 1));
        written("four").replace(&path).unwrap();
        assert!(all().is_empty());
        // As when a signal comes.
        std::mem::forget(written("five"));
        assert_eq!(files(), 2);
        remove(&std::mem::take(&mut *all()));
        assert_eq!((std::fs::read_to_string(&path).unwrap().as_str(), files()), ("four", 1));
    }
}
