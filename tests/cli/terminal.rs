//! `warpdraft chat` and `generate` as a person meets them: at a terminal, whose screen is looked at.

use std::io::{Read, Write};
use std::num::NonZero;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pty_process::Size;
use pty_process::blocking::{Command, Pts, Pty};

use crate::binary;
use crate::broken::Broken;

/// How long a screen may take: an emulated terminal on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
const ROWS: u16 = 40;
const COLUMNS: u16 = 100;

fn size(cells: u16) -> NonZero<u16> {
    NonZero::new(cells).expect("a terminal has cells")
}

/// The program at a terminal.
struct Terminal {
    child: std::process::Child,
    keys: Arc<Mutex<Pty>>,
    /// Held, so that the terminal outlives the program.
    _line: Pts,
    screen: Arc<Mutex<Screen>>,
    /// The user's folder for states.
    _states: Option<tempfile::TempDir>,
}

/// What the terminal shows.
struct Screen {
    parser: vt100::Parser,
    /// Every byte that came.
    bytes: Vec<u8>,
}

impl Terminal {
    fn start(args: &[&str], environment: &[(&str, &str)]) -> Self {
        let states = tempfile::tempdir().unwrap();
        let mut terminal = Self::start_in(states.path(), args, environment);
        terminal._states = Some(states);
        terminal
    }

    /// With `states` as the user's folder for states.
    fn start_in(states: &Path, args: &[&str], environment: &[(&str, &str)]) -> Self {
        let (pty, pts) = pty_process::blocking::open().expect("a terminal");
        pty.resize(Size::new(ROWS, COLUMNS)).unwrap();
        let command = Command::new(binary()).args(args).env("WARPDRAFT_DEVICE", "cpu").env("TERM", "xterm");
        let command = command.env("XDG_STATE_HOME", states).env_remove("NO_COLOR").env_remove("WARPDRAFT_MODEL");
        let mut command = command.envs(environment.iter().copied());
        let child = command.spawn_borrowed(&pts).expect("the binary starts");
        let parser = vt100::Parser::new(size(ROWS), size(COLUMNS), 1000);
        let screen = Arc::new(Mutex::new(Screen { parser, bytes: Vec::new() }));
        let fd = std::os::fd::AsFd::as_fd(&pty).try_clone_to_owned().unwrap();
        let mut reader = std::fs::File::from(fd);
        let seen = Arc::clone(&screen);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // A terminal that nobody holds any more gives an error.
            while let Ok(n @ 1..) = reader.read(&mut buffer) {
                let mut screen = seen.lock().unwrap();
                screen.parser.process(&buffer[..n]);
                screen.bytes.extend_from_slice(&buffer[..n]);
            }
        });
        Self { child, keys: Arc::new(Mutex::new(pty)), _line: pts, screen, _states: None }
    }

    fn chat(extra: &[&str]) -> Self {
        let mut terminal = Self::start(&[CHAT, extra].concat(), &[]);
        terminal.wait("a prompt", |screen| screen.ends_with('>'));
        terminal
    }

    fn press(&self, keys: &str) {
        self.keys.lock().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    fn press_bytes(&self, keys: &[u8]) {
        self.keys.lock().unwrap().write_all(keys).unwrap();
    }

    /// The screen, without blanks at its ends.
    fn shown(&self) -> String {
        self.screen.lock().unwrap().parser.screen().contents().trim_end().to_owned()
    }

    fn bytes(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap().bytes).into_owned()
    }

    /// Waits until the screen is `right`; gives it.
    fn wait(&mut self, what: &str, right: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let shown = self.shown();
            if right(&shown) {
                return shown;
            }
            assert!(start.elapsed() < PATIENCE, "no {what} on the screen:\n{shown}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for the answer to a turn, and the prompt behind its summary.
    fn answered(&mut self, turns: usize) -> String {
        self.wait("answer", |screen| screen.matches("tokens/s").count() == turns && screen.ends_with('>'))
    }

    fn end(mut self) -> (ExitStatus, String) {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                // What was written last is still on its way.
                std::thread::sleep(Duration::from_millis(200));
                return (status, self.bytes());
            }
            assert!(start.elapsed() < PATIENCE, "it does not end:\n{}", self.shown());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const CHAT: &[&str] = &["chat", "--temperature", "0", "--max-tokens", "4"];
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const UP: &str = "\x1b[A";
const ALT_ENTER: &str = "\x1b\r";

/// As a terminal sends what is pasted.
fn pasted(text: &str) -> String {
    format!("\x1b[200~{}\x1b[201~", text.replace('\n', "\r"))
}

#[test]
fn turns_are_edited_and_ctrl_d_leaves() {
    let mut chat = Terminal::chat(&[]);
    // Corrected in the middle: five times left, backspace.
    chat.press("What is a vXctor?\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x7fe\r");
    let shown = chat.answered(1);
    assert!(shown.contains("> What is a vector?"), "{shown}");
    chat.press(CTRL_D);
    assert_eq!(chat.end().0.code(), Some(0));
}

#[test]
fn ctrl_c_clears_the_line_and_twice_leaves() {
    let mut chat = Terminal::chat(&[]);
    chat.press("not to be sent");
    chat.wait("the line", |screen| screen.ends_with("> not to be sent"));
    chat.press(CTRL_C);
    chat.wait("a new prompt", |screen| screen.ends_with("not to be sent\n>"));
    // The arrow brings it back, and another key begins the count anew.
    chat.press(UP);
    chat.wait("it again", |screen| screen.matches("not to be sent").count() == 2);
    chat.press(CTRL_C);
    chat.wait("a prompt", |screen| screen.ends_with('>'));
    chat.press(CTRL_C);
    assert_eq!(chat.end().0.code(), Some(130));
}

#[test]
fn one_ctrl_c_at_an_empty_prompt_says_how_to_leave() {
    let mut chat = Terminal::chat(&[]);
    chat.press(CTRL_C);
    chat.wait("the way out", |screen| screen.contains("Ctrl-C again leaves") && screen.ends_with('>'));
    chat.press("Hello\r");
    chat.answered(1);
    chat.press("/quit\r");
    assert_eq!(chat.end().0.code(), Some(0));
}

#[test]
fn ctrl_c_stops_an_answer_and_the_conversation_goes_on() {
    let args = ["chat", "--temperature", "0", "--ignore-eos"];
    let mut chat = Terminal::start(&args, &[]);
    chat.wait("a prompt", |screen| screen.ends_with('>'));
    chat.press("What does `push` do?\r");
    chat.wait("an answer", |screen| screen.lines().count() > 3);
    chat.press(CTRL_C);
    let shown = chat.answered(1);
    assert!(shown.contains("interrupted]"), "{shown}");
    chat.press(CTRL_D);
    assert_eq!(chat.end().0.code(), Some(0));
}

#[test]
fn pasted_lines_are_one_turn_and_so_are_typed_ones() {
    let mut chat = Terminal::chat(&[]);
    chat.press(&pasted("fn one() {\n    /quit\n}"));
    chat.wait("the paste", |screen| screen.ends_with('}'));
    chat.press("\r");
    chat.answered(1);
    chat.press("first");
    chat.press(ALT_ENTER);
    chat.press("second\r");
    let shown = chat.answered(2);
    assert!(shown.contains("> first\nsecond"), "{shown}");
}

#[test]
fn what_is_typed_ahead_is_a_turn_of_its_own_and_not_in_the_answer() {
    let mut chat = Terminal::chat(&[]);
    chat.press("What is a vector?\rWhat is a slice?\r");
    let shown = chat.answered(2);
    assert_eq!(shown.matches("a slice?").count(), 1, "{shown}");
    assert!(shown.contains("> What is a slice?"), "{shown}");
}

#[test]
fn a_line_longer_than_the_terminals_own_buffer_arrives_whole() {
    let mut chat = Terminal::start(&[CHAT, &["--json", "--context", "4096"]].concat(), &[]);
    chat.wait("a prompt", |screen| screen.ends_with('>'));
    // Terminals that edit lines by themselves hold 4,095 bytes.
    let long = "word ".repeat(1200);
    for part in long.as_bytes().chunks(500) {
        chat.press_bytes(part);
    }
    chat.press("\r");
    let start = Instant::now();
    let tokens = loop {
        let bytes = chat.bytes();
        if let Some((_, rest)) = bytes.split_once("\"prompt_tokens\":") {
            break rest.split(',').next().unwrap().parse::<u32>().unwrap();
        }
        assert!(start.elapsed() < PATIENCE, "no answer in {} bytes", bytes.len());
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(tokens > 1200, "{tokens} tokens");
}

#[test]
fn unknown_commands_are_refused_and_known_ones_complete() {
    let mut chat = Terminal::chat(&[]);
    chat.press("/rest\r");
    chat.wait("the refusal", |screen| screen.contains("there is no command /rest") && screen.contains("/clear"));
    chat.press("/he\t\r");
    let shown = chat.wait("help", |screen| screen.contains("Alt-Enter") && screen.ends_with('>'));
    assert!(shown.contains("> /help"), "{shown}");
    assert!(!shown.contains("tokens/s"), "no model was asked: {shown}");
}

#[test]
fn history_lasts_from_one_conversation_to_the_next() {
    let states = tempfile::tempdir().unwrap();
    let start = |extra: &[&str]| {
        let mut chat = Terminal::start_in(states.path(), &[CHAT, extra].concat(), &[]);
        chat.wait("a prompt", |screen| screen.ends_with('>'));
        chat
    };
    let mut first = start(&[]);
    first.press("remember me\r");
    first.answered(1);
    // Without a farewell.
    drop(first);
    let mut second = start(&[]);
    second.press(UP);
    second.wait("the turn", |screen| screen.ends_with("> remember me"));
    drop(second);
    let mut third = start(&["--no-history"]);
    third.press(UP);
    third.press("!");
    third.wait("nothing old", |screen| screen.ends_with("> !"));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &str| std::fs::metadata(states.path().join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("warpdraft"), mode("warpdraft/history")), (0o700, 0o600), "others may not read it");
    }
}

#[test]
fn a_byte_that_is_no_text_does_not_end_the_conversation() {
    let mut chat = Terminal::chat(&[]);
    chat.press_bytes(b"caf\xe9s");
    chat.wait("the rest", |screen| screen.contains("> caf"));
    chat.press("\r");
    chat.answered(1);
    chat.press("Hello\r");
    chat.answered(2);
}

#[test]
fn a_turn_that_does_not_fit_says_how_to_go_on() {
    let mut chat = Terminal::chat(&["--context", "64"]);
    chat.press(&format!("{}\r", "word ".repeat(100)));
    let shown = chat.wait("a refusal", |screen| screen.contains("the context holds 64") && screen.ends_with('>'));
    assert!(shown.contains("/clear starts over"), "{shown}");
    chat.press("Hello\r");
    chat.answered(1);
}

#[test]
fn the_terminal_is_left_as_it_was_found() {
    let modes = |terminal: &Terminal| {
        let pty = terminal.keys.lock().unwrap();
        format!("{:?}", rustix::termios::tcgetattr(&*pty).unwrap().local_modes)
    };
    for leave in [CTRL_D, "/quit\r", "\x03"] {
        let mut chat = Terminal::chat(&[]);
        let held = modes(&chat);
        assert!(!held.contains("ICANON"), "{held}");
        chat.press(leave);
        if leave == "\x03" {
            chat.wait("advice", |screen| screen.contains("Ctrl-C again leaves") && screen.ends_with('>'));
            chat.press(leave);
        }
        let start = Instant::now();
        while chat.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(20));
        }
        let found = modes(&chat);
        assert!(found.contains("ICANON") && found.contains("ECHO"), "{found} after {leave:?}");
    }
}

/// A model whose template opens a thought, so that whatever it says is one.
fn thinker() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let repository = std::env::var_os("WARPDRAFT_REPOSITORY")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), std::path::PathBuf::from);
    for entry in std::fs::read_dir(repository.join("model/demo")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    // Not as the model learnt it: there it ends its thought at once.
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}\
                    {% if add_generation_prompt %}\n<think>\n{% endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

#[test]
fn thoughts_are_dimmed_at_a_terminal_and_never_with_no_color() {
    let model = thinker();
    let args = ["generate", "--model", model.path().to_str().unwrap(), "--chat", "--temperature", "0"];
    let args = [&args[..], &["--max-tokens", "8", "--ignore-eos", "What is a vector?"]].concat();
    let (status, bytes) = Terminal::start(&args, &[]).end();
    assert!(status.success(), "{bytes}");
    assert!(bytes.contains("\x1b[2m") && bytes.contains("\x1b[0m"), "{bytes:?}");
    assert!(bytes.contains("still the model's thought"), "{bytes:?}");
    for environment in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let (_, bytes) = Terminal::start(&args, &[environment]).end();
        assert!(!bytes.contains("\x1b[2m"), "{environment:?}: {bytes:?}");
    }
    // Nor in a pipe, whatever the terminal: there the text is whole.
    let piped = crate::json_of(crate::warpdraft(&args).arg("--json"));
    let text = crate::stdout_of(&mut crate::warpdraft(&args));
    assert_eq!(text, piped["text"].as_str().unwrap());
    assert_eq!(piped["reasoning_content"], text.trim_start_matches('\n'));
    assert_eq!((&piped["content"], &piped["cut_off"]["by"]), (&"".into(), &"max_tokens".into()));
}

/// A model, with this template, that fails at some tokens.
struct Fragile(Broken);

impl Fragile {
    const WEIGHTS: &str = "model.safetensors";
    /// Bytes of a token's features.
    const ROW: usize = 128 * 2;

    fn new(template: &str) -> Self {
        let model = Broken::copy_of("separate_llama_bf16");
        std::fs::write(model.file("chat_template.jinja"), template).unwrap();
        // No token has feature 0 yet, and the MLP makes it huge.
        model.edit_tensor(Self::WEIGHTS, "model.embed_tokens.weight", |data| {
            data.chunks_exact_mut(Self::ROW).for_each(|features| features[..2].fill(0));
        });
        model.edit_tensor(Self::WEIGHTS, "model.layers.0.self_attn.o_proj.weight", |data| {
            let inputs = data.len() / 128;
            data[..inputs].fill(0);
        });
        model.edit_tensor(Self::WEIGHTS, "model.layers.0.mlp.up_proj.weight", |data| {
            data.chunks_exact_mut(Self::ROW).for_each(|inputs| inputs[..2].copy_from_slice(&0x7f00_u16.to_le_bytes()));
        });
        Self(model)
    }

    /// Whether this token makes infinity of the model's numbers.
    fn fail_at(&self, token: usize, fails: bool) {
        let value = half::bf16::from_f32(if fails { 9.0 } else { 0.0 }).to_le_bytes();
        self.0.edit_tensor(Self::WEIGHTS, "model.embed_tokens.weight", |data| {
            data[token * Self::ROW..][..2].copy_from_slice(&value);
        });
    }
}

/// A token in the middle of a thought makes infinity of the model's numbers.
#[test]
fn an_error_ends_a_thought_and_is_not_dimmed_itself() {
    let model = Fragile::new("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n");
    let args = ["generate", "--model", model.0.path(), "--chat", "--temperature", "2", "--seed", "1", "--ignore-eos"];
    let args = [&args[..], &["--draft", "none", "--max-tokens", "16", "hm"]].concat();
    let said = crate::json_of(crate::warpdraft(&args).arg("--json"));
    let tokens: Vec<usize> =
        said["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as usize).collect();
    let is_new = |at: &usize| !tokens[..*at].contains(&tokens[*at]);
    let shown = (4..tokens.len()).filter(is_new).find_map(|at| {
        model.fail_at(tokens[at], true);
        let (status, bytes) = Terminal::start(&args, &[]).end();
        model.fail_at(tokens[at], false);
        assert_eq!(status.code(), Some(1), "{bytes:?}");
        // Otherwise the token is in the prompt, too.
        bytes.contains("\x1b[2m").then_some(bytes)
    });
    let shown = shown.expect("a token that is not in the prompt");
    let (before, error) = shown.split_once("warpdraft: ").expect("an error");
    assert!(error.contains("NaN or infinity"), "{shown:?}");
    assert!(before.rfind("\x1b[0m") > before.rfind("\x1b[2m"), "{shown:?}");
}

/// The template refuses one turn, and the model's numbers overflow in another.
#[test]
fn a_conversation_goes_on_behind_a_turn_that_failed() {
    let template = "{% if messages[0].content != 'Hello' %}{{ raise_exception('the beginning is lost') }}{% endif %}\
                    {% for m in messages %}{{ m.content }}{% endfor %}\
                    {% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}";
    let model = Fragile::new(template);
    let checkpoint = model::Checkpoint::open(Path::new(model.0.path())).unwrap();
    let &[token] = checkpoint.tokenizer.encode("~").unwrap().as_slice() else { panic!("one token") };
    model.fail_at(token as usize, true);
    let mut chat = Terminal::chat(&["--model", model.0.path()]);
    chat.press("Hello\r");
    chat.answered(1);
    for (turn, said) in [("no", "fails: not that"), ("~", "NaN or infinity")] {
        chat.press(&format!("{turn}\r"));
        chat.wait("the error", |screen| screen.replace('\n', "").contains(said) && screen.ends_with('>'));
    }
    chat.press("Good\r");
    let shown = chat.answered(2);
    assert!(!shown.contains("is lost"), "{shown}");
    chat.press(CTRL_D);
    assert_eq!(chat.end().0.code(), Some(0));

    // A script ends there.
    let args = [CHAT, &["--model", model.0.path(), "--json"]].concat();
    let run = crate::warpdraft(&args).write_stdin("Hello\nno\nGood\n").output().unwrap();
    assert_eq!((run.status.code(), run.stdout.iter().filter(|byte| **byte == b'\n').count()), (Some(1), 1));
}

#[test]
fn a_long_prompt_shows_how_far_it_is_read() {
    // Long enough for a moment on a quick machine.
    let prompt = "let mut value = compute(&input)?; ".repeat(250);
    let args = ["generate", "--max-tokens", "1", "--temperature", "0", &prompt];
    let (status, bytes) = Terminal::start(&args, &[]).end();
    assert!(status.success(), "{bytes}");
    assert!(bytes.contains("reading the prompt") && bytes.contains("tokens, "), "{bytes:?}");
}
