//! What a turn means: something to say, or a command.

/// The commands and what each does, as `/help` lists them.
pub const COMMANDS: [(&str, &str); 5] = [
    ("/help", "lists the commands and keys"),
    ("/clear", "forgets the conversation (also /reset)"),
    ("/think", "has the model think before it answers"),
    ("/no-think", "has it answer without thinking first"),
    ("/quit", "leaves (also /exit, and Ctrl-D)"),
];

/// Other names of commands.
const OTHER_NAMES: [&str; 2] = ["/reset", "/exit"];

/// Qwen3's own switches, which its users may write anywhere in a turn.
const SWITCHES: [&str; 2] = ["/think", "/no_think"];

/// What the user wants.
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// To say this to the model, as it was typed.
    Say(&'a str),
    /// To forget the conversation.
    Clear,
    /// To have thoughts before answers, or none.
    Think(bool),
    /// To see the commands.
    Help,
    /// To leave.
    Quit,
    /// A command that does not exist.
    Unknown(&'a str),
    /// Nothing: only white space.
    Nothing,
}

impl<'a> Line<'a> {
    /// Reads `text`, a turn without its end of line.
    pub fn parse(text: &'a str) -> Self {
        if text.trim().is_empty() {
            return Line::Nothing;
        }
        let whole = text.trim_end();
        match whole {
            "/help" => Line::Help,
            "/clear" | "/reset" => Line::Clear,
            "/think" => Line::Think(true),
            "/no-think" | "/no_think" => Line::Think(false),
            "/quit" | "/exit" => Line::Quit,
            _ => {
                let word = whole.split_whitespace().next().unwrap_or_default();
                let switch = SWITCHES.contains(&word);
                if is_name(word) && !whole.contains('\n') && text.starts_with('/') && !switch {
                    Line::Unknown(word)
                } else {
                    Line::Say(text)
                }
            }
        }
    }
}

/// Whether `word` can only be meant as a command, not as a path, a comment or a fraction.
fn is_name(word: &str) -> bool {
    let letters = word.strip_prefix('/').unwrap_or_default();
    letters.starts_with(|c: char| c.is_ascii_alphabetic())
        && letters.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

/// The commands that begin with `text`.
pub fn completions(text: &str) -> Vec<String> {
    let names = COMMANDS.iter().map(|(name, _)| *name).chain(OTHER_NAMES);
    names.filter(|name| text.starts_with('/') && name.starts_with(text)).map(str::to_owned).collect()
}

/// The message that refuses `word`.
pub fn refusal(word: &str) -> String {
    let names: Vec<&str> = COMMANDS.iter().map(|(name, _)| *name).collect();
    format!(
        "there is no command {word}; there are {} (a line with a blank before the slash goes to the model)",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_whole_lines() {
        assert_eq!(Line::parse("/reset"), Line::Clear);
        assert_eq!(Line::parse("/clear "), Line::Clear);
        assert_eq!(Line::parse("/quit"), Line::Quit);
        assert_eq!(Line::parse("/no-think"), Line::Think(false));
        assert_eq!(Line::parse("what does /quit do?"), Line::Say("what does /quit do?"));
        assert_eq!(Line::parse(" \t"), Line::Nothing);
    }

    #[test]
    fn what_looks_like_a_command_and_is_none_is_refused() {
        assert_eq!(Line::parse("/rest"), Line::Unknown("/rest"));
        assert_eq!(Line::parse("/quit now"), Line::Unknown("/quit"));
        assert!(COMMANDS.iter().all(|(name, _)| refusal("/rest").contains(name)));
    }

    #[test]
    fn other_slashes_are_text() {
        for text in [
            "/usr/bin is what?",
            "/* a comment */",
            "// another",
            "/",
            "/2 of it",
            "/no_think Hello",
            "/lines\nof text",
        ] {
            assert_eq!(Line::parse(text), Line::Say(text));
        }
    }

    #[test]
    fn blanks_are_the_users_own() {
        for text in [" /quit", "    indented", "at the end  ", "\ta\n\n  b\n"] {
            assert_eq!(Line::parse(text), Line::Say(text));
        }
    }

    #[test]
    fn commands_complete() {
        assert_eq!(completions("/cl"), ["/clear"]);
        assert_eq!(completions("/"), ["/help", "/clear", "/think", "/no-think", "/quit", "/reset", "/exit"]);
        assert!(completions("").is_empty() && completions("/x").is_empty());
    }
}
