//! Cuts the PTX of one compilation into modules, and gives each module a table of its kernels' layouts.
//!
//! `#[kernel]` leaves two comments: `//@module NAME MODULE` names the kernel's module, and `//@layout NAME DIGEST`
//! gives a digest of its parameter block. A module holds its kernels and every variable and function that they need.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::Error;

/// The variable that holds a module's layouts: a line for each kernel, its name and its digest in decimal, as text.
pub const LAYOUTS: &str = "kernel_layouts";

/// One module's text.
#[derive(Debug, PartialEq, Eq)]
pub struct Text {
    /// The module's name, from its kernels' attribute.
    pub name: String,
    /// Its PTX.
    pub ptx: String,
    /// Its kernels and the digests of their parameter blocks, sorted by name.
    pub layouts: BTreeMap<String, u64>,
}

/// A kernel, function or variable at the outermost level of a PTX text.
#[derive(Clone, Copy)]
struct Item<'t> {
    name: &'t str,
    is_kernel: bool,
    text: &'t str,
}

/// The parts of a PTX text.
struct Parsed<'t> {
    /// The directives for version, target and address size.
    head: String,
    items: Vec<Item<'t>>,
    /// The `//@` comments, by the kernel that they are about.
    notes: BTreeMap<&'t str, Vec<&'t str>>,
}

/// Cuts `ptx` into modules, sorted by name.
///
/// # Errors
/// [`Error::Note`]: a kernel without a module or without a digest.
pub fn split(ptx: &str) -> Result<Vec<Text>, Error> {
    let parsed = parse(ptx);
    let mut kernels: BTreeMap<&str, Vec<Item<'_>>> = BTreeMap::new();
    for &item in parsed.items.iter().filter(|item| item.is_kernel) {
        kernels.entry(parsed.note(item.name, "module")?).or_default().push(item);
    }
    kernels.into_iter().map(|(name, kernels)| parsed.module(name, &kernels)).collect()
}

impl<'t> Parsed<'t> {
    /// The value of the comment `//@about kernel …`.
    fn note(&self, kernel: &str, about: &str) -> Result<&'t str, Error> {
        let notes = self.notes.get(kernel).into_iter().flatten();
        let mut found = notes.filter_map(|note| note.strip_prefix("//@")?.strip_prefix(about)?.split(' ').nth(2));
        found.next().ok_or_else(|| Error::Note { kernel: kernel.into(), about: about.into() })
    }

    fn module(&self, name: &str, kernels: &[Item<'t>]) -> Result<Text, Error> {
        let rest: BTreeMap<&str, Item<'t>> =
            self.items.iter().filter(|item| !item.is_kernel).map(|item| (item.name, *item)).collect();
        let mut needed = BTreeSet::new();
        let mut unread: Vec<&str> = kernels.iter().map(|kernel| kernel.text).collect();
        while let Some(text) = unread.pop() {
            for word in words(text) {
                if let Some(item) = rest.get(word)
                    && needed.insert(item.name)
                {
                    unread.push(item.text);
                }
            }
        }
        let mut layouts = BTreeMap::new();
        let mut ptx = self.head.clone();
        for kernel in kernels {
            let digest = self.note(kernel.name, "layout")?;
            let missing = |_| Error::Note { kernel: kernel.name.into(), about: "layout".into() };
            layouts.insert(kernel.name.to_owned(), digest.parse().map_err(missing)?);
            for note in &self.notes[kernel.name] {
                let _ = writeln!(ptx, "{note}");
            }
        }
        let is_kept =
            |item: &&Item<'t>| needed.contains(item.name) || (item.is_kernel && layouts.contains_key(item.name));
        self.items.iter().filter(is_kept).for_each(|item| ptx.push_str(item.text));
        ptx.push_str(&table(&layouts));
        Ok(Text { name: name.to_owned(), ptx, layouts })
    }
}

/// The text of a table: what [`LAYOUTS`] holds.
pub fn lines(layouts: &BTreeMap<String, u64>) -> String {
    layouts.iter().map(|(kernel, digest)| format!("{kernel} {digest}\n")).collect()
}

/// The PTX of a variable that contains [`lines`]. It is `.visible`, so the assembler keeps it.
fn table(layouts: &BTreeMap<String, u64>) -> String {
    let lines = lines(layouts);
    let bytes: Vec<String> = lines.bytes().map(|byte| byte.to_string()).collect();
    format!("\n.visible .global .align 16 .b8 {LAYOUTS}[{}] = {{{}}};\n", bytes.len(), bytes.join(", "))
}

fn parse(ptx: &str) -> Parsed<'_> {
    let mut parsed = Parsed { head: String::new(), items: Vec::new(), notes: BTreeMap::new() };
    // `start` is where the next item begins, with the comments before it; `at` is where the next line begins; `first`
    // is the item's first line of code, once it was read.
    let (mut start, mut at, mut depth, mut first) = (0, 0, 0i32, None);
    for line in ptx.split_inclusive('\n') {
        at += line.len();
        let code = line.split("//").next().unwrap_or_default().trim();
        if first.is_none() {
            if let Some(note) = line.trim().strip_prefix("//@") {
                let note = &line.trim()[..note.len() + 3];
                parsed.notes.entry(note.split(' ').nth(1).unwrap_or_default()).or_default().push(note);
                start = at;
                continue;
            }
            if [".version", ".target", ".address_size"].iter().any(|word| code.starts_with(word)) {
                let _ = writeln!(parsed.head, "{code}");
                start = at;
                continue;
            }
            if code.is_empty() {
                continue;
            }
            first = Some(line);
        }
        depth += code.matches('{').count() as i32 - code.matches('}').count() as i32;
        // A function ends with its closing brace, every other item with a semicolon.
        if depth == 0 && (code.ends_with('}') || code.ends_with(';')) {
            let head = first.take().unwrap_or_default();
            parsed.items.push(Item { name: name(head), is_kernel: head.contains(".entry "), text: &ptx[start..at] });
            start = at;
        }
    }
    parsed
}

/// The name that an item's first line declares. It stands before the parameters, the size or the value; in a function,
/// it stands after the return parameter.
fn name(head: &str) -> &str {
    let head = head.split(['=', '[', ';']).next().unwrap_or_default();
    let head = head.split_once(".func").map_or(head, |(_, function)| match function.trim_start().strip_prefix('(') {
        Some(returned) => returned.split_once(')').map_or(returned, |(_, rest)| rest),
        None => function,
    });
    words(head.split('(').next().unwrap_or_default()).last().unwrap_or_default()
}

/// The words of a text that may be names.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%'))).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::{LAYOUTS, split};

    const TEXT: &str = "//\n// Generated by somebody\n//\n\n.version 7.8\n.target sm_80\n.address_size 64\n\n\
        //@launch_bounds add 32 0 0\n//@module add main\n//@layout add 17\n\
        //@module race bench\n//@layout race 18446744073709551615\n\
        .extern .shared .align 1024 .b8 dynamic_shared[];\n\n\
        \t// .globl\tadd\n\
        .global .align 4 .b8 table[4] = {4, 0, 0, 0};\n\
        .global .align 8 .u64 through[1] = {table};\n\
        .global .align 8 .u64 nobody = 3;\n\n\
        .func (.param .b32 result) helper(\n\t.param .b64 p\n)\n{\n\tret;\n}\n\
        .visible .entry add(\n\t.param .u64 p\n)\n.maxntid 32\n{\n\
        \t// begin inline asm\n\t{ mov.b64 %rd1, through; }\n\t// end inline asm }\n\tret;\n\n}\n\
        \t// .globl\trace\n\
        .visible .entry race()\n{\n\tcall (r), helper, (p);\n\tmov.b32 %r1, dynamic_shared;\n\tret;\n}\n";

    #[test]
    fn a_module_has_its_kernels_and_what_they_name() {
        let modules = split(TEXT).unwrap();
        let [bench, main] = &modules[..] else { panic!("{modules:?}") };
        assert_eq!((bench.name.as_str(), main.name.as_str()), ("bench", "main"));
        for (module, has, has_not) in [
            (main, [".entry add(", "\t{ mov.b64", " table[4]", " through[1]"], ["race", "helper", "dynamic_shared"]),
            (bench, [".entry race(", ") helper(", "dynamic_shared[]", ".ret;\n}"], [" add", "table[4]", "through"]),
        ] {
            assert!(module.ptx.starts_with(".version 7.8\n.target sm_80\n.address_size 64\n"), "{}", module.ptx);
            for text in has {
                assert!(module.ptx.contains(text.trim_start_matches('.')), "{text} in {}", module.ptx);
            }
            for text in has_not {
                assert!(!module.ptx.contains(text), "{text} in {}", module.ptx);
            }
            assert!(!module.ptx.contains("nobody"), "{}", module.ptx);
        }
        assert!(main.ptx.contains("//@launch_bounds add 32 0 0\n"), "{}", main.ptx);
    }

    #[test]
    fn a_module_tells_its_kernels_layouts() {
        let modules = split(TEXT).unwrap();
        assert_eq!(modules[0].layouts.iter().collect::<Vec<_>>(), [(&"race".to_owned(), &u64::MAX)]);
        let bytes = b"add 17\n".map(|byte| byte.to_string()).join(", ");
        let table = format!(".visible .global .align 16 .b8 {LAYOUTS}[7] = {{{bytes}}};\n");
        assert!(modules[1].ptx.ends_with(&table), "{}", modules[1].ptx);
    }

    #[test]
    fn a_kernel_without_a_digest_is_refused() {
        let error = split(&TEXT.replace("//@layout race", "//@layout case")).unwrap_err().to_string();
        assert!(error.contains("race"), "{error}");
    }
}
