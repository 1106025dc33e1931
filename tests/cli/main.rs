//! The warpdraft binary as a user meets it: each test runs it, and looks at what it prints and how it exits.

mod bad_input;
mod batch;
mod batch_again;
mod batch_hostile;
#[cfg(feature = "bench")]
mod bench;
mod broken;
mod chat;
mod completions;
#[path = "../src/eagle.rs"]
#[allow(dead_code)]
mod eagle;
mod form;
mod generate;
#[path = "../../model/tests/hub_server/mod.rs"]
#[allow(dead_code, missing_docs)]
mod hub_server;
mod inspect;
mod interrupt;
#[cfg(unix)]
mod terminal;
mod weights;

use std::path::{Path, PathBuf};

use assert_cmd::Command;

/// The binary. On a machine that did not build it, `WARPDRAFT_BIN` says where it is, and `WARPDRAFT_REPOSITORY` where
/// the golden checkpoints' repository is.
fn binary() -> PathBuf {
    std::env::var_os("WARPDRAFT_BIN").map_or_else(|| env!("CARGO_BIN_EXE_warpdraft").into(), PathBuf::from)
}

/// `warpdraft` and these arguments, on the CPU, with nothing in the environment that would change what it does.
fn warpdraft(args: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.env_remove("WARPDRAFT_MODEL").env("WARPDRAFT_DEVICE", "cpu").env_remove("RUST_LOG");
    // Whatever a test names must be a local thing.
    command.env("HF_HUB_OFFLINE", "1").args(args);
    command
}

/// A small checkpoint among the golden ones: `tied_bf16`, `tied_f32` or `separate_f16_sharded`.
fn golden(name: &str) -> PathBuf {
    golden_dir().join(name)
}

/// Where these are.
fn golden_dir() -> PathBuf {
    let repository = std::env::var_os("WARPDRAFT_REPOSITORY")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), PathBuf::from);
    repository.join("tests/golden")
}

/// What a run printed, which must have succeeded.
fn stdout_of(command: &mut Command) -> String {
    let output = command.output().expect("the binary starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {stderr}", output.status);
    String::from_utf8(output.stdout).expect("standard output is UTF-8")
}

/// The JSON object that a run printed.
fn json_of(command: &mut Command) -> serde_json::Value {
    serde_json::from_str(&stdout_of(command)).expect("standard output is one JSON object")
}
