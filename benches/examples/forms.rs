//! What answers of a given form cost compared with free answers, and whether they have the form, on a card.
//!
//! `forms SIZE`, such as `forms 8B`; `forms small` runs on the emulator. Words after SIZE choose parts: `one`, `batch`,
//! `first`, `valid`. Random weights, which try every token that a form allows. Prints a line for each measurement, and
//! the figures as JSON.

use std::ops::ControlFlow;
use std::time::Instant;

use benches::forms::{checkpoint, fields, schemas};
use benches::{Arguments, tokens};
use host::batch::{Answer, Batch, BatchOptions, GpuBatch, Job};
use host::device::Device;
use host::weights::DeviceWeights;
use host::{Backend, Finish, Gpu, NgramDraft, Request, Sequence};
use model::{Checkpoint, Config, Form, Forms, Sampling, Shape};
use serde_json::Value;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
type Figures = Vec<(String, f64)>;

/// The sizes of the measurements.
struct Scale {
    prompt: usize,
    /// Most tokens of an answer.
    most: usize,
    repeats: u64,
    batches: &'static [u32],
    /// Fields of two schemas: the one that a single sequence follows, and the one that the first token is measured
    /// with.
    fields: [usize; 2],
    /// Answers to each schema.
    answers: u64,
    /// Sequences that run at once while answers are checked.
    sequences: u32,
}

fn main() -> Result<()> {
    let arguments = Arguments::read()?;
    let (mut config, device) = arguments.subject(arguments.word(0).ok_or("usage: forms SIZE")?)?;
    let scale = if device.is_emulator() {
        // Forms need a vocabulary that is at least as large as the demo's.
        config.vocab_size = benches::demo().config.vocab_size;
        Scale { prompt: 5, most: 12, repeats: 1, batches: &[3], fields: [2, 20], answers: 1, sequences: 8 }
    } else {
        Scale {
            prompt: 64,
            most: 900,
            repeats: 8,
            batches: &[64, 256],
            fields: [20, 200],
            answers: 200,
            sequences: 256,
        }
    };
    let begun = Instant::now();
    let checkpoint = checkpoint(&config)?;
    let made = begun.elapsed();
    let begun = Instant::now();
    let forms = Forms::new(&checkpoint)?;
    println!(
        "a vocabulary of {} tokens: made in {:.2} s, its trie in {:.3} s",
        config.vocab_size,
        made.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    let measured = Measured { device, config, checkpoint, forms, scale };
    let mut figures = Figures::new();
    for (part, run) in [
        ("one", Measured::one as fn(&Measured, &mut Figures) -> Result<()>),
        ("batch", Measured::batches),
        ("first", Measured::first),
        ("valid", Measured::valid),
    ] {
        if arguments.words.len() == 1 || arguments.words[1..].iter().any(|word| word == part) {
            run(&measured, &mut figures)?;
        }
    }
    let figures: Vec<String> = figures.iter().map(|(name, value)| format!("\"{name}\": {value:.4}")).collect();
    println!("{{{}}}", figures.join(", "));
    Ok(())
}

/// What is measured, and with what sizes.
struct Measured {
    device: Device,
    config: Config,
    checkpoint: Checkpoint,
    forms: Forms,
    scale: Scale,
}

/// An answer of one sequence.
struct Run {
    tokens: Vec<u32>,
    steps: usize,
    /// Seconds from the first token to the last.
    seconds: f64,
    /// Seconds until the first token.
    first: f64,
}

impl Measured {
    fn hot(&self, seed: u64) -> Sampling {
        Sampling { temperature: 1.5, seed, ..Sampling::default() }
    }

    fn form(&self, schema: &Value) -> Result<Form> {
        Ok(self.forms.compile(&Shape::JsonSchema(schema.clone()))?)
    }

    fn gpu(&self) -> Result<Gpu> {
        let weights = DeviceWeights::random(&self.config, &self.device)?;
        Ok(Gpu::with_weights(&self.device, &self.config, weights, self.scale.prompt + 8 * self.scale.most)?)
    }

    fn run(
        &self,
        gpu: &mut Gpu,
        most: usize,
        sampling: Sampling,
        draft: Option<NgramDraft>,
        form: Option<&Form>,
    ) -> Result<Run> {
        let prompt = tokens(&self.config, self.scale.prompt);
        let ends = &self.checkpoint.generation.eos_token_ids;
        let stop_tokens: &[u32] = if form.is_some() { ends } else { &[] };
        // The prompt is in the cache already: it is not what is measured.
        let sequence = Sequence {
            prompt: &prompt,
            max_length: prompt.len() + most,
            sampling,
            draft: draft.map(Into::into),
            stop_tokens,
            form,
        };
        let begun = Instant::now();
        gpu.begin(&sequence, &mut |_, _| ControlFlow::Continue(()))?;
        let step = gpu.step()?;
        let first = begun.elapsed().as_secs_f64();
        let (mut tokens, mut finished, mut steps) = (step.tokens, step.finished, 0);
        let begun = Instant::now();
        while !finished {
            let step = gpu.step()?;
            tokens.extend(step.tokens);
            finished = step.finished;
            steps += 1;
        }
        let seconds = begun.elapsed().as_secs_f64();
        self.device.synchronize()?;
        Ok(Run { tokens, steps, seconds, first })
    }

    /// One sequence: the time of a step under a form compared with a free one, and tokens a second when forced tokens
    /// are drafted.
    fn one(&self, figures: &mut Figures) -> Result<()> {
        let mut gpu = self.gpu()?;
        let form = self.form(&fields(self.scale.fields[0]))?;
        let mut worst = [f64::INFINITY; 2];
        for (name, greedy) in [("greedy", true), ("temperature 1.5", false)] {
            // Tokens, steps and seconds: free, with the form, and with drafts of it.
            let mut sums = [[0.0; 3]; 3];
            for seed in 0..=self.scale.repeats {
                let sampling = if greedy { Sampling { seed, ..Sampling::default() } } else { self.hot(seed) };
                let held = self.run(&mut gpu, self.scale.most, sampling, None, Some(&form))?;
                let free = self.run(&mut gpu, held.tokens.len(), sampling, None, None)?;
                let drafting = Some(NgramDraft::default());
                let drafted = self.run(&mut gpu, self.scale.most, sampling, drafting, Some(&form))?;
                if drafted.tokens != held.tokens {
                    return Err("drafts have changed the tokens of a form".into());
                }
                // The first run warms up.
                if seed > 0 {
                    for (sum, run) in sums.iter_mut().zip([free, held, drafted]) {
                        let more = [(run.tokens.len() - 1) as f64, run.steps as f64, run.seconds];
                        sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
                    }
                }
            }
            let [free, held, drafted] = sums;
            let step = (free[2] / free[1]) / (held[2] / held[1]);
            let speedup = (drafted[0] / drafted[2]) / (free[0] / free[2]);
            println!(
                "one sequence, {name}, {} fields: a step {:.1} µs, {step:.4} of free's rate ({:.1} µs); with drafts {:.2} \
                 tokens a step, {:.1} tokens/s, {speedup:.3} x free's {:.1}",
                self.scale.fields[0],
                1e6 * held[2] / held[1],
                1e6 * free[2] / free[1],
                drafted[0] / drafted[1],
                drafted[0] / drafted[2],
                free[0] / free[2]
            );
            worst = [worst[0].min(step), worst[1].min(speedup)];
        }
        figures.push(("form.m1.ratio".into(), worst[0]));
        figures.push(("form.m1.forced_speedup".into(), worst[1]));
        Ok(())
    }

    /// The time to the first token with a schema of many fields, less that without one.
    fn first(&self, figures: &mut Figures) -> Result<()> {
        let mut gpu = self.gpu()?;
        let mut over = Vec::new();
        for seed in 0..=self.scale.repeats {
            let free = self.run(&mut gpu, 1, self.hot(seed), None, None)?;
            // A schema that was not compiled before.
            let mut schema = fields(self.scale.fields[1]);
            schema["title"] = seed.into();
            let begun = Instant::now();
            let form = self.form(&schema)?;
            let compiled = begun.elapsed().as_secs_f64();
            let held = self.run(&mut gpu, 1, self.hot(seed), None, Some(&form))?;
            if seed > 0 || self.scale.repeats == 1 {
                over.push(1e3 * (compiled + held.first - free.first));
            }
        }
        over.sort_by(f64::total_cmp);
        let worst = over[over.len() - 1];
        println!(
            "the first token, {} fields: {:.2} ms over one without (median), at most {worst:.2} ms",
            self.scale.fields[1],
            over[over.len() / 2]
        );
        figures.push(("form.first_token_ms".into(), worst));
        Ok(())
    }

    /// The answers to `jobs` in a batch of `sequences` sequences, and the seconds that they took.
    fn together(&self, sequences: u32, jobs: &[Request]) -> Result<(Vec<Answer>, f64)> {
        let weights = DeviceWeights::random(&self.config, &self.device)?;
        let options = BatchOptions { sequences: Some(sequences), ..BatchOptions::default() };
        let context = self.scale.prompt + self.scale.most + 1;
        let backend = GpuBatch::with_weights(&self.device, &self.config, weights, context, options)?;
        let mut batch = Batch::with_backend(self.checkpoint.clone(), Box::new(backend));
        let (mut coming, mut answers) = (jobs.iter().zip(0..), Vec::new());
        let begun = Instant::now();
        loop {
            while batch.has_room()
                && let Some((request, id)) = coming.next()
            {
                batch.submit(Job { id, request: request.clone(), logprobs: None })?;
            }
            if batch.is_idle() {
                break;
            }
            for done in batch.step()? {
                answers.push((done.id, done.answer?));
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        answers.sort_by_key(|(id, _)| *id);
        Ok((answers.into_iter().map(|(_, answer)| answer).collect(), seconds))
    }

    fn request(&self, seed: u64, form: Option<Form>, most: usize) -> Request {
        Request {
            prompt: tokens(&self.config, self.scale.prompt),
            max_tokens: most,
            sampling: self.hot(seed),
            draft: None,
            stop: Vec::new(),
            ignore_end: form.is_none(),
            form,
        }
    }

    /// Batches whose sequences each follow one of fifty schemas, compared with free answers of the same lengths.
    fn batches(&self, figures: &mut Figures) -> Result<()> {
        let forms = schemas().iter().map(|schema| self.form(schema)).collect::<Result<Vec<_>>>()?;
        for &sequences in self.scale.batches {
            let held: Vec<Request> = (0..6 * sequences as u64)
                .map(|i| self.request(i, Some(forms[i as usize % forms.len()].clone()), self.scale.most))
                .collect();
            let (answers, held_seconds) = self.together(sequences, &held)?;
            let as_long = |(answer, i): (&Answer, u64)| self.request(i, None, answer.tokens.len());
            let free: Vec<Request> = answers.iter().zip(0..).map(as_long).collect();
            let (free_answers, free_seconds) = self.together(sequences, &free)?;
            let tokens = |answers: &[Answer]| answers.iter().map(|answer| answer.tokens.len()).sum::<usize>();
            let (count, ratio) = (tokens(&answers), free_seconds / held_seconds);
            if tokens(&free_answers) != count {
                return Err("free answers are not as long as they were to be".into());
            }
            println!(
                "{} requests, {sequences} at a time, {} schemas: {count} tokens, {:.0}/s, {ratio:.4} of free's {:.0}/s",
                held.len(),
                forms.len(),
                count as f64 / held_seconds,
                count as f64 / free_seconds
            );
            figures.push((format!("form.batch{sequences}.ratio"), ratio));
        }
        Ok(())
    }

    /// How many sampled answers follow their schema, among those that no limit cut off. Some are also answered alone.
    fn valid(&self, figures: &mut Figures) -> Result<()> {
        let schemas = schemas();
        let forms = schemas.iter().map(|schema| self.form(schema)).collect::<Result<Vec<_>>>()?;
        let count = schemas.len() as u64 * self.scale.answers;
        let of = |i: u64| i as usize % schemas.len();
        let jobs: Vec<Request> =
            (0..count).map(|i| self.request(i, Some(forms[of(i)].clone()), self.scale.most)).collect();
        let (answers, _) = self.together(self.scale.sequences, &jobs)?;
        let (mut whole, mut valid) = (0, 0);
        for (answer, i) in answers.iter().zip(0..).filter(|(answer, _)| answer.finish == Finish::Stop) {
            whole += 1;
            let validator = jsonschema::options().should_validate_formats(true).build(&schemas[of(i)])?;
            match serde_json::from_str::<Value>(&answer.text) {
                Ok(value) if validator.is_valid(&value) => valid += 1,
                Ok(_) => println!("not valid, schema {}: {}", of(i), answer.text),
                Err(error) => println!("{error}, schema {}: {}", of(i), answer.text),
            }
        }
        let share = valid as f64 / whole.max(1) as f64;
        println!("{valid} of {whole} whole answers are valid, {} were cut off by the limit", count - whole);
        figures.push(("form.valid_share".into(), share));

        let mut gpu = self.gpu()?;
        let some = (0..count).step_by(1 + count as usize / 20);
        for i in some.clone() {
            for draft in [None, Some(NgramDraft::default())] {
                let alone = self.run(&mut gpu, self.scale.most, self.hot(i), draft, Some(&forms[of(i)]))?;
                if alone.tokens != answers[i as usize].tokens {
                    return Err(format!("answer {i} has other tokens alone, with {draft:?}").into());
                }
            }
        }
        println!("{} of them have the same tokens alone, with drafts and without", some.count());
        Ok(())
    }
}
