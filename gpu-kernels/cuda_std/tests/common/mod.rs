//! What the tests of the emulator share.

#![allow(dead_code)]

use cuda_std::Kernel;
use cuda_std::emulator::{Buffer, EmulatorError, Launch, Report, launch};

#[path = "../device/src/kernels.rs"]
pub mod kernels;

pub use kernels::Io;

/// The buffers of a launch, and what came of it.
pub struct Run {
    /// `n` words: 0, 1, 2 and so on.
    pub input: Buffer<u32>,
    /// `n` words, poisoned before the launch.
    pub output: Buffer<u32>,
    /// 64 words, zero before the launch.
    pub zeros: Buffer<u32>,
    /// The launch's result.
    pub result: Result<Report, EmulatorError>,
}

impl Run {
    /// The parameters. Their buffers live as long as `self`.
    pub fn params(&self) -> Io {
        let n = self.input.len() as u32;
        Io { input: self.input.ptr(), output: self.output.ptr_mut(), zeros: self.zeros.ptr_mut(), n }
    }
}

/// Runs a kernel over buffers of `n` words, with 4 KiB of shared memory.
pub fn run<K: Kernel<Params = Io>>(how: Launch, n: usize) -> Run {
    let input = Buffer::from_slice(&(0..n as u32).collect::<Vec<_>>()).named("input");
    let output = Buffer::new_poisoned(n).named("output");
    let zeros = Buffer::from_slice(&[0; 64]).named("zeros");
    let params = Io { input: input.ptr(), output: output.ptr_mut(), zeros: zeros.ptr_mut(), n: n as u32 };
    let how = Launch { shared_bytes: 4096, ..how };
    Run { result: launch::<K>(&how, params), input, output, zeros }
}

/// Runs a kernel that must pass under each of many seeds, and checks its output.
pub fn passes<K: Kernel<Params = Io>>(how: Launch, n: usize, expected: impl Fn(usize) -> u32) {
    for seed in 0..50 {
        let run = run::<K>(Launch { seed, ..how }, n);
        if let Err(error) = run.result {
            panic!("seed {seed}: {error}");
        }
        let expected: Vec<u32> = (0..n).map(&expected).collect();
        assert_eq!(run.output.to_vec(), expected, "seed {seed}");
    }
}

/// Runs a kernel that must fail under most seeds, each time for one of the reasons in `words`; returns an error's text.
pub fn fails<K: Kernel<Params = Io>>(how: Launch, n: usize, words: &[&str]) -> String {
    let mut texts = Vec::new();
    for seed in 0..20 {
        if let Err(error) = run::<K>(Launch { seed, ..how }, n).result {
            let text = error.to_string();
            assert!(text.contains(&format!("kernel `{}`", K::NAME)), "no kernel named: {text}");
            assert!(words.iter().any(|word| text.contains(word)), "not for {words:?}: {text}");
            texts.push(text);
        }
    }
    assert!(texts.len() > 10, "only {} of 20 seeds found it", texts.len());
    texts.swap_remove(0)
}
