//! What the examples share: their command line, the shape that is measured, and the device.

use std::error::Error;
use std::str::FromStr;

use host::device::{Device, DeviceOptions, KernelFile};
use host::weights::DeviceWeights;
use model::Config;
use model::format::Code;

use crate::cases::decode;

/// What decode steps read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// As of [`DeviceOptions`].
    pub lossless: Option<bool>,
    /// What random weights of layers are rounded to, if they are.
    pub code: Option<Code>,
}

impl Weights {
    /// By their names, with what these mean.
    pub const ALL: [(&str, &str, Self); 4] = [
        ("plain", "As they are", Self { lossless: Some(false), code: None }),
        ("packed", "Packed without loss, in some 11.2 bits", Self { lossless: Some(true), code: None }),
        ("fp8", "Layers in FP8", Self { lossless: None, code: Some(Code::E4m3) }),
        ("int4", "Layers in int4", Self { lossless: None, code: Some(Code::Int4) }),
    ];
}

impl FromStr for Weights {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|(name, ..)| *name == text);
        named.map(|(.., weights)| weights).ok_or("--weights is plain, packed, fp8 or int4")
    }
}

/// What a program that measures was told: flags that choose kernels (`--kernels FILE`, `--level LEVEL`, `--unfused`,
/// `--weights plain`, `packed`, `fp8` or `int4`, as of `warpdraft bench`), and words of its own.
#[derive(Debug, PartialEq, Eq)]
pub struct Arguments {
    /// How a device is opened.
    pub options: DeviceOptions,
    /// What random weights of layers are rounded to, if they are.
    pub code: Option<Code>,
    /// What is no such flag, in order.
    pub words: Vec<String>,
}

impl Arguments {
    /// Those of this program.
    ///
    /// # Errors
    /// A flag that there is not, or without its file.
    pub fn read() -> Result<Self, String> {
        Self::of(std::env::args().skip(1))
    }

    fn of(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let (mut options, mut code, mut words) = (crate::options(), None, Vec::new());
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--kernels" => {
                    let path = arguments.next().ok_or("--kernels needs a file")?;
                    // SAFETY: whoever names a build of the kernels answers for it (docs/guide/profile.md).
                    options.kernels = Some(unsafe { KernelFile::trusted(path) });
                }
                "--level" => options.level = Some(arguments.next().unwrap_or_default().parse()?),
                "--unfused" => options.unfused = true,
                "--weights" => {
                    Weights { lossless: options.lossless, code } = arguments.next().unwrap_or_default().parse()?;
                }
                other if other.starts_with("--") => return Err(format!("there is no flag {other}")),
                _ => words.push(argument),
            }
        }
        Ok(Self { options, code, words })
    }

    /// Word number `i`, if there is one.
    pub fn word(&self, i: usize) -> Option<&str> {
        self.words.get(i).map(String::as_str)
    }

    /// Random weights of this shape, as they were asked for.
    ///
    /// # Errors
    /// As [`DeviceWeights::random`].
    pub fn weights(&self, config: &Config, device: &Device) -> Result<DeviceWeights, host::Error> {
        DeviceWeights::random_as(config, device, self.code)
    }

    /// Card 0.
    ///
    /// # Errors
    /// As [`Device::cuda_with`].
    pub fn device(&self) -> Result<Device, host::Error> {
        Device::cuda_with(0, &self.options)
    }

    /// The emulator.
    pub fn emulator(&self) -> Device {
        Device::emulator_with(1, &self.options)
    }

    /// The published shape of that name, and card 0; of `small`, a small shape and the emulator.
    ///
    /// # Errors
    /// No such shape, or no such card.
    pub fn subject(&self, name: &str) -> Result<(Config, Device), Box<dyn Error>> {
        match name {
            "small" => Ok((decode::DecodeSizes::small().config, self.emulator())),
            name => Ok((Config::published(name).ok_or_else(|| format!("no size is called {name}"))?, self.device()?)),
        }
    }
}

/// A text of `len` tokens of this shape's vocabulary, drawn at random: the same each time.
pub fn tokens(config: &Config, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| (gpu_kernels::sample::random(7, i) % config.vocab_size as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use host::device::Level;

    use super::{Arguments, KernelFile};

    fn of(line: &str) -> Result<Arguments, String> {
        Arguments::of(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn flags_may_stand_anywhere_among_the_words() {
        let found = of("8B --kernels a.ptx 64 --unfused --level sm_90").unwrap();
        assert_eq!(found.words, ["8B", "64"]);
        assert_eq!(found.options.kernels.as_ref().map(KernelFile::path), Some("a.ptx".as_ref()));
        assert!(found.options.unfused && found.options.level == Some(Level::Sm90));
        assert_eq!(found.options.modules.len(), crate::MODULES.len());
    }

    #[test]
    fn other_flags_and_other_sizes_are_named() {
        assert_eq!(of("8B --weights int4").unwrap().code, Some(super::Code::Int4));
        assert!(of("--fast").unwrap_err().contains("--fast"));
        assert!(of("8B --kernels").unwrap_err().contains("file"));
        assert!(of("8B --level").unwrap_err().contains("sm_90a"));
        assert!(of("8B --weights small").unwrap_err().contains("packed, fp8 or int4"));
        let error = of("").unwrap().subject("9B").err().unwrap().to_string();
        assert!(error.contains("9B"), "{error}");
        assert!(of("small").unwrap().subject("small").unwrap().1.is_emulator());
    }
}
