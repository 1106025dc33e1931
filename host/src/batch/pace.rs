//! How many sequences generate in a step.
//!
//! GEMMs work on whole tiles of rows. A step with a few rows more than fill its tiles takes much longer than one with a
//! few rows less. Then more tokens come in a second if each step leaves some sequences out, in turns, and fills whole
//! tiles with the others. At how many rows that pays depends on the model, its format and the card. So it is measured:
//! some steps have all sequences, some have as many as fill tiles, and what was faster is kept for a while.

/// Steps of a trial.
const TRIAL: u32 = 7;
/// Steps of the first one, which is of all sequences. Where their number changes fast, as at the end of a job, nothing
/// else is tried: who is left out then ends later, and others do not take the place.
const FIRST: u32 = 16;
/// Steps from a choice to the next trials. Each time these confirm the choice, the number doubles.
const KEPT: u32 = 96;
const MOST_KEPT: u32 = 1536;

/// Which sequences generate in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// All that are ready.
    All,
    /// As many as fill whole tiles.
    Whole,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// A trial of all sequences.
    TryAll,
    /// A trial of whole tiles, after one of all sequences that brought so many rows a second.
    TryWhole(f64),
    /// What was faster.
    Keep(Way),
}

impl Phase {
    const fn way(self) -> Way {
        match self {
            Self::TryAll => Way::All,
            Self::TryWhole(_) => Way::Whole,
            Self::Keep(way) => way,
        }
    }
}

/// Chooses how many sequences generate in a step.
#[derive(Clone, Debug)]
pub struct Pace {
    tiles: &'static [u32],
    /// The rows that fill tiles for the present number of sequences; 0 before there were any.
    whole: u32,
    phase: Phase,
    /// Steps of the phase that are still to be planned.
    left: u32,
    /// Rows of the phase's steps so far, and how many seconds they took.
    measured: (u64, f64),
    /// The last choice, and for how many steps it holds.
    chosen: Option<Way>,
    kept: u32,
}

impl Pace {
    /// For a device where these numbers of rows fill tiles, in rising order; none if tiles do not matter.
    pub const fn new(tiles: &'static [u32]) -> Self {
        Self { tiles, whole: 0, phase: Phase::TryAll, left: FIRST, measured: (0, 0.0), chosen: None, kept: KEPT }
    }

    /// How many of `ready` sequences should generate in the next step: all, or as many as fill tiles.
    pub fn rows(&mut self, ready: u32) -> u32 {
        let whole = self.tiles.iter().rev().find(|rows| **rows <= ready);
        let Some(&whole) = whole.filter(|rows| **rows < ready) else { return ready };
        if whole != self.whole {
            *self = Self { whole, ..Self::new(self.tiles) };
        }
        if self.left == 0 {
            self.next_phase();
        }
        self.left -= 1;
        match self.phase.way() {
            Way::All => ready,
            Way::Whole => whole,
        }
    }

    fn next_phase(&mut self) {
        let (rows, seconds) = std::mem::take(&mut self.measured);
        let rate = if seconds > 0.0 { rows as f64 / seconds } else { 0.0 };
        (self.phase, self.left) = match self.phase {
            // Every step had prompts as well, so there is nothing to compare with yet.
            Phase::TryAll if rate == 0.0 => (Phase::TryAll, TRIAL),
            Phase::TryAll => (Phase::TryWhole(rate), TRIAL),
            Phase::TryWhole(all) => {
                let way = if rate > all { Way::Whole } else { Way::All };
                self.kept = if self.chosen == Some(way) { (2 * self.kept).min(MOST_KEPT) } else { KEPT };
                self.chosen = Some(way);
                (Phase::Keep(way), self.kept)
            }
            Phase::Keep(_) => (Phase::TryAll, TRIAL),
        };
    }

    /// Takes note that a step of `rows` generating sequences, and nothing else, took so many seconds. It may be a step
    /// that was planned before the last one: then it counts only if it was of the same way.
    pub fn took(&mut self, rows: u32, seconds: f64) {
        let is_whole = rows <= self.whole;
        if is_whole == (self.phase.way() == Way::Whole) {
            self.measured = (self.measured.0 + u64::from(rows), self.measured.1 + seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps of `ready` sequences that take `seconds(rows)`, until each sequence has had 1,000 rows on the
    /// average. Each step is planned while the one before is under way. Returns how long that takes beside steps that
    /// always have all.
    fn ratio(ready: u32, seconds: impl Fn(u32) -> f64) -> f64 {
        let mut pace = Pace::new(&[128, 256]);
        let (mut rows, mut time, mut under_way) = (0, 0.0, None);
        while rows < 1000 * ready {
            let planned = pace.rows(ready);
            if let Some(before) = under_way.replace(planned) {
                pace.took(before, seconds(before));
            }
            rows += planned;
            time += seconds(planned);
        }
        time / (f64::from(rows) / f64::from(ready) * seconds(ready))
    }

    /// A step's time where a tile of 128 rows takes a second, and each row a little.
    fn tiled(rows: u32) -> f64 {
        f64::from(rows.div_ceil(128)) + f64::from(rows) / 1000.0
    }

    #[test]
    fn tiles_are_filled_where_that_is_faster() {
        // All of 260 take 3.26 s for what 256 do in 2.256 s.
        let best = 2.256 / 256.0 / (tiled(260) / 260.0);
        assert!((best..best + 0.015).contains(&ratio(260, tiled)), "{}", ratio(260, tiled));
        assert!(ratio(130, tiled) < 0.6);
    }

    #[test]
    fn elsewhere_all_generate_in_nearly_all_steps() {
        for ready in [1, 127, 128, 250, 256] {
            assert!(ratio(ready, tiled) < 1.005, "{ready}: {}", ratio(ready, tiled));
        }
        // Where time does not depend on the rows, each row that is left out is lost.
        assert!(ratio(140, |_| 1.0) < 1.005);
        assert!(ratio(255, |_| 1.0) < 1.015, "{}", ratio(255, |_| 1.0));
    }

    #[test]
    fn a_choice_that_was_wrong_is_changed() {
        let mut pace = Pace::new(&[128]);
        let mut counts = [0; 2];
        for (step, count) in [(0..500), (500..5000)].into_iter().zip(&mut counts) {
            for step in step {
                let rows = pace.rows(140);
                *count += u32::from(rows == 128);
                // First tiles matter, later they do not.
                pace.took(rows, if step < 500 { tiled(rows) } else { 1.0 });
            }
        }
        assert!(counts[0] > 400, "{counts:?}");
        assert!(counts[1] < 1200, "{counts:?}");
    }

    #[test]
    fn nothing_is_tried_before_all_were_measured() {
        let mut pace = Pace::new(&[128]);
        // Steps with prompts are not told.
        assert!((0..100).all(|_| pace.rows(140) == 140));
        let mut whole = 0;
        for _ in 0..100 {
            let rows = pace.rows(140);
            whole += u32::from(rows == 128);
            pace.took(rows, tiled(rows));
        }
        assert!(whole > 80, "{whole}");
    }

    #[test]
    fn where_the_number_falls_fast_all_generate() {
        let mut pace = Pace::new(&[128, 192, 256, 384]);
        // 20 end in each step.
        for ready in (1..512).rev().step_by(20) {
            assert_eq!(pace.rows(ready), ready);
            pace.took(ready, tiled(ready));
        }
    }

    #[test]
    fn without_tiles_all_generate() {
        let mut pace = Pace::new(&[]);
        assert!((0..100).all(|ready| pace.rows(ready) == ready));
    }
}
