//! Text from outside, in our messages.

/// Most characters of such a text that are shown.
const MOST: usize = 300;

/// `text` on one line, cut if it is long. Control characters are written out: a terminal would obey them.
pub fn shown(text: &str) -> String {
    let is_hidden = |c: char| {
        c.is_control() || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut out = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == MOST {
            out.push('…');
            break;
        }
        if is_hidden(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn what_a_terminal_would_obey_is_written_out() {
        assert_eq!(shown("plain é 日本 🦀 \"'\\"), "plain é 日本 🦀 \"'\\");
        assert_eq!(shown("\u{1b}[31mred\n\0\u{202e}"), "\\u{1b}[31mred\\n\\u{0}\\u{202e}");
        let long = shown(&"é".repeat(1_000_000));
        assert_eq!(long.chars().count(), super::MOST + 1);
        assert!(long.ends_with("é…"));
    }
}
