//! What the examples share: the command line, the shape to measure, and the device.

use std::error::Error;
use std::path::Path;
use std::str::FromStr;

use host::device::{Device, DeviceOptions, KernelFile};
use host::weights::DeviceWeights;
use model::Config;
use model::format::Code;

use crate::cases::decode;

/// What decode steps read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightsArgument {
    /// As in [`DeviceOptions`].
    pub lossless: Option<bool>,
    /// What random weights of layers are rounded to, if they are rounded.
    pub code: Option<Code>,
}

impl WeightsArgument {
    /// All of them: the name, what it means, and the value.
    pub const ALL: [(&str, &str, Self); 5] = [
        ("auto", "As the engine keeps them by default", Self { lossless: None, code: None }),
        ("plain", "As they are", Self { lossless: Some(false), code: None }),
        ("packed", "Packed without loss, in some 11.2 bits", Self { lossless: Some(true), code: None }),
        ("fp8", "Layers in FP8", Self { lossless: None, code: Some(Code::E4m3) }),
        ("int4", "Layers in int4", Self { lossless: None, code: Some(Code::Int4) }),
    ];
}

impl FromStr for WeightsArgument {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|(name, ..)| *name == text);
        named.map(|(.., weights)| weights).ok_or("--weights is auto, plain, packed, fp8 or int4")
    }
}

/// The arguments of a program that measures: flags that choose kernels (`--kernels FILE`, `--level LEVEL`, `--unfused`,
/// `--weights auto`, `plain`, `packed`, `fp8` or `int4`, as in `warpdraft bench`), and words of its own.
#[derive(Debug, PartialEq, Eq)]
pub struct Arguments {
    /// How a device is opened.
    pub options: DeviceOptions,
    /// What random weights of layers are rounded to, if they are rounded.
    pub code: Option<Code>,
    /// All other arguments, in order.
    pub words: Vec<String>,
}

impl Arguments {
    /// Reads the arguments of this program.
    ///
    /// # Errors
    /// If there is no such flag, or its value is missing.
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
                    WeightsArgument { lossless: options.lossless, code } =
                        arguments.next().unwrap_or_default().parse()?;
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

    /// Random weights of this shape, as the arguments ask for them.
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

    /// The [`shape`] of that name, and card 0. For `small`, a small shape and the emulator.
    ///
    /// # Errors
    /// If there is no such shape, or no such card.
    pub fn subject(&self, name: &str) -> Result<(Config, Device), Box<dyn Error>> {
        match name {
            "small" => Ok((decode::DecodeSizes::small().config, self.emulator())),
            name => Ok((shape(name)?.1, self.device()?)),
        }
    }
}

/// The shape of a model, and a label for it. `name` is the size of a published Qwen3, or the path of any model's
/// `config.json` or of the folder with it.
///
/// # Errors
/// If there is neither such a size nor such a file, or the model is not supported.
pub fn shape(name: &str) -> Result<(String, Config), String> {
    let size = Config::PUBLISHED.into_iter().find(|size| size.eq_ignore_ascii_case(name));
    if let Some((size, config)) = size.and_then(|size| Some((size, Config::published(size)?))) {
        return Ok((size.to_owned(), config));
    }
    let given = Path::new(name);
    if !given.exists() {
        let known = Config::PUBLISHED.join(", ");
        return Err(format!("{name} is no size of Qwen3 ({known}), and no config.json or folder with one"));
    }
    let file = if given.is_dir() { given.join("config.json") } else { given.to_owned() };
    let json = std::fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    let config = Config::parse(&json, &file).map_err(|error| error.to_string())?;
    let named = if file.file_stem().is_some_and(|stem| stem == "config") { file.parent() } else { None };
    let label = named.and_then(Path::file_name).or(file.file_stem()).unwrap_or_default();
    Ok((label.to_string_lossy().into_owned(), config))
}

/// A text of `len` tokens of this shape's vocabulary, drawn at random, but the same each time.
pub fn tokens(config: &Config, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| (gpu_kernels::sample::random(7, i) % config.vocab_size as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use host::device::Level;

    use super::{Arguments, KernelFile, shape};

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
    fn a_shape_is_a_size_or_a_file() {
        assert_eq!(shape("0.6b").unwrap().0, "0.6B");
        let folder = crate::repository().join("tests/golden/separate_llama_bf16");
        let (name, config) = shape(&folder.display().to_string()).unwrap();
        assert_eq!((name.as_str(), config.family.model_type), ("separate_llama_bf16", "llama"));
        assert_eq!(shape(&folder.join("config.json").display().to_string()), Ok((name, config)));
        assert!(shape("7B").unwrap_err().contains("0.6B, 1.7B"));
        assert!(shape(&folder.join("golden.json").display().to_string()).is_err());
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
