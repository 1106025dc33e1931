//! The header of a safetensors file: a length, a JSON object, then the tensors back to back.
//!
//! ```text
//! bytes 0..8        n, little-endian u64
//! bytes 8..8+n      {"name": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}, "__metadata__": {…}}
//! bytes 8+n..       data; offsets count from here, and tensors cover it without hole or overlap
//! ```
//!
//! The crate `safetensors` reads and checks it. A header that the crate refuses is read once more here, to say which
//! tensor is at fault and why: the crate's errors do not say so, and a person with a broken download needs to know.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::Dtype;
use crate::Error;

/// Bytes of the largest header that is read; the crate `safetensors` has the same limit.
pub(crate) const LARGEST_HEADER: u64 = 100_000_000;

/// One tensor of a shard.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub(super) bytes: Range<usize>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

#[derive(Deserialize)]
struct RawHeader {
    #[serde(rename = "__metadata__")]
    _metadata: Option<HashMap<String, String>>,
    #[serde(flatten)]
    tensors: HashMap<String, RawEntry>,
}

/// Reads and checks the header of the shard at `path`, which holds `file_length` bytes; `file` is its beginning, up to
/// the end of the header at least. Entries come in file order.
pub(super) fn read(file: &[u8], file_length: u64, path: &Path) -> Result<Vec<Entry>, Error> {
    let (length, metadata) = match metadata(file, file_length) {
        Some(read) => read,
        None => {
            explain(file, file_length, path)?;
            // The crate has a rule that `explain` does not know.
            let reason = "the tensors in it do not add up".to_owned();
            return Err(Error::Header { path: path.to_owned(), reason });
        }
    };
    let data = 8 + length;
    let mut entries = Vec::new();
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let stored = info.dtype.to_string();
        let Some(dtype) = Dtype::from_name(&stored) else {
            return Err(Error::UnsupportedDtype { path: path.to_owned(), tensor: name, dtype: stored });
        };
        entries.push(Entry { name, dtype, shape: info.shape.clone(), bytes: data + start..data + end });
    }
    entries.sort_by(|a, b| (a.bytes.start, a.bytes.end, &a.name).cmp(&(b.bytes.start, b.bytes.end, &b.name)));
    Ok(entries)
}

/// The header's length, and what the crate reads from it; `None` if the header is not valid.
fn metadata(file: &[u8], file_length: u64) -> Option<(usize, Metadata)> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    let length = u64::from_le_bytes(*length);
    if length > LARGEST_HEADER {
        return None;
    }
    let json = std::str::from_utf8(rest.get(..length as usize)?).ok()?;
    let metadata: Metadata = serde_json::from_str(json).ok()?;
    let data = metadata.tensors().values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
    (data.checked_add(8 + length) == Some(file_length)).then_some((length as usize, metadata))
}

/// Finds what is wrong with the header that `file` begins with. `Ok` if it finds nothing.
fn explain(file: &[u8], file_length: u64, path: &Path) -> Result<(), Error> {
    let broken = |reason: String| Error::Header { path: path.to_owned(), reason };
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(broken(format!("it holds {} bytes, too few for one", file_length)));
    };
    let length = u64::from_le_bytes(*length);
    if length > LARGEST_HEADER {
        return Err(broken(format!("its first 8 bytes announce a header of {length} bytes")));
    }
    let Some(json) = rest.get(..length as usize) else {
        return Err(Error::WrongLength { path: path.to_owned(), expected: 8 + length, actual: file_length });
    };
    let header: RawHeader = serde_json::from_slice(json).map_err(|e| broken(e.to_string()))?;

    let mut tensors: Vec<_> = header.tensors.into_iter().collect();
    tensors.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
    let mut end_of_last = 0usize;
    for (name, raw) in tensors {
        let lies = |reason: String| Error::HeaderEntry { path: path.to_owned(), tensor: name.clone(), reason };
        let (start, end) = raw.data_offsets;
        if start != end_of_last {
            return Err(lies(format!("it starts at byte {start} where the tensor before it ends at {end_of_last}")));
        }
        let Some(size) = end.checked_sub(start) else {
            return Err(lies(format!("it ends at byte {end}, before it starts at {start}")));
        };
        let Some(dtype) = Dtype::from_name(&raw.dtype) else {
            return Err(Error::UnsupportedDtype { path: path.to_owned(), tensor: name, dtype: raw.dtype });
        };
        let expected = raw.shape.iter().try_fold(dtype.size(), |bytes, &n| bytes.checked_mul(n));
        if expected != Some(size) {
            return Err(lies(format!(
                "shape {:?} of {dtype} does not take the {size} bytes that its offsets span",
                raw.shape
            )));
        }
        end_of_last = end;
    }
    let expected = (8 + length).saturating_add(end_of_last as u64);
    if expected != file_length {
        return Err(Error::WrongLength { path: path.to_owned(), expected, actual: file_length });
    }
    Ok(())
}
