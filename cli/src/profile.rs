//! `--profile`: where the time went, as trace events that Perfetto and chrome://tracing open.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use host::Profile;
use host::profile::Track;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::unfinished::Unfinished;

/// Where a trace is written. Checked before anything else is done; the trace is written whole or not at all.
#[derive(Debug)]
pub struct TraceFile {
    path: PathBuf,
    to: To,
}

#[derive(Debug)]
enum To {
    /// A file, which gets its name once it is whole.
    File,
    /// A pipe or a device.
    Stream(std::fs::File),
}

impl TraceFile {
    /// Makes sure that `path` can be written.
    ///
    /// # Errors
    /// If it cannot.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot write the profile to {}", path.display());
        if path.is_dir() {
            bail!("{}: it is a folder; name a file, such as profile.json", cannot());
        }
        let to = if path.is_file() || !path.exists() {
            // Removed at once: nobody knows how the run will end.
            Unfinished::beside(path).with_context(cannot)?;
            To::File
        } else {
            To::Stream(std::fs::File::options().write(true).open(path).with_context(cannot)?)
        };
        Ok(Self { path: path.to_owned(), to })
    }

    /// Writes the trace of a run of `model` on `device`.
    ///
    /// # Errors
    /// If the disk is full, or the system reports another error.
    pub fn write(self, profile: &Profile, model: &str, device: &str) -> anyhow::Result<()> {
        let json = serde_json::to_vec(&trace(profile, model, device)).context("cannot write JSON")?;
        let cannot = || format!("cannot write the profile to {}", self.path.display());
        match self.to {
            To::File => {
                let mut file = Unfinished::beside(&self.path).with_context(cannot)?;
                file.write(&json).and_then(|()| file.replace(&self.path)).with_context(cannot)?;
            }
            To::Stream(mut stream) => stream.write_all(&json).with_context(cannot)?,
        }
        Ok(())
    }
}

/// The JSON object of the trace event format: "Trace Event Format", Google, 2016.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    trace_events: Vec<Event>,
    display_time_unit: &'static str,
    other_data: Value,
}

#[derive(Serialize)]
struct Event {
    name: &'static str,
    /// `X`: a span; `M`: a name.
    ph: &'static str,
    pid: u32,
    /// The track's number.
    tid: u32,
    /// Microseconds from the profile's start.
    ts: f64,
    /// Microseconds.
    dur: f64,
    args: Value,
}

fn trace(profile: &Profile, model: &str, device: &str) -> Trace {
    let microseconds = |time: Duration| time.as_nanos() as f64 / 1e3;
    let tid = |track| match track {
        Track::Host => 1,
        Track::Device => 2,
    };
    let named = |track, name| {
        let args = json!({ "name": name });
        Event { name: "thread_name", ph: "M", pid: 1, tid: tid(track), ts: 0.0, dur: 0.0, args }
    };
    let spans = profile.spans.iter().map(|span| Event {
        name: span.name,
        ph: "X",
        pid: 1,
        tid: tid(span.track),
        ts: microseconds(span.start),
        dur: microseconds(span.duration),
        args: span.numbers.iter().map(|&(name, n)| (name.to_owned(), n.into())).collect::<Map<_, _>>().into(),
    });
    let names = [named(Track::Host, "host"), named(Track::Device, "device, first block")];
    Trace {
        trace_events: names.into_iter().chain(spans).collect(),
        display_time_unit: "ms",
        other_data: json!({ "model": model, "device": device }),
    }
}
