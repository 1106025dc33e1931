//! What the user is told about a defect of the program itself.

use std::any::Any;
use std::panic::PanicHookInfo;

use crate::{output, terminal};

/// From now on a panic is reported in one sentence. With `RUST_BACKTRACE`, the details for a developer are printed too.
pub fn report() {
    let details = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        terminal::restore();
        if wants_details() {
            details(panic);
        }
        output::note(&sentence(panic));
    }));
}

fn wants_details() -> bool {
    std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0")
}

fn sentence(panic: &PanicHookInfo<'_>) -> String {
    let what = message(panic.payload()).lines().next().unwrap_or_default();
    let details = if wants_details() { "the lines above" } else { "what it says when run again with RUST_BACKTRACE=1" };
    format!("warpdraft: this is a defect of the program ({what}); please report it, with the command and {details}")
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no reason given")
}

#[cfg(test)]
mod tests {
    use std::panic::{catch_unwind, set_hook, take_hook};
    use std::sync::Mutex;

    use super::sentence;

    #[test]
    fn a_defect_is_one_sentence_that_asks_for_a_report() {
        static SAID: Mutex<String> = Mutex::new(String::new());
        let before = take_hook();
        set_hook(Box::new(|panic| *SAID.lock().unwrap() = sentence(panic)));
        let caught = catch_unwind(|| panic!("no such {}\nand more", "page"));
        set_hook(before);
        assert!(caught.is_err());
        let said = SAID.lock().unwrap();
        assert!(said.contains("(no such page)") && said.contains("please report it"), "{said}");
        assert!(!said.contains("panicked at") && !said.contains('\n') && !said.contains("and more"), "{said}");
    }
}
