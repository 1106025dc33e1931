//! Compiles shapes into forms.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};

use super::grammar::Shape;
use super::matcher::Matcher;
use super::recent::Recent;
use super::vocabulary::Vocabulary;
use super::{BEHIND_THOUGHT, THOUGHT, bounds, mask_words};
use crate::quiet::apart;
use crate::text::shown;
use crate::{Checkpoint, Error, Tokenizer};

/// Work that the lexer may spend on one mask, far above what any mask needs. Whether the engine gives up on a mask must
/// not depend on what earlier masks have put into its cache.
const MASK_FUEL: u64 = 2_000_000;
/// The same limit for items of the parser.
const MASK_ITEMS: usize = 500_000;

/// Compiles forms for a model. All callers share one.
pub struct Forms {
    factory: ParserFactory,
    vocabulary: Arc<Tokens>,
    known: Mutex<Recent<Result<Arc<Compiled>, String>>>,
}

/// What forms need to know of the model's tokens.
pub(super) struct Tokens {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Ids that the tokenizer knows.
    pub known: usize,
    /// Mask of what may come in a thought: all but end tokens.
    pub thought: Vec<u32>,
    /// The tokens that open and close a thought, and those that stand between it and the answer. `None` if the
    /// tokenizer has no such tokens.
    pub tags: Option<([u32; 2], Vec<u32>)>,
}

/// A shape, compiled.
pub(super) struct Compiled {
    /// The engine, at the form's beginning.
    pub engine: llguidance::Matcher,
    /// Mask of the tokens that may come first.
    pub first: Vec<u32>,
    pub tokens: Arc<Tokens>,
}

/// A form that answers can have. Cloning shares it.
#[derive(Clone)]
pub struct Form {
    pub(super) compiled: Arc<Compiled>,
    pub(super) thought: Thought,
}

/// What comes before the form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thought {
    /// Nothing.
    None,
    /// A thought that the answer opens.
    Whole,
    /// A thought that the prompt has opened.
    Opened,
}

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Form").field("thought", &self.thought).finish_non_exhaustive()
    }
}

impl Forms {
    /// Compiles forms for a checkpoint's tokenizer and end tokens.
    ///
    /// # Errors
    /// [`Error::NoForms`] if there is no end token: the end of a form could not be told without one.
    pub fn new(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let ends = &checkpoint.generation.eos_token_ids;
        Self::of(&checkpoint.tokenizer, checkpoint.config.vocab_size, ends)
    }

    /// Compiles forms for the parts of a checkpoint: its tokenizer, the rows of its embedding and its end tokens.
    ///
    /// # Errors
    /// [`Error::NoForms`] if there is no end token.
    pub fn of(tokenizer: &Tokenizer, vocab_size: usize, end_tokens: &[u32]) -> Result<Self, Error> {
        let known = tokenizer.vocab_size();
        let ends: Vec<u32> = end_tokens.iter().copied().filter(|&token| (token as usize) < known).collect();
        if ends.is_empty() {
            return Err(Error::NoForms { reason: "the model has no end token (`eos_token_id`)".into() });
        }
        let environment: TokEnv = Arc::new(Vocabulary::new(tokenizer, &ends));
        // The engine need not insert forced text: its tokens come one by one, each the only one allowed (see
        // `Matcher`).
        let able = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&environment, able, &SlicedBiasComputer::general_slices())
            .map_err(|error| Error::NoForms { reason: first_line(&error.to_string()) })?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        limits.step_lexer_fuel = MASK_FUEL;
        limits.step_max_items = MASK_ITEMS;
        let mut thought = vec![u32::MAX; mask_words(vocab_size)];
        ends.iter().for_each(|&end| thought[end as usize / 32] &= !(1 << (end % 32)));
        let tags = THOUGHT.map(|tag| tokenizer.token_to_id(tag));
        let tags = match (tags, tokenizer.encode(BEHIND_THOUGHT)) {
            ([Some(open), Some(close)], Ok(behind)) => Some(([open, close], behind)),
            _ => None,
        };
        Ok(Self { factory, vocabulary: Arc::new(Tokens { vocab_size, known, thought, tags }), known: Mutex::default() })
    }

    /// The form of a shape: compiled, or remembered.
    ///
    /// # Errors
    /// [`Error::Form`], which names what the engine cannot express.
    pub fn compile(&self, shape: &Shape) -> Result<Form, Error> {
        let key = shape.key();
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known().get(&key).cloned();
        let compiled = before.unwrap_or_else(|| {
            let compiled = self.compiled(shape).map(Arc::new);
            known().insert(key, compiled.clone());
            compiled
        });
        let compiled = compiled.map_err(|reason| Error::Form { reason })?;
        Ok(Form { compiled, thought: Thought::None })
    }

    fn compiled(&self, shape: &Shape) -> Result<Compiled, String> {
        match apart("form", bounds::STACK, || self.compiled_here(shape)) {
            Ok(Some(result)) => result,
            Ok(None) => Err("the engine cannot go on with it".into()),
            Err(error) => Err(format!("no thread to compile it ({error})")),
        }
    }

    /// Compiles a shape in this thread, which needs [`bounds::STACK`].
    fn compiled_here(&self, shape: &Shape) -> Result<Compiled, String> {
        let parser = self.factory.create_parser(shape.grammar()?).map_err(|error| reason(&format!("{error:#}")))?;
        bounds::tokens(parser.parser.grammar())?;
        let mut engine = llguidance::Matcher::new(Ok(parser));
        // The first mask is the same for all sequences, and what the engine learns from it helps with later masks.
        let mask = engine.compute_mask_or_eos().map_err(|error| reason(&format!("{error:#}")))?;
        let mut first = vec![0; mask_words(self.vocabulary.vocab_size)];
        self.vocabulary.take(mask.as_slice(), &mut first);
        Ok(Compiled { engine, first, tokens: self.vocabulary.clone() })
    }
}

impl Tokens {
    /// Fills `mask` from the engine's mask, which has room for more tokens than the vocabulary has.
    pub fn take(&self, engine: &[u32], mask: &mut [u32]) {
        mask.fill(0);
        let known = self.known.min(self.vocab_size);
        let words = engine.len().min(mask_words(known));
        mask[..words].copy_from_slice(&engine[..words]);
        if !known.is_multiple_of(32) && words == mask_words(known) {
            mask[words - 1] &= (1 << (known % 32)) - 1;
        }
    }
}

impl Form {
    /// This form after a thought. If `opened`, the prompt has opened the thought; else the answer opens it.
    ///
    /// # Errors
    /// [`Error::Form`] if the tokenizer has no tokens for the tags around a thought: its end could not be told.
    pub fn after_thought(&self, opened: bool) -> Result<Self, Error> {
        if self.compiled.tokens.tags.is_none() {
            let [open, close] = THOUGHT;
            let reason = format!("the model's thoughts are not between tokens {open} and {close}; have it not think");
            return Err(Error::Form { reason });
        }
        let thought = if opened { Thought::Opened } else { Thought::Whole };
        Ok(Self { thought, ..self.clone() })
    }

    /// A matcher at the form's beginning.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self)
    }

    /// Size of the model's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.compiled.tokens.vocab_size
    }
}

/// The engine's message, rewritten for a user: one line that says what to change.
fn reason(error: &str) -> String {
    let line = first_line(error);
    if let Some((_, keys)) = line.split_once("Unimplemented keys: ") {
        let keys: Vec<String> = serde_json::from_str(keys).unwrap_or_default();
        if !keys.is_empty() {
            let (word, are, them) = if keys.len() == 1 { ("keyword", "is", "it") } else { ("keywords", "are", "them") };
            let keys: Vec<String> = keys.iter().map(|key| format!("`{}`", shown(key))).collect();
            return format!("the schema's {word} {} {are} not supported; leave {them} out", keys.join(", "));
        }
    }
    if let Some((_, format)) = line.split_once("Unknown format: ") {
        return format!("the schema's keyword `format` has the value {format}, which is not supported; leave it out");
    }
    if line.contains("oneOf constraints are not supported") {
        return "the schema's keyword `oneOf` is not supported where its parts overlap; `anyOf` is".into();
    }
    // Names of the engine's reasons to stop.
    if line.contains("NoExtension") {
        return "no text follows it: a rule or a `$ref` leads only to itself, or a set of characters is empty".into();
    }
    if line.contains("LexerTooComplex") || line.contains("ParserTooComplex") {
        return "it is too complex for the engine; make it smaller".into();
    }
    if let Some(defect) = line.strip_prefix("panic: ") {
        return format!("the engine cannot go on with it ({defect})");
    }
    // The parser of regular expressions says on a later line what is wrong.
    let wrong = error.lines().find_map(|line| line.trim().strip_prefix("error: "));
    wrong.map_or(line.clone(), |wrong| format!("{line} {}", shown(wrong)))
}

/// The first line of the engine's message. What follows it is for the engine's developers.
pub(super) fn first_line(text: &str) -> String {
    shown(text.trim().lines().next().unwrap_or_default().trim())
}
