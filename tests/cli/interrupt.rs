//! Ctrl-C and closed pipes.

use std::io::Read;
use std::process::{Child, Command, Output, Stdio};

use crate::binary;

/// An answer that takes a good while, begun: its first bytes have come.
fn begun(extra: &[&str]) -> (Child, Vec<u8>) {
    let long = ["generate", "--device", "cpu", "--temperature", "0", "--ignore-eos", "--max-tokens", "4000"];
    let mut child = Command::new(binary())
        .args(long)
        .args(extra)
        .arg("fn main() {")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut first = vec![0; 8];
    child.stdout.as_mut().unwrap().read_exact(&mut first).expect("text comes");
    (child, first)
}

fn interrupt(child: &Child) {
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(sent.expect("kill runs").success());
}

fn finish(child: Child) -> Output {
    child.wait_with_output().expect("the binary ends")
}

#[test]
fn ctrl_c_ends_the_answer_with_a_summary() {
    let (child, first) = begun(&[]);
    interrupt(&child);
    let output = finish(child);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("mean accepted length"), "no summary in {stderr}");
    assert!(stderr.ends_with("warpdraft: interrupted\n"), "{stderr}");
    assert!(String::from_utf8([first, output.stdout].concat()).is_ok(), "the text is whole characters");
}

/// Interrupted while it reads the grammar, before anything can be profiled.
#[cfg(unix)]
#[test]
fn ctrl_c_leaves_no_file_behind() {
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new("mkfifo").arg(folder.path().join("grammar")).status();
    assert!(made.expect("mkfifo runs").success());
    let child = Command::new(binary())
        .args(["generate", "x", "--device", "cpu", "--profile", "profile.json", "--grammar", "grammar"])
        .current_dir(folder.path())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // Opens once the program reads the pipe, and holds it there.
    let grammar = std::fs::File::options().write(true).open(folder.path().join("grammar")).unwrap();
    interrupt(&child);
    let output = finish(child);
    drop(grammar);
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["grammar"]);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let (mut child, _) = begun(&[]);
    drop(child.stdout.take());
    let output = finish(child);
    assert_eq!(output.status.code(), Some(141));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn a_closed_pipe_ends_other_commands_quietly_too() {
    for args in [["inspect", "--tensors"], ["completions", "bash"]] {
        // Closed before it begins: what it writes would fit into the pipe.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let child = Command::new(binary()).args(args).stdout(writer).stderr(Stdio::piped()).spawn();
        let child = child.expect("the binary starts");
        let output = finish(child);
        assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(141), ""), "{args:?}");
    }
}
