//! Downloads a model's files into the cache: several at once, each continued from where an earlier run stopped.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use super::client::{Client, Failure, FileInfo};
use super::{CONFIG, HubOptions, INDEX, SINGLE, TOKENIZER};
use crate::Error;
use crate::source::DownloadProgress;

/// Files that are fetched at once: one connection does not use all of a fast line.
const AT_ONCE: usize = 6;
/// Attempts in a row, none of which brings anything, before a file is given up.
const ATTEMPTS: u32 = 5;
const BUFFER: usize = 1 << 20;
const DISK: &str = "check the free space and permissions of the cache directory (HF_HOME)";

/// A file that is wanted.
struct Wanted {
    name: String,
    url: String,
    info: FileInfo,
}

/// Progress: this many bytes of a file are here.
struct Moved {
    file: usize,
    bytes: u64,
}

/// Downloads a model into the local cache. Returns the snapshot's directory.
pub(super) fn download(
    options: &HubOptions,
    id: &str,
    revision: &str,
    progress: &mut dyn FnMut(DownloadProgress),
) -> Result<PathBuf, Error> {
    let repository = options.repository(id)?;
    let client = Client::new(options);
    let fetched = || -> Result<PathBuf, Failure> {
        let found = client.revision(id, revision)?;
        let names = wanted(&found.files);
        let files = describe(&client, names, |name| client.url(id, &found.commit, name))?;
        let cache = Cache::open(repository)?;
        fetch_all(&client, &cache, &files, progress)?;
        let snapshot = cache.link(&found.commit, &files)?;
        if revision != found.commit {
            cache.note_revision(revision, &found.commit)?;
        }
        Ok(snapshot)
    };
    fetched().map_err(|failure| failure.of(id, revision))
}

/// The files of a repository that are needed here.
fn wanted(files: &[String]) -> Vec<String> {
    let single = files.iter().any(|name| name == SINGLE);
    let weights = |name: &str| match single {
        // With shards as well, a checkpoint is opened from the single file.
        true => name == SINGLE,
        false => name == INDEX || (name.starts_with("model") && name.ends_with(".safetensors")),
    };
    let texts = [CONFIG, TOKENIZER, "generation_config.json", "tokenizer_config.json", "chat_template.jinja"];
    files.iter().filter(|name| texts.contains(&name.as_str()) || weights(name)).cloned().collect()
}

/// Asks the hub about each file, several at once.
fn describe(client: &Client, names: Vec<String>, url: impl Fn(&str) -> String) -> Result<Vec<Wanted>, Failure> {
    let urls: Vec<String> = names.iter().map(|name| url(name)).collect();
    let infos = Mutex::new(Vec::new());
    let failure = each(urls.len(), |i, _| {
        let info = retried(|| client.file_info(&urls[i]))?;
        infos.lock().unwrap_or_else(PoisonError::into_inner).push((i, info));
        Ok(())
    });
    failure?;
    let mut infos = infos.into_inner().unwrap_or_else(PoisonError::into_inner);
    infos.sort_by_key(|(i, _)| *i);
    let files = names.into_iter().zip(urls).zip(infos);
    Ok(files.map(|((name, url), (_, info))| Wanted { name, url, info }).collect())
}

/// Calls `work` with each of `0..count`, several at once. `stop` is set once one has failed. Returns the first failure.
fn each(count: usize, work: impl Fn(usize, &AtomicBool) -> Result<(), Failure> + Sync) -> Result<(), Failure> {
    let next = Mutex::new(0..count);
    let stop = AtomicBool::new(false);
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(count) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let Some(i) = next.lock().unwrap_or_else(PoisonError::into_inner).next() else { return };
                    if let Err(error) = work(i, &stop) {
                        stop.store(true, Ordering::Relaxed);
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                }
            });
        }
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Retries failures that may pass.
fn retried<T>(mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    for tried in 1.. {
        match attempt() {
            Err(failure) if failure.passing && tried < ATTEMPTS => wait(tried),
            outcome => return outcome,
        }
    }
    unreachable!("the last attempt returns")
}

/// Waits half a second after the first attempt, and twice as long after each further one.
fn wait(tried: u32) {
    std::thread::sleep(Duration::from_millis(250 << tried));
}

/// Fetches all files that are not in the cache. Reports progress on this thread.
fn fetch_all(
    client: &Client,
    cache: &Cache,
    files: &[Wanted],
    progress: &mut dyn FnMut(DownloadProgress),
) -> Result<(), Failure> {
    let sizes: Option<Vec<u64>> = files.iter().map(|file| file.info.size).collect();
    let total_bytes = sizes.map_or(0, |sizes| sizes.iter().sum());
    let (sender, received) = mpsc::channel::<Moved>();
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            each(files.len(), |file, stop| {
                let moved = |bytes| {
                    // The receiver lives longer than the download. If it were gone, nobody would need the progress.
                    let _ = sender.send(Moved { file, bytes });
                };
                fetch(client, cache, &files[file], stop, &moved)
            })
        });
        let mut here = vec![0; files.len()];
        let mut told = 0;
        // The loop ends when the workers do: they hold the senders.
        for Moved { file, bytes } in received {
            here[file] = bytes;
            let sum: u64 = here.iter().sum();
            told = told.max(if total_bytes > 0 { sum.min(total_bytes) } else { sum });
            progress(DownloadProgress { bytes: told, total_bytes, file: Some(files[file].name.clone()) });
        }
        worker.join().unwrap_or_else(|_| Err(Failure::odd("the download stopped unexpectedly")))
    })
}

/// Fetches a file, unless it is in the cache.
fn fetch(client: &Client, cache: &Cache, file: &Wanted, stop: &AtomicBool, moved: &dyn Fn(u64)) -> Result<(), Failure> {
    let blob = cache.blob(&file.info.etag);
    // Another process may be fetching the same file. It holds the lock until it is done, or gone.
    let _lock = cache.lock(&file.info.etag)?;
    if let Ok(metadata) = fs::metadata(&blob) {
        moved(metadata.len());
        return Ok(());
    }
    let unfinished = cache.blob(&format!("{}.incomplete", file.info.etag));
    let mut out = OpenOptions::new().create(true).append(true).open(&unfinished).map_err(|e| disk(&e))?;
    let mut here = out.metadata().map_err(|e| disk(&e))?.len();
    let mut tried = 0;
    loop {
        let before = here;
        let outcome = receive(client, file, &mut out, &mut here, stop, moved);
        match outcome {
            Ok(true) => break,
            Ok(false) => return Ok(()),
            Err(failure) if failure.passing => {
                tried = if here > before { 1 } else { tried + 1 };
                if tried >= ATTEMPTS {
                    return Err(failure);
                }
                wait(tried);
            }
            Err(failure) => return Err(failure),
        }
    }
    out.sync_all().map_err(|e| disk(&e))?;
    fs::rename(&unfinished, &blob).map_err(|e| disk(&e))
}

/// Receives the rest of a file, behind the `here` bytes that `out` has. Returns false if `stop` was set first.
fn receive(
    client: &Client,
    file: &Wanted,
    out: &mut File,
    here: &mut u64,
    stop: &AtomicBool,
    moved: &dyn Fn(u64),
) -> Result<bool, Failure> {
    let size = file.info.size;
    if size.is_some_and(|size| *here > size) {
        begin_anew(out, here)?;
    }
    moved(*here);
    if size == Some(*here) {
        return Ok(true);
    }
    let part = (*here > 0).then(|| format!("{here}-"));
    let mut response = client.get(&file.url, part.as_deref())?;
    // The whole file came although a part was asked for, or there is no such part: the bytes that are here are of no
    // use.
    let is_part = response.status().as_u16() == 206;
    if *here > 0 && !is_part {
        begin_anew(out, here)?;
        if !response.status().is_success() {
            return Err(Failure {
                passing: true,
                ..Failure::odd(format!("{} changed on the hub meanwhile", file.name))
            });
        }
    }
    let mut reader = response.body_mut().as_reader();
    let mut buffer = vec![0; BUFFER];
    loop {
        if stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let count = match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Failure::broken(&error)),
        };
        out.write_all(&buffer[..count]).map_err(|e| disk(&e))?;
        *here += count as u64;
        moved(*here);
    }
    match size {
        Some(size) if *here != size => {
            let reason = format!("{} came with {here} bytes of {size}", file.name);
            Err(Failure { passing: true, ..Failure::odd(reason) })
        }
        _ => Ok(true),
    }
}

fn begin_anew(out: &mut File, here: &mut u64) -> Result<(), Failure> {
    out.set_len(0).and_then(|()| out.seek(SeekFrom::Start(0))).map_err(|e| disk(&e))?;
    *here = 0;
    Ok(())
}

fn disk(error: &io::Error) -> Failure {
    Failure { reason: error.to_string(), mend: DISK, passing: false }
}

/// A repository's folder in the cache.
struct Cache {
    repository: PathBuf,
    locks: PathBuf,
}

impl Cache {
    fn open(repository: PathBuf) -> Result<Self, Failure> {
        // Hugging Face's tools have their locks here.
        let locks = match (repository.parent(), repository.file_name()) {
            (Some(cache), Some(name)) => cache.join(".locks").join(name),
            _ => repository.join(".locks"),
        };
        fs::create_dir_all(repository.join("blobs")).map_err(|e| disk(&e))?;
        fs::create_dir_all(&locks).map_err(|e| disk(&e))?;
        Ok(Self { repository, locks })
    }

    fn blob(&self, name: &str) -> PathBuf {
        self.repository.join("blobs").join(name)
    }

    /// Locks a blob until the returned file is dropped.
    fn lock(&self, etag: &str) -> Result<File, Failure> {
        let path = self.locks.join(format!("{etag}.lock"));
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|e| disk(&e))?;
        file.lock().map_err(|e| disk(&e))?;
        Ok(file)
    }

    /// Makes the snapshot of a commit out of files that are in the cache.
    fn link(&self, commit: &str, files: &[Wanted]) -> Result<PathBuf, Failure> {
        let snapshot = self.repository.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).map_err(|e| disk(&e))?;
        for file in files {
            let place = snapshot.join(&file.name);
            let blob = self.blob(&file.info.etag);
            link(&blob, &Path::new("../../blobs").join(&file.info.etag), &place).map_err(|e| disk(&e))?;
        }
        Ok(snapshot)
    }

    /// Records the commit that a branch or tag stands at.
    fn note_revision(&self, revision: &str, commit: &str) -> Result<(), Failure> {
        let path = self.repository.join("refs").join(revision);
        let written = || {
            fs::create_dir_all(path.parent().unwrap_or(&self.repository))?;
            put(&path, |unfinished| fs::write(unfinished, commit))
        };
        written().map_err(|e| disk(&e))
    }
}

/// Puts what `make` makes at a path into `place`. Other processes may do the same, or open `place`, meanwhile: there is
/// always a whole file in it.
fn put(place: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    // A random name, since processes of several machines may share a cache.
    let unfinished = place.with_file_name(format!("{:016x}.incomplete", RandomState::new().hash_one(())));
    let outcome = make(&unfinished).and_then(|()| fs::rename(&unfinished, place));
    if outcome.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    outcome
}

#[cfg(unix)]
fn link(_blob: &Path, from_place: &Path, place: &Path) -> io::Result<()> {
    if fs::read_link(place).is_ok_and(|target| target == from_place) {
        return Ok(());
    }
    put(place, |unfinished| std::os::unix::fs::symlink(from_place, unfinished))
}

#[cfg(not(unix))]
fn link(blob: &Path, _from_place: &Path, place: &Path) -> io::Result<()> {
    put(place, |unfinished| fs::hard_link(blob, unfinished).or_else(|_| fs::copy(blob, unfinished).map(drop)))
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::thread;

    use super::{Cache, FileInfo, Wanted};

    const TEXT: &str = "the same text";
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn processes_that_finish_together_leave_a_file_in_its_place() {
        let dir = tempfile::TempDir::new().unwrap();
        let cache = Cache::open(dir.path().join("models--some--model")).ok().unwrap();
        let files = ["first", "second"].map(|etag| {
            fs::write(cache.blob(etag), TEXT).unwrap();
            let info = FileInfo { etag: etag.to_owned(), size: None };
            [Wanted { name: "config.json".into(), url: String::new(), info }]
        });
        let finish = |files: &[Wanted]| {
            let finished = cache.link(COMMIT, files).and_then(|_| cache.note_revision("refs/pr/1", COMMIT));
            finished.unwrap_or_else(|failure| panic!("{}: {}", failure.reason, failure.mend));
        };
        finish(&files[0]);
        let place = cache.repository.join("snapshots").join(COMMIT).join("config.json");
        let branch = cache.repository.join("refs/refs/pr/1");
        // Two blobs, so that the link is replaced all the time.
        let finish_often = |start: usize| (start..start + 200).for_each(|round| finish(&files[round % 2]));
        thread::scope(|scope| {
            let writers: Vec<_> = (0..4).map(|start| scope.spawn(move || finish_often(start))).collect();
            while writers.iter().any(|writer| !writer.is_finished()) {
                assert_eq!(fs::read_to_string(&place).unwrap(), TEXT);
                assert_eq!(fs::read_to_string(&branch).unwrap(), COMMIT);
            }
        });
        for path in [&place, &branch] {
            assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing unfinished is left");
        }
        // A link that is right stays as it is.
        finish(&files[0]);
        let number = || fs::symlink_metadata(&place).unwrap().ino();
        let before = number();
        finish(&files[0]);
        assert_eq!(number(), before);
    }
}
