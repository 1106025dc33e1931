//! The plans between the passes of a draft model, against a plain model that remembers everything: what the cache
//! holds, what was proposed, and how much of it was accepted.

use crate::common::{Random, Teams, run, run_resident};
use cuda_std::emulator::Buffer;
use gpu_kernels::draft_model::{self, Choice, DraftWords, Economy, NextDraft, PlanDraft, Proposal, Prospect};
use gpu_kernels::drafting::{Cost, ONE, Record, UNTRIED};
use gpu_kernels::logprobs::{Note, NoteLogits, Wanted};
use gpu_kernels::sample::SHARED_BYTES;
use gpu_kernels::step::{Counters, MAX_DECODE_ROWS, NO_TOKEN, Rows, STATE_WORDS, SequenceState};
use gpu_kernels::tree::Likeliest;

const MOST: usize = MAX_DECODE_ROWS as usize;
const VOCAB: u32 = 6;
const COUNTERS: usize = 40;
/// The draft model's tokens: one more than the other model has.
const TOKENS: usize = VOCAB as usize + 1;

/// What the draft model says after these tokens: now and then a token that the other model lacks, or none.
fn says(text: &[i32]) -> u32 {
    let hash = text.iter().rev().take(3).fold(7u64, |h, &t| gpu_kernels::sample::random(h, t as u64));
    match hash % 40 {
        0 => VOCAB,
        1 => NO_TOKEN,
        n => (n % u64::from(VOCAB)) as u32,
    }
}

/// A sequence, its draft model, and what this test knows of both.
struct World {
    history: Buffer<i32>,
    words: Buffer<u32>,
    draft_words: Buffer<u32>,
    columns: [Buffer<u32>; 4],
    drafts: Buffer<i32>,
    draft_rows: Buffer<i32>,
    last: Buffer<i64>,
    guess: Buffer<i32>,
    guess_rows: Buffer<i32>,
    notes: Buffer<u32>,
    noted: Buffer<u32>,
    targets: Buffer<u32>,
    counters: Buffer<u32>,
    max_length: usize,
    /// 1 if a head drafts, 0 if a model does.
    shift: usize,
    text: Vec<i32>,
    /// The token whose key and value each position of the draft model's cache holds.
    cache: Vec<i32>,
    /// How the model's drafts have fared, and the match's.
    records: [Record; 2],
}

impl World {
    fn new(prompt: usize, max_length: usize, shift: usize, random: &mut Random) -> Self {
        let text: Vec<i32> = (0..prompt).map(|_| random.below(VOCAB as usize) as i32).collect();
        let mut history = text.clone();
        history.resize(max_length, -1);
        let mut words = [0; STATE_WORDS];
        words[SequenceState::LENGTH] = prompt as u32;
        let mut draft_words = DraftWords::after_prompt(prompt as u32);
        draft_words[DraftWords::CACHED] -= shift as u32;
        Self {
            history: Buffer::from_slice(&history),
            words: Buffer::from_slice(&words),
            draft_words: Buffer::from_slice(&draft_words),
            columns: std::array::from_fn(|_| Buffer::from_slice(&[99; MOST])),
            drafts: Buffer::from_slice(&[-7; MOST]),
            draft_rows: Buffer::from_slice(&[1]),
            last: Buffer::from_slice(&[0]),
            guess: Buffer::from_slice(&[-9; MOST]),
            guess_rows: Buffer::from_slice(&[1]),
            notes: Buffer::from_slice(&[0; MOST * Note::WORDS]),
            // The note of row 0 has its likeliest token, too.
            noted: Buffer::from_slice(&[0, 1, 0]),
            targets: Buffer::from_slice(&std::array::from_fn::<_, { VOCAB as usize + 1 }, _>(|i| VOCAB - i as u32)),
            counters: Buffer::from_slice(&[1; COUNTERS]),
            max_length,
            shift,
            cache: text[shift..].to_vec(),
            text,
            records: [Record::NEW; 2],
        }
    }

    fn state(&self) -> SequenceState {
        SequenceState { history: self.history.ptr_mut(), words: self.words.ptr_mut() }
    }

    fn rows(&self) -> Rows {
        let [count, tokens, positions, sequences] = self.columns.each_ref().map(Buffer::ptr_mut);
        Rows { count, tokens, positions, sequences, paths: Default::default() }
    }

    fn proposal(&self) -> Proposal {
        Proposal { drafts: self.drafts.ptr_mut(), rows: self.draft_rows.ptr_mut(), last: self.last.ptr_mut() }
    }

    fn likeliest(&self) -> Likeliest {
        Likeliest {
            notes: self.notes.ptr(),
            targets: if self.shift == 1 { self.targets.ptr() } else { Default::default() },
            target_count: self.targets.len() as u32,
            vocab: VOCAB,
        }
    }

    /// If `read` is not 0, this many tokens of the text are read as a prompt is. Then the next proposal is planned.
    fn plan(&mut self, economy: Economy, (matches, read): (bool, usize), seed: u64) {
        if read > 0 {
            self.cache = self.text[..read].to_vec();
        }
        let plan = PlanDraft {
            state: self.state(),
            words: self.draft_words.ptr_mut(),
            rows: self.rows(),
            proposal: self.proposal(),
            guess: if matches { self.guess.ptr() } else { Default::default() },
            guess_rows: self.guess_rows.ptr_mut(),
            likeliest: self.likeliest(),
            noted: self.noted.ptr_mut(),
            counters: Counters { words: self.counters.ptr_mut(), count: COUNTERS as u32 },
            max_length: self.max_length as u32,
            read: read as u32,
            shift: self.shift as u32,
            economy,
        };
        run::<draft_model::plan_draft>([1, 1, 1], 0, seed, plan);
        assert_eq!(self.counters.to_vec(), [0; COUNTERS]);
    }

    /// Runs the rows that are planned. Returns what the model says after the last of them, if there are any.
    fn pass(&mut self, chain: &[i32]) -> Option<u32> {
        let [count, tokens, positions, sequences] = self.columns.each_ref().map(Buffer::to_vec);
        let count = count[0] as usize;
        let text = [&self.text[..], chain].concat();
        for r in 0..count {
            let (token, position) = (tokens[r] as i32, positions[r] as usize);
            assert_eq!((token, sequences[r]), (text[position + self.shift], 0), "the row at {position}");
            assert!(self.cache.len() >= position, "nothing is left out before {position}");
            assert_eq!(self.cache[..position], text[self.shift..][..position], "what is read before {position}");
            self.cache.truncate(position);
            self.cache.push(token);
        }
        if count > 0 { Some(says(&self.cache)) } else { None }
    }

    fn next(&mut self, number: u32, said: Option<u32>, seed: u64) {
        let rows = self.columns[0].to_vec()[0];
        let noted = self.noted.to_vec()[Wanted::ROW];
        assert_eq!(noted, if rows == 0 { Wanted::NO_ROW } else { rows - 1 });
        // A head numbers the model's tokens in reverse order.
        let said = said.map(|said| if self.shift == 1 && said <= VOCAB { VOCAB - said } else { said });
        // The logits of rows before the last say something else.
        let mut logits: Vec<f32> = (0..MOST * TOKENS).map(|i| (i % 5) as f32).collect();
        if let Some(said) = said {
            let row = &mut logits[(rows as usize - 1) * TOKENS..][..TOKENS];
            let mark = |token| if token as u32 == said { 9.0 } else { token as f32 };
            row.iter_mut().enumerate().for_each(|(token, logit)| {
                *logit = if said == NO_TOKEN { f32::NEG_INFINITY } else { mark(token) };
            });
        }
        let (logits, teams) = (Buffer::from_slice(&logits), Teams::new(1, 1 + seed as u32 % 2));
        self.counters = Buffer::from_slice(&[1; COUNTERS]);
        let next = NextDraft {
            note: NoteLogits {
                logits: logits.ptr(),
                wanted: self.noted.ptr(),
                sampled: Default::default(),
                // SAFETY: a note for each pass.
                notes: unsafe { self.notes.ptr_mut().at(number as usize * Note::WORDS) },
                split: teams.split(),
                vocab: TOKENS as u32,
                noted: 1,
            },
            state: self.state(),
            words: self.draft_words.ptr_mut(),
            rows: self.rows(),
            likeliest: self.likeliest(),
            noted: self.noted.ptr_mut(),
            proposal: self.proposal(),
            counters: Counters { words: self.counters.ptr_mut(), count: COUNTERS as u32 },
            number,
            shift: self.shift as u32,
        };
        run_resident::<draft_model::next_draft>(teams.grid(), SHARED_BYTES, seed, next);
        assert_eq!(self.counters.to_vec(), [0; COUNTERS]);
    }

    /// What has been proposed so far.
    fn proposed(&self) -> Vec<i32> {
        let rows = self.draft_rows.to_vec()[0].max(1) as usize;
        self.drafts.to_vec()[1..rows].to_vec()
    }

    /// Confirms these tokens, as a step does.
    fn accept(&mut self, tokens: &[i32]) {
        self.text.extend_from_slice(tokens);
        let mut history = self.history.to_vec();
        history[..self.text.len()].copy_from_slice(&self.text);
        self.history = Buffer::from_slice(&history);
        let mut words = self.words.to_vec();
        words[SequenceState::LENGTH] = self.text.len() as u32;
        words[SequenceState::STEP] += 1;
        words[SequenceState::FINISHED] = (self.text.len() >= self.max_length).into();
        self.draft_rows = Buffer::from_slice(&[1 - words[SequenceState::FINISHED] as i32]);
        self.words = Buffer::from_slice(&words);
    }
}

fn same(a: &[i32], b: &[i32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Drafts for a sequence from its prompt to its end. How many drafts are accepted is random.
fn drafts_of_a_sequence(seed: u64, shift: usize) {
    let mut random = Random::new(seed);
    let prompt = 1 + random.below(20);
    let mut world = World::new(prompt, prompt + 2 + random.below(120), shift, &mut random);
    let matches = random.below(2) == 1;
    let adaptive = random.below(3) > 0;
    let (row, pass) = if adaptive {
        (Cost { any: 0, each: ONE / 64 }, ONE / (1 + random.below(12) as u32))
    } else {
        Default::default()
    };
    // How often a draft is right, in percent; it changes as the text goes on.
    let mut right = random.below(101);
    world.accept(&[random.below(VOCAB as usize) as i32]);
    let (mut chain, mut guess): (Vec<i32>, Vec<i32>) = (Vec::new(), Vec::new());
    let (mut newest, mut cached) = (1, prompt - shift);
    loop {
        let room = [8, 16][random.below(2)];
        let economy = Economy { row, pass, most: 1 + random.below(MOST - 1) as u32, room, due: room - 4 };
        // How the last proposal fared.
        let came = &world.text[world.text.len() - newest..];
        for (record, drafts) in world.records.iter_mut().zip([&chain, &guess]) {
            *record = record.after(same(drafts, came) as u32, drafts.len().min(came.len()) as u32);
        }
        let finished = world.text.len() >= world.max_length;
        guess.clear();
        if matches && !finished {
            let left = world.max_length - world.text.len();
            guess = (0..random.below(MOST).min(left)).map(|_| random.below(VOCAB as usize) as i32).collect();
            let mut drafts = vec![0];
            drafts.extend_from_slice(&guess);
            drafts.resize(MOST, -9);
            world.guess = Buffer::from_slice(&drafts);
        }
        world.guess_rows = Buffer::from_slice(&[if finished { 0 } else { 1 + guess.len() as i32 }]);
        // The cache holds all drafts of the chain but the last, which was not run. (If a token that is none ended the
        // chain, the last was run too, but is not counted.)
        let (before, agreed) = (world.text.len() - newest, same(&chain, came));
        let valid = if chain.is_empty() || shift == 1 { cached } else { before + agreed.min(chain.len() - 1) };
        // The newest token runs again where the chain had foreseen it.
        let valid = valid.min(world.text.len() - 1 - shift);
        assert!(valid <= same(&world.cache, &world.text[shift..]).min(world.text.len() - 1 - shift));
        // Only for a model: a head's rows need hidden states.
        let reads = shift == 0 && random.below(8) == 0;
        let read = if reads { valid + random.below(world.text.len() - valid) } else { 0 };
        let valid = valid.max(read);
        world.plan(economy, (matches, read), seed);

        let prospect = Prospect {
            model: world.records[0].acceptance,
            ngram: world.records[1].acceptance,
            lag: (world.text.len() - shift - valid) as u32,
            left: world.max_length.saturating_sub(world.text.len() + 1) as u32,
            guessed: guess.len() as u32,
        };
        let choice = if finished { Choice::default() } else { economy.choose(prospect) };
        let words = world.draft_words.to_vec();
        let record = |acceptance: usize, trials: usize| Record { acceptance: words[acceptance], trials: words[trials] };
        let records =
            [(DraftWords::MODEL, 0), (DraftWords::NGRAM, 1)].map(|(of, i)| record(of, DraftWords::TRIALS + i));
        assert_eq!(records, world.records);
        assert_eq!(world.columns[0].to_vec()[0], choice.rows, "{prospect:?} {economy:?}");
        assert_eq!(words[DraftWords::CHAINED], choice.chain);
        assert_eq!(words[DraftWords::WANTED], choice.wanted);
        assert_eq!(words[DraftWords::BEHIND], prospect.lag - choice.rows);
        assert_eq!(words[DraftWords::AGREED], agreed as u32);

        cached = valid + choice.rows as usize;
        chain.clear();
        for number in 0..economy.most {
            let said = world.pass(&chain);
            world.next(number, said, seed);
            if let Some(token) = said.filter(|&token| token < VOCAB && chain.len() == number as usize)
                && (number < choice.chain)
            {
                chain.push(token as i32);
            }
        }
        let proposed = world.proposed();
        if finished {
            assert!(proposed.is_empty() && chain.is_empty());
            return;
        }
        assert_eq!(proposed, if choice.by_guess { guess.clone() } else { chain.clone() });
        let end = world.text.len() + proposed.len();
        assert_eq!(world.history.to_vec()[world.text.len()..end], proposed);
        if !proposed.is_empty() {
            assert_eq!(world.last.to_vec(), [end as i64 - 1]);
            let acceptance = world.records[usize::from(choice.by_guess)].acceptance;
            assert_eq!(world.words.to_vec()[SequenceState::ACCEPTANCE], acceptance);
        }

        if random.below(10) == 0 {
            right = random.below(101);
        }
        // A step may have no rows for the last drafts. The token after those that it has may be the next of them.
        let run = if random.below(3) == 0 { random.below(proposed.len() + 1) } else { proposed.len() };
        let mut tokens: Vec<i32> = Vec::new();
        for &draft in &proposed[..run] {
            if random.below(100) >= right {
                break;
            }
            tokens.push(draft);
        }
        let foreseen = tokens.len() == run && random.below(2) == 0;
        let next = proposed.get(tokens.len()).map_or(0, |draft| draft + i32::from(!foreseen)) % VOCAB as i32;
        tokens.push(next);
        tokens.truncate(world.max_length - world.text.len());
        newest = tokens.len();
        world.accept(&tokens);
    }
}

#[test]
fn rows_are_what_the_cache_lacks_and_chains_are_what_the_model_says() {
    for seed in 0..60 {
        drafts_of_a_sequence(seed, 0);
        drafts_of_a_sequence(seed, 1);
    }
}

const HALF_PASS: Economy = Economy { row: Cost { any: 0, each: ONE / 64 }, pass: ONE / 8, most: 7, room: 16, due: 12 };

#[test]
fn a_hopeless_model_runs_when_its_cache_is_far_behind_and_no_sooner() {
    let hopeless = Prospect { model: ONE / 100, ngram: UNTRIED, lag: 1, left: 100, guessed: 0 };
    for lag in 1..40 {
        let choice = HALF_PASS.choose(Prospect { lag, ..hopeless });
        let expected = match lag {
            0..12 => (0, 0),
            // The pass that catches up brings a trial.
            12..=16 => (lag, 1),
            // There is more to catch up with.
            _ => (16, 0),
        };
        assert_eq!((choice.rows, choice.chain), expected, "lag {lag}");
        assert_eq!(choice.wanted, 0);
    }
}

#[test]
fn few_trials_tell_a_hopeless_source_and_recent_ones_count_most() {
    let after = |trials: &[bool]| trials.iter().fold(Record::NEW, |record, &right| record.learned(right)).acceptance;
    for wrong in 0..6 {
        // Of the prior's two trials one was right.
        assert!(after(&vec![false; wrong]).abs_diff(ONE / (2 + wrong as u32)) <= wrong as u32, "{wrong}");
    }
    assert!(after(&[true, false, true]).abs_diff(ONE * 3 / 5) <= 3);
    let (long_ago, lately) = ([true; 40], [false; 40]);
    assert!(after(&[long_ago, lately].concat()) < ONE / 50 && after(&[lately, long_ago].concat()) > ONE * 49 / 50);
    assert_eq!(Record::NEW.after(2, 3), [true, true, false].iter().fold(Record::NEW, |of, &right| of.learned(right)));
    assert_eq!(Record::NEW.after(2, 2), Record::NEW.learned(true).learned(true));
}

#[test]
fn the_better_source_proposes() {
    let prospect = Prospect { model: ONE * 9 / 10, ngram: ONE * 9 / 10, lag: 1, left: 100, guessed: 7 };
    // The match is as good as the model, and needs no passes.
    assert!(HALF_PASS.choose(prospect).by_guess);
    let choice = HALF_PASS.choose(Prospect { ngram: ONE / 10, ..prospect });
    assert!(!choice.by_guess && choice.chain > 3, "{choice:?}");
    let choice = HALF_PASS.choose(Prospect { model: ONE / 10, ngram: ONE / 10, ..prospect });
    assert!(choice.by_guess && choice.chain == 0);
    // Where nothing costs anything, all that can be proposed is, and a match comes first.
    let free = Economy { row: Cost::default(), pass: 0, ..HALF_PASS };
    assert!(free.choose(Prospect { ngram: 0, ..prospect }).by_guess);
    assert_eq!(free.choose(Prospect { model: 0, guessed: 0, ..prospect }).chain, 7);
    assert_eq!(free.choose(Prospect { model: 0, guessed: 0, left: 3, ..prospect }).chain, 3);
    assert_eq!(free.choose(Prospect { guessed: 0, left: 0, ..prospect }).chain, 0);
}
