//! `warpdraft batch merge`: the results of shards in one file, in the order of the requests.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use xxhash_rust::xxh3::xxh3_64;

use super::identity::Identity;
use super::input::{LONGEST, Line, Lines, Packing, cannot_read, is_file};
use super::output::{Packer, changed, warn_of_unsealed};
use super::result::{Seal, Written};
use crate::Ending;
use crate::output::{note, print_bytes};
use crate::resolve::batch::Merge;
use crate::resolve::is_standard;
use crate::unfinished::{Unfinished, folder_of, without_path};

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
    if is_file(output) {
        bail!("{} is there already; name another output, or remove it", output.display());
    }
    let Gathered { mut spill, mut entries, unsealed } = gather(shards, folder_of(output))?;
    let twice = put_in_order(&mut entries, shards)?;
    if let Some(requests) = requests {
        check(requests, &entries)?;
    }
    write(&mut spill, &entries, output)?;
    if report.is_told() {
        let twice = if twice > 0 { format!("; {twice} were there twice") } else { String::new() };
        note(&format!("{} results of {} files{twice}", entries.len(), shards.len()));
        warn_of_unsealed(unsealed);
    }
    Ok(Ending::Done)
}

/// The results of all shards.
struct Gathered {
    spill: File,
    entries: Vec<Entry>,
    /// How many have no seal.
    unsealed: u64,
}

/// Gathers the results of `shards` in an unnamed file in `folder`.
fn gather(shards: &[PathBuf], folder: &Path) -> anyhow::Result<Gathered> {
    let cannot_write = || format!("cannot write to {}", folder.display());
    let spill = tempfile::tempfile_in(folder).map_err(without_path).with_context(cannot_write)?;
    let mut spill = BufWriter::new(spill);
    let (mut entries, mut end, mut unsealed) = (Vec::new(), 0, 0);
    // The fingerprint of the first answer, and the file with that answer.
    let mut made_by: Option<(String, &Path)> = None;
    for (number, shard) in shards.iter().enumerate() {
        // A result may be longer than a request may be.
        let mut lines = Lines::open(shard, u64::MAX)?;
        while let Some(line) = next(&mut lines, shard)? {
            let Written { identity, fingerprint, seal } = result_of(&line, shard)?;
            unsealed += u64::from(seal == Seal::None);
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
            let bytes = line.bytes.unwrap_or_default();
            spill.write_all(&bytes).and_then(|()| spill.write_all(b"\n")).with_context(cannot_write)?;
            let length = bytes.len() as u64 + 1;
            entries.push(Entry { identity, digest: xxh3_64(&bytes), shard: number, start: end, length });
            end += length;
        }
    }
    let spill = spill.into_inner().map_err(|error| error.into_error()).with_context(cannot_write)?;
    Ok(Gathered { spill, entries, unsealed })
}

/// The next line of `shard`.
fn next(lines: &mut Lines, shard: &Path) -> anyhow::Result<Option<Line>> {
    lines.next().map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => torn(shard),
        _ => anyhow::Error::from(error).context(cannot_read(shard)),
    })
}

/// The result in a line of `shard`.
///
/// # Errors
/// If it is something else, torn, or changed.
fn result_of(line: &Line, shard: &Path) -> anyhow::Result<Written> {
    let bytes = line.bytes.as_deref().unwrap_or_default();
    match Written::parse(bytes) {
        Some(Written { seal: Seal::Broken, .. }) => Err(changed(shard, line.number)),
        Some(written) => Ok(written),
        None if Written::begins(bytes) && !bytes.ends_with(b"}") => Err(torn(shard)),
        None => bail!("line {} of {} is not a result of this program", line.number, shard.display()),
    }
}

/// The error for a file that ends in the middle of a result.
fn torn(shard: &Path) -> anyhow::Error {
    anyhow!("{} ends in the middle of a result; finish it first, by the command that began it", shard.display())
}

/// Puts results in the order of their requests, and leaves out those that are there again. Returns how many these were.
///
/// # Errors
/// If a request has two results that differ, or the results are of different requests.
fn put_in_order(entries: &mut Vec<Entry>, shards: &[PathBuf]) -> anyhow::Result<usize> {
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
    let all = entries.len();
    entries.dedup_by_key(|entry| entry.identity);
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].identity.line == pair[1].identity.line) {
        bail!(
            "{} and {} are of different requests: their lines {} differ; merge shards of one file",
            shards[pair[0].shard].display(),
            shards[pair[1].shard].display(),
            pair[0].identity.line
        );
    }
    Ok(all - entries.len())
}

/// Writes the results to the output, which is no file yet.
fn write(spill: &mut File, entries: &[Entry], output: &Path) -> anyhow::Result<()> {
    let mut packer = Packer::new(Packing::of_name(output));
    let cannot_write = || format!("cannot write to {}", output.display());
    if is_standard(output) {
        copy(spill, entries, &mut packer, &mut |bytes| print_bytes(bytes))
    } else if output.exists() {
        // A pipe or a device.
        let mut stream = File::options().write(true).open(output).with_context(cannot_write)?;
        copy(spill, entries, &mut packer, &mut |bytes| stream.write_all(bytes).with_context(cannot_write))
    } else {
        let mut file = Unfinished::beside(output).with_context(cannot_write)?;
        copy(spill, entries, &mut packer, &mut |bytes| file.write(bytes).with_context(cannot_write))?;
        file.name_new(output).with_context(cannot_write)
    }
}

/// Checks that every request has its result.
fn check(requests: &Path, entries: &[Entry]) -> anyhow::Result<()> {
    let mut lines = Lines::open(requests, LONGEST)?;
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
