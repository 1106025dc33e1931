//! `warpdraft batch merge`: the results of shards in one file, in the order of the requests.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Error, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, bail};
use xxhash_rust::xxh3::xxh3_64;

use super::identity::Identity;
use super::input::{Lines, Packing, cannot_read};
use super::output::{Packer, changed, warn_of_unsealed};
use super::result::{Seal, Written};
use crate::Ending;
use crate::output::{note, share_with_others};
use crate::resolve::batch::Merge;

/// A result in the spill file.
struct Entry {
    identity: Identity,
    /// XXH3 of the result's line.
    digest: u64,
    /// The index of the file that it came from.
    shard: usize,
    start: u64,
    length: u64,
}

/// Runs the command. Results are gathered in an unnamed file beside the output. So memory holds only their places, and
/// packed shards work as well as others.
///
/// # Errors
/// If a file cannot be read or written, or holds something else; if results are of different requests; if the output
/// exists.
pub fn run(command: &Merge) -> anyhow::Result<Ending> {
    let Merge { shards, output, requests, report } = command;
    let to_stdout = output.as_os_str() == "-";
    if !to_stdout && output.is_file() {
        bail!("{} is there already; name another output, or remove it", output.display());
    }
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty() && !to_stdout);
    let folder = folder.map_or_else(|| Path::new(".").to_owned(), Path::to_owned);
    let cannot_write = || format!("cannot write to {}", folder.display());
    let spill = tempfile::tempfile_in(&folder).map_err(without_path).with_context(cannot_write)?;
    let mut spill = BufWriter::new(spill);

    let mut entries = Vec::new();
    let (mut end, mut unsealed) = (0, 0);
    // The fingerprint of the first answer, and the file with that answer.
    let mut made_by: Option<(String, &Path)> = None;
    for (number, shard) in shards.iter().enumerate() {
        let torn = || {
            format!("{} ends in the middle of a result; finish it first, by the command that began it", shard.display())
        };
        let mut lines = Lines::open(shard)?;
        loop {
            let line = match lines.next() {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => bail!(torn()),
                Err(error) => return Err(error).with_context(|| cannot_read(shard)),
            };
            let bytes = line.bytes.unwrap_or_default();
            let Some(Written { identity, fingerprint, seal }) = Written::parse(&bytes) else {
                if Written::begins(&bytes) && !bytes.ends_with(b"}") {
                    bail!(torn());
                }
                bail!("line {} of {} is not a result of this program", line.number, shard.display());
            };
            match seal {
                Seal::Whole => {}
                Seal::Broken => return Err(changed(shard, line.number)),
                Seal::None => unsealed += 1,
            }
            if let Some(fingerprint) = fingerprint {
                let (first, from) = made_by.get_or_insert_with(|| (fingerprint.clone(), shard));
                if *first != fingerprint {
                    bail!(
                        "{} and {} were made with different models or settings (system_fingerprint {first} and {fingerprint}, \
                         line {}); merge results of one run's shards",
                        from.display(),
                        shard.display(),
                        line.number
                    );
                }
            }
            spill.write_all(&bytes).and_then(|()| spill.write_all(b"\n")).with_context(cannot_write)?;
            let length = bytes.len() as u64 + 1;
            entries.push(Entry { identity, digest: xxh3_64(&bytes), shard: number, start: end, length });
            end += length;
        }
    }
    let mut spill = spill.into_inner().map_err(|error| error.into_error()).with_context(cannot_write)?;
    entries.sort_by_key(|entry| (entry.identity, entry.start));
    let is_other = |pair: &&[Entry]| pair[0].identity == pair[1].identity && pair[0].digest != pair[1].digest;
    if let Some(pair) = entries.windows(2).find(is_other) {
        bail!(
            "line {} of the requests has two results that differ, in {} and {}; leave one of them out",
            pair[0].identity.line,
            shards[pair[0].shard].display(),
            shards[pair[1].shard].display()
        );
    }
    let twice = entries.len();
    entries.dedup_by_key(|entry| entry.identity);
    let twice = twice - entries.len();
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].identity.line == pair[1].identity.line) {
        bail!(
            "{} and {} are of different requests: their lines {} differ; merge shards of one file",
            shards[pair[0].shard].display(),
            shards[pair[1].shard].display(),
            pair[0].identity.line
        );
    }
    if let Some(requests) = requests {
        check(requests, &entries)?;
    }

    let mut packer = Packer::new(Packing::of_name(output));
    let cannot_write = || format!("cannot write to {}", output.display());
    if to_stdout {
        copy(&mut spill, &entries, &mut packer, &mut |bytes| crate::output::print_bytes(bytes))?;
    } else if output.exists() {
        // A pipe or a device.
        let mut stream = File::options().write(true).open(output).with_context(cannot_write)?;
        copy(&mut spill, &entries, &mut packer, &mut |bytes| stream.write_all(bytes).with_context(cannot_write))?;
    } else {
        // The file gets its name once it is whole.
        let mut file = tempfile::NamedTempFile::new_in(&folder).map_err(without_path).with_context(cannot_write)?;
        copy(&mut spill, &entries, &mut packer, &mut |bytes| file.write_all(bytes).with_context(cannot_write))?;
        file.as_file().sync_data().with_context(cannot_write)?;
        share_with_others(file.as_file()).with_context(cannot_write)?;
        file.persist_noclobber(output).map_err(|error| error.error).with_context(cannot_write)?;
    }
    if report.is_told() {
        let twice = if twice > 0 { format!("; {twice} were there twice") } else { String::new() };
        note(&format!("{} results of {} files{twice}", entries.len(), shards.len()));
        warn_of_unsealed(unsealed);
    }
    Ok(Ending::Done)
}

/// The system's own error, without the name of a temporary file, which means nothing to a person.
fn without_path(error: Error) -> Error {
    match error.get_ref().and_then(|inner| inner.source()).and_then(|source| source.downcast_ref::<Error>()) {
        Some(system) => system.raw_os_error().map_or_else(|| system.kind().into(), Error::from_raw_os_error),
        None => error,
    }
}

/// Checks that every request has its result.
fn check(requests: &Path, entries: &[Entry]) -> anyhow::Result<()> {
    let mut lines = Lines::open(requests)?;
    let mut entries = entries.iter().map(|entry| entry.identity).peekable();
    let (mut missing, mut first) = (0, None);
    while let Some(line) = lines.next().with_context(|| cannot_read(requests))? {
        let identity = Identity::of(line.number, line.bytes.as_deref().unwrap_or_default());
        match entries.next_if(|entry| entry.line <= identity.line) {
            Some(entry) if entry == identity => {}
            Some(entry) => {
                bail!("the results are not of {}: line {} differs", requests.display(), entry.line.min(identity.line))
            }
            None => {
                missing += 1;
                first = first.or(Some(identity.line));
            }
        }
    }
    if let Some(entry) = entries.next() {
        bail!("the results are not of {}: it has no line {}", requests.display(), entry.line);
    }
    match first {
        None => Ok(()),
        Some(first) => bail!(
            "{missing} requests of {} have no result (the first is line {first}); finish the shards first",
            requests.display()
        ),
    }
}

/// Copies the results in the order of `entries`.
fn copy(
    spill: &mut File,
    entries: &[Entry],
    packer: &mut Packer,
    write: &mut dyn FnMut(&[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let cannot_read = "cannot read back what was gathered";
    let mut reader = BufReader::new(spill);
    let mut at = 0;
    for entry in entries {
        if entry.start != at {
            reader.seek(SeekFrom::Start(entry.start)).context(cannot_read)?;
        } else if at == 0 {
            reader.rewind().context(cannot_read)?;
        }
        let mut line = Vec::new();
        reader.by_ref().take(entry.length).read_until(b'\n', &mut line).context(cannot_read)?;
        at = entry.start + entry.length;
        packer.push(&line);
        if packer.is_due() {
            write(&packer.take()?)?;
        }
    }
    write(&packer.take()?)
}
