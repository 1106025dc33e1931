//! Progress on standard error for what takes long before the first token: download, check, upload.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What a bar shows until its length is known.
const SPINNER: &str = "{spinner} {msg}";

/// Has `bar` look as `template` says. The templates are constants; if one were wrong, the plain bar would do.
pub fn style(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
}

/// A progress bar. It is drawn only on a terminal, and disappears when dropped.
pub struct Progress(ProgressBar);

impl Progress {
    /// Whether standard error is a terminal.
    pub fn is_seen() -> bool {
        std::io::stderr().is_terminal()
    }

    /// A bar for `what`; `shown` says whether the user wants to see such things.
    pub fn new(what: &str, shown: bool) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_message(what.to_owned());
        // Until bytes are known.
        style(&bar, SPINNER);
        if shown && Self::is_seen() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }

    /// Shows `done` bytes of `total`; a total of 0 is not known yet.
    pub fn bytes(&self, done: u64, total: u64) {
        if total > 0 && self.0.length() != Some(total) {
            self.0.set_length(total);
            style(&self.0, "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}");
        }
        self.0.set_position(done);
    }

    /// Shows that case `done` of `total` runs, which is called `what`.
    #[cfg(feature = "bench")]
    pub fn cases(&self, done: usize, total: usize, what: &str) {
        if self.0.length().is_none() {
            self.0.set_length(total as u64);
            style(&self.0, "{pos}/{len} {bar:30} {wide_msg}");
        }
        self.0.set_position(done as u64);
        self.0.set_message(what.to_owned());
    }
}

/// A wait for the first token. It shows itself only if it is long, so that quick answers do not flicker.
pub struct Waiting {
    bar: ProgressBar,
    /// Ends the thread that shows the bar; and the thread itself.
    shower: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Waiting {
    /// How long nothing is shown at first.
    const PATIENCE: Duration = Duration::from_millis(400);

    /// A wait for `what`; `shown` says whether the user wants to see such things.
    pub fn new(what: &str, shown: bool) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_message(what.to_owned());
        style(&bar, SPINNER);
        let shower = (shown && Progress::is_seen()).then(|| {
            let (end, ended) = mpsc::channel::<()>();
            let bar = bar.clone();
            let show = move || {
                if ended.recv_timeout(Self::PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                    bar.enable_steady_tick(Duration::from_millis(120));
                }
            };
            (end, std::thread::spawn(show))
        });
        Self { bar, shower }
    }

    /// Shows that `done` of the prompt's `total` tokens were read.
    pub fn tokens(&self, done: usize, total: usize) {
        if self.bar.length().is_none() {
            self.bar.set_length(total as u64);
            style(&self.bar, "{spinner} {msg} {wide_bar} {pos}/{len} tokens, {eta} left");
        }
        self.bar.set_position(done as u64);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.shower.take() {
            drop(end);
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
