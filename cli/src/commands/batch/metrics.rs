//! How a batch is going: for people while it runs, for programs when it is done.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use host::Drafted;
use host::batch::Metrics;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget};
use serde::Serialize;
use serde_json::Value;

use super::survey::Survey;
use crate::Ending;
use crate::output::{JsonDrafts, note};
use crate::progress::{Progress, style};
use crate::resolve::Report;

/// Counts of what became of requests.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Answered in this run.
    pub answered: u64,
    /// Those of them that a limit cut off.
    pub cut_off: u64,
    /// Refused in this run.
    pub refused: u64,
    /// Refused in this run, by the code of the reason.
    pub refused_by_code: BTreeMap<String, u64>,
    /// The place of the first request that was refused, and the error.
    pub first_error: Option<(u64, Value)>,
    /// Answered or refused in this run, but not written yet. None of the other counts has them.
    pub not_written: u64,
    /// Answered or refused by an earlier run.
    pub before: u64,
}

/// What became of a request.
#[derive(Clone, Debug)]
pub enum Fate {
    /// It is answered.
    Answered {
        /// Whether `max_tokens` or the end of the context cut the answer off.
        is_cut_off: bool,
    },
    /// It is refused, with this error.
    Refused(Value),
}

impl Tally {
    /// Counts request `number`, which was among those that are not written yet, and now is.
    pub fn count_written(&mut self, number: u64, fate: Fate) {
        self.not_written -= 1;
        match fate {
            Fate::Answered { is_cut_off } => {
                self.answered += 1;
                self.cut_off += u64::from(is_cut_off);
            }
            Fate::Refused(error) => {
                let code = error["code"].as_str().unwrap_or_default();
                self.refused += 1;
                *self.refused_by_code.entry(code.to_owned()).or_default() += 1;
                if self.first_error.as_ref().is_none_or(|(first, _)| number < *first) {
                    self.first_error = Some((number, error));
                }
            }
        }
    }

    /// Requests that this run has answered or refused.
    fn now(&self) -> u64 {
        self.answered + self.refused + self.not_written
    }
}

/// The progress bar, and the clock.
pub struct Bar {
    bar: ProgressBar,
    start: Instant,
    told: Instant,
    /// Rows run and tokens generated when the bar was last drawn.
    tokens: (u64, u64),
    /// What there is to do, if it was counted at the start.
    survey: Option<Survey>,
}

/// Time between two drawings of the bar.
const PERIOD: Duration = Duration::from_millis(250);

impl Bar {
    /// Starts the clock, and draws a bar if `shown` and a person can see it. `survey` has the number of requests, if it
    /// is known.
    pub fn start(survey: Option<Survey>, shown: bool) -> Self {
        let seen = shown && Progress::is_seen();
        Self::drawn(survey, if seen { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() })
    }

    fn drawn(survey: Option<Survey>, target: ProgressDrawTarget) -> Self {
        let bar = ProgressBar::with_draw_target(survey.map(|survey| survey.total), target);
        let template = match survey {
            Some(_) => "{pos}/{len} {bar:16} {wide_msg} {prefix} left",
            None => "{pos} {spinner} {wide_msg} {elapsed}",
        };
        style(&bar, template);
        Self { bar, start: Instant::now(), told: Instant::now(), tokens: (0, 0), survey }
    }

    /// Whether somebody is looking, and the bar was last drawn a while ago.
    pub fn is_due(&self) -> bool {
        self.told.elapsed() >= PERIOD && !self.bar.is_hidden()
    }

    /// Draws the bar.
    pub fn show(&mut self, metrics: &Metrics, tally: &Tally) {
        let period = self.told.elapsed();
        let now = (metrics.counts.rows, metrics.generated_tokens);
        let rate = |now: u64, before: u64| (now - before) as f64 / period.as_secs_f64();
        // Every row is a token that is read: of a prompt, or the newest of an answer.
        let out = rate(now.1, self.tokens.1);
        let read = (rate(now.0, self.tokens.0) - out).max(0.0);
        let accepted = ratio(metrics.generated_tokens as f64, metrics.choices as f64);
        self.bar.set_message(format!(
            "{read:.0} in, {out:.0} out tok/s, cache {:.0} %, {accepted:.2} a step",
            100.0 * ratio(metrics.pages_in_use as f64, metrics.pages.into())
        ));
        // If everything was counted at the start, what an earlier run has done is known from then on. Otherwise it is
        // counted as it is met.
        let before = self.survey.map_or(tally.before, |survey| survey.done);
        self.bar.set_position(before + tally.now());
        self.bar.set_prefix(match self.left(tally) {
            Some(left) => format!("{:#}", HumanDuration(left)),
            None => "?".into(),
        });
        (self.told, self.tokens) = (Instant::now(), now);
    }

    /// The time that is left at this run's pace. Requests done before took none of its time.
    fn left(&self, tally: &Tally) -> Option<Duration> {
        let Survey { total, done } = self.survey?;
        let now = tally.now();
        let left = total.saturating_sub(done + now);
        (now > 0).then(|| self.start.elapsed().mul_f64(left as f64 / now as f64))
    }

    /// Ends the run: removes the bar, and returns what there is to report.
    pub fn end(
        self,
        metrics: &Metrics,
        tally: Tally,
        model: String,
        devices: String,
        ended: &anyhow::Result<Ending>,
    ) -> Summary {
        self.bar.finish_and_clear();
        let seconds = self.start.elapsed().as_secs_f64();
        Summary {
            model,
            devices,
            ended: match ended {
                Ok(Ending::Done) => "done",
                Ok(Ending::Interrupted) => "interrupted",
                Err(_) => "failed",
            },
            requests: Requests { answered: tally.answered, refused: tally.refused, done_before: tally.before },
            cut_off: tally.cut_off,
            refused_by_code: tally.refused_by_code,
            first_error: tally.first_error.map(|(_, error)| error),
            not_written: tally.not_written,
            seconds,
            prompt_tokens: metrics.prompt_tokens,
            prompt_tokens_per_second: ratio(metrics.prompt_tokens as f64, seconds),
            shared_prompt_tokens: metrics.counts.shared_tokens,
            restored_prompt_tokens: metrics.counts.restored_tokens,
            generated_tokens: metrics.generated_tokens,
            generated_tokens_per_second: ratio(metrics.generated_tokens as f64, seconds),
            steps: metrics.counts.steps,
            rows: metrics.counts.rows,
            drafted: metrics.drafted,
            accepted: metrics.accepted,
            drafts: JsonDrafts::new(
                metrics.by_model,
                Drafted {
                    drafted: metrics.drafted as usize - metrics.by_model.drafted,
                    accepted: metrics.accepted as usize - metrics.by_model.accepted,
                },
            ),
            mean_accepted_length: ratio(metrics.generated_tokens as f64, metrics.choices as f64),
            most_at_once: metrics.counts.most_running,
            cache_pages: metrics.pages,
            most_cache_pages: metrics.counts.most_pages,
            preempted_to_host: metrics.counts.swapped,
            preempted_to_compute_again: metrics.counts.dropped,
            device_seconds: metrics.busy.as_secs_f64(),
            idle_seconds: metrics.idle.as_secs_f64(),
            peak_memory_bytes: peak_memory(),
        }
    }
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub struct Summary {
    model: String,
    devices: String,
    ended: &'static str,
    requests: Requests,
    cut_off: u64,
    refused_by_code: BTreeMap<String, u64>,
    first_error: Option<Value>,
    not_written: u64,
    seconds: f64,
    prompt_tokens: u64,
    prompt_tokens_per_second: f64,
    shared_prompt_tokens: u64,
    restored_prompt_tokens: u64,
    generated_tokens: u64,
    generated_tokens_per_second: f64,
    steps: u64,
    rows: u64,
    drafted: u64,
    accepted: u64,
    drafts: JsonDrafts,
    mean_accepted_length: f64,
    most_at_once: u32,
    cache_pages: u32,
    most_cache_pages: u32,
    preempted_to_host: u64,
    preempted_to_compute_again: u64,
    device_seconds: f64,
    idle_seconds: f64,
    peak_memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Requests {
    answered: u64,
    refused: u64,
    done_before: u64,
}

impl Summary {
    /// Says on standard error how it went.
    pub fn summarise(&self, report: Report) {
        let Requests { answered, refused, done_before } = self.requests;
        let before = if done_before > 0 { format!(", {done_before} done before") } else { String::new() };
        note(&format!("{} on {}, {:.1} s", self.model, self.devices, self.seconds));
        let kinds: Vec<String> = self.refused_by_code.iter().map(|(code, count)| format!("{count} {code}")).collect();
        let kinds = if kinds.is_empty() { String::new() } else { format!(" ({})", kinds.join(", ")) };
        note(&format!("requests  {answered} answered, {refused} refused{kinds}{before}"));
        if self.not_written > 0 {
            note(&format!(
                "          {} more were finished and are not in the output; they will be done again",
                self.not_written
            ));
        }
        if self.cut_off > 0 {
            note(&format!(
                "          {} of the answered were cut off by max_tokens or the end of the context; raise --max-tokens, their \
                 own `max_tokens` or --context to have them whole",
                self.cut_off
            ));
        }
        if let Some(error) = &self.first_error {
            let which = if refused > 1 { "the first of the refused: " } else { "" };
            note(&format!(
                "          {which}line {}: {}",
                error["line"],
                error["message"].as_str().unwrap_or_default()
            ));
        }
        let shared = match self.shared_prompt_tokens {
            0 => String::new(),
            n => format!(" ({n} of them shared)"),
        };
        note(&format!(
            "tokens    {} in{shared}, {:.1}/s; {} out, {:.1}/s",
            self.prompt_tokens, self.prompt_tokens_per_second, self.generated_tokens, self.generated_tokens_per_second
        ));
        note(&format!(
            "drafts    {} tried, {} accepted; mean accepted length {:.2} tokens",
            self.drafted, self.accepted, self.mean_accepted_length
        ));
        if report.is_verbose() {
            self.drafts.lines().iter().for_each(|line| note(&format!("          {line}")));
            note(&format!(
                "steps     {} with {} rows, at most {} requests at once",
                self.steps, self.rows, self.most_at_once
            ));
            note(&format!(
                "cache     at most {} of {} pages; {} requests preempted to the host, {} to be computed again",
                self.most_cache_pages, self.cache_pages, self.preempted_to_host, self.preempted_to_compute_again
            ));
        }
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b == 0.0 { 0.0 } else { a / b }
}

/// The most memory that the process has had resident, if the system tells.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use indicatif::TermLike;

    use super::*;

    /// A terminal of one line, which keeps what was drawn last.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            120
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, line: &str) -> io::Result<()> {
            self.write_str(line)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().expect("the only thread").push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().expect("the only thread").clear();
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_tells_how_far_how_fast_and_how_full() {
        let screen = Screen::default();
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(screen.clone()), 255);
        let mut bar = Bar::drawn(Some(Survey { total: 10, done: 1 }), target);
        bar.told -= Duration::from_secs(10);
        let mut metrics =
            Metrics { generated_tokens: 300, choices: 200, pages: 40, pages_in_use: 10, ..Metrics::default() };
        metrics.counts.rows = 900;
        std::thread::sleep(Duration::from_millis(20));
        bar.show(&metrics, &Tally { answered: 2, refused: 1, before: 1, ..Tally::default() });
        let line = screen.0.lock().expect("the only thread").clone();
        // In a little over ten seconds: 600 tokens read, 300 generated.
        let rates: Vec<f64> = line.split([' ', ',']).filter_map(|word| word.parse().ok()).collect();
        let near = |value: f64| rates.iter().any(|rate| (rate - value).abs() < 0.2 * value);
        assert!(line.contains("4/10") && line.contains("cache 25 %") && line.contains("1.50 a step"), "{line:?}");
        assert!(line.contains(" in, ") && line.contains(" out tok/s") && near(60.0) && near(30.0), "{line:?}");
        assert!(line.trim_end().ends_with("left"), "{line:?}");
    }

    /// When a run is continued, results of the earlier run are met on the way, now many, now none. The time that is
    /// left must not depend on that.
    #[test]
    fn the_time_that_is_left_is_at_this_run_s_pace() {
        let mut bar = Bar::drawn(Some(Survey { total: 1000, done: 900 }), ProgressDrawTarget::hidden());
        bar.start -= Duration::from_secs(60);
        assert_eq!(bar.left(&Tally::default()), None);
        for before in [0, 10, 500, 900] {
            // Those that wait to be written are done, as far as time goes.
            let tally = Tally { answered: 8, refused: 2, not_written: 10, before, ..Tally::default() };
            let left = bar.left(&tally).expect("there was something to go by").as_secs_f64();
            assert!((239.0..242.0).contains(&left), "{before} met: {left} s");
        }
    }
}
