//! The built-in kernels, and the checks of a file of kernels that replaces some of them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;

use flate2::read::GzDecoder;

use super::Level;
use crate::Error;

/// A built module of kernels: its PTX, which every driver can compile, and its machine code, if some was made.
#[derive(Debug)]
pub struct Image {
    /// The name of the [`Level`] that it was built for.
    pub arch: &'static str,
    /// The module's name, as in [`cuda_std::Kernel::MODULE`]: [`MAIN`], or that of another module.
    pub module: &'static str,
    /// The module's PTX, packed by gzip.
    pub ptx_gz: &'static [u8],
    /// The machine code that `ptxas` made from it, if any.
    pub machine_code: Option<&'static [u8]>,
    /// What `ptxas` reported of each kernel: registers, stack, spills.
    pub report: Option<&'static str>,
    /// The kernels and the digests of their parameter blocks, sorted by name.
    pub layouts: &'static [(&'static str, u64)],
}

/// The module that is loaded when a device is opened. Any other is loaded when one of its kernels is first launched.
pub const MAIN: &str = "main";

/// Every module of this crate, once for each level.
pub static IMAGES: &[Image] = &include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The format in which the driver gets a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModuleFormat {
    MachineCode,
    Ptx,
}

impl fmt::Display for ModuleFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MachineCode => "the machine code",
            Self::Ptx => "the PTX",
        })
    }
}

/// Where a module's kernels come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    BuiltIn(ModuleFormat),
    File(String),
}

/// The digests of a module's kernels by name, as read from the module itself.
pub(super) type Layouts = BTreeMap<String, u64>;

impl Image {
    /// The module's PTX.
    ///
    /// # Panics
    /// If [`ptx_gz`](Self::ptx_gz) is not what the build wrote.
    pub fn ptx(&self) -> String {
        let mut ptx = String::new();
        GzDecoder::new(self.ptx_gz).read_to_string(&mut ptx).expect("the build packed a text");
        ptx
    }

    /// Loads the first format that the driver takes. Machine code comes first, because it needs no compilation. If an
    /// older driver refuses it, the PTX is loaded.
    pub(super) fn load<M>(
        &self,
        mut load: impl FnMut(Cow<'static, [u8]>, ModuleFormat) -> Result<M, Error>,
    ) -> Result<M, Error> {
        if let Some(code) = self.machine_code {
            match load(code.into(), ModuleFormat::MachineCode) {
                Ok(module) => return Ok(module),
                Err(error) => tracing::debug!(
                    "the driver does not take the machine code of module {} ({error}), and compiles the PTX",
                    self.module
                ),
            }
        }
        load(self.ptx().into_bytes().into(), ModuleFormat::Ptx)
    }

    /// Checks that a loaded module has the kernels of this image, with the same parameter blocks.
    pub(super) fn check(&self, layouts: &Layouts, origin: &Origin) -> Result<(), Error> {
        self.layouts.iter().try_for_each(|&(kernel, digest)| check_kernel(kernel, digest, layouts, origin))
    }
}

/// Checks that a module has a kernel whose parameter block has this digest.
pub(super) fn check_kernel(kernel: &str, digest: u64, layouts: &Layouts, origin: &Origin) -> Result<(), Error> {
    if layouts.get(kernel) == Some(&digest) {
        return Ok(());
    }
    let kernel = kernel.to_owned();
    Err(match origin {
        Origin::BuiltIn(_) => Error::KernelsBuiltWrongly { kernel },
        Origin::File(path) => Error::KernelLayout { kernel, path: path.clone() },
    })
}

/// The modules for a level: those of this crate, and those that a device is opened with.
pub(super) struct Images(Vec<&'static Image>);

impl Images {
    /// The image of each module for `level`. If a module has none, its image for the last level before.
    pub(super) fn new(level: Level, others: &'static [Image]) -> Self {
        let mut found: Vec<&'static Image> = Vec::new();
        for level in Level::ALL.into_iter().rev().filter(|other| *other <= level) {
            for image in IMAGES.iter().chain(others).filter(|image| image.arch == level.name()) {
                if found.iter().all(|other| other.module != image.module) {
                    found.push(image);
                }
            }
        }
        Self(found)
    }

    /// The image of the module of that name.
    pub(super) fn find(&self, module: &str) -> Option<&'static Image> {
        self.0.iter().copied().find(|image| image.module == module)
    }

    /// Whether a file has every kernel of a module.
    pub(super) fn is_whole(&self, module: &str, layouts: &Layouts) -> bool {
        self.find(module).is_some_and(|image| image.layouts.iter().all(|(kernel, _)| layouts.contains_key(*kernel)))
    }

    /// Checks that a file has at least one kernel of these modules, and that the parameter blocks of all such kernels
    /// agree.
    pub(super) fn check_file(&self, layouts: &Layouts, path: &str) -> Result<(), Error> {
        let origin = Origin::File(path.to_owned());
        let all = self.0.iter().flat_map(|image| image.layouts);
        let shared: Vec<_> = all.filter(|(kernel, _)| layouts.contains_key(*kernel)).collect();
        if shared.is_empty() {
            return Err(Error::KernelsMissing { path: path.to_owned() });
        }
        shared.into_iter().try_for_each(|&(kernel, digest)| check_kernel(kernel, digest, layouts, &origin))
    }
}

/// Reads the table that the build puts into every module: a line for each kernel, with its name and its digest.
pub(super) fn parse_layouts(table: &[u8]) -> Layouts {
    let text = String::from_utf8_lossy(table);
    let line = |line: &str| {
        let (kernel, digest) = line.split_once(' ')?;
        Some((kernel.to_owned(), digest.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use cuda_std::Kernel;

    use super::*;

    fn main() -> &'static Image {
        Images::new(Level::Sm90a, &[]).find(MAIN).expect("there is one")
    }

    fn layouts(image: &Image) -> Layouts {
        image.layouts.iter().map(|&(kernel, digest)| (kernel.to_owned(), digest)).collect()
    }

    /// The table as text, in the form that the build writes.
    fn table(layouts: &Layouts) -> String {
        layouts.iter().map(|(kernel, digest)| format!("{kernel} {digest}\n")).collect()
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        assert_eq!(parse_layouts(table(&layouts(main())).as_bytes()), layouts(main()));
        assert_eq!(parse_layouts(b"\xff\xfe no\nnumber x\n"), Layouts::new());
    }

    #[test]
    fn every_text_and_every_machine_code_holds_its_table() {
        for image in IMAGES {
            let table = table(&layouts(image));
            let bytes: Vec<String> = table.bytes().map(|byte| byte.to_string()).collect();
            // The variable has the name by which the driver is asked for it.
            let variable = format!(".b8 kernel_layouts[{}] = {{{}}};", bytes.len(), bytes.join(", "));
            assert!(image.ptx().contains(&variable), "{} {}", image.arch, image.module);
            if let Some(code) = image.machine_code {
                let found = code.windows(table.len()).any(|window| window == table.as_bytes());
                assert!(found, "machine code of {} {}", image.arch, image.module);
            }
        }
    }

    #[test]
    fn digests_are_those_of_the_host() {
        fn has<K: Kernel>() {
            for image in IMAGES.iter().filter(|image| image.module == K::MODULE) {
                let found = image.layouts.iter().find(|(kernel, _)| *kernel == K::NAME);
                let hopper = image.arch == "sm_90a";
                match found {
                    Some((_, digest)) => assert_eq!(*digest, K::LAYOUT, "{} {}", image.arch, K::NAME),
                    None => assert!(!hopper, "{} is not in {}", K::NAME, image.module),
                }
            }
        }
        has::<gpu_kernels::step::accept_and_draft>();
        has::<gpu_kernels::sample::sample_each>();
        has::<gpu_kernels::batched::batched_96>();
        has::<gpu_kernels::decode::decode_8>();
        has::<gpu_kernels::prefill_attention::prefill_attention>();
        has::<gpu_kernels::ngram::ngram_match_mixed_i32>();
    }

    #[test]
    fn machine_code_that_the_driver_refuses_gives_way_to_ptx() {
        let image = Image { machine_code: Some(b"\x7fELF"), ..*main() };
        let refused = |doing: &str| Error::Driver { doing: doing.into(), reason: "no kernel image".into() };
        let mut tried = Vec::new();
        let loaded = image.load(|bytes, format| {
            tried.push(format);
            if bytes.starts_with(b"\x7fELF") { Err(refused("machine code")) } else { Ok(bytes.len()) }
        });
        assert_eq!(loaded.unwrap(), image.ptx().len());
        assert_eq!(tried, [ModuleFormat::MachineCode, ModuleFormat::Ptx]);
        // If the driver takes the machine code, nothing else is loaded. If it refuses both, the error is the one for
        // the PTX.
        assert_eq!(image.load(|bytes, _| Ok(bytes.len())).unwrap(), 4);
        let both = image.load::<()>(|_, format| Err(refused(&format.to_string())));
        assert!(both.unwrap_err().to_string().contains("the PTX"));
        // Without machine code there is nothing else to try.
        let plain = Image { machine_code: None, ..*main() };
        assert_eq!(plain.load(|bytes, _| Ok(bytes.len())).unwrap(), plain.ptx().len());
    }

    #[test]
    fn a_file_with_another_parameter_block_is_refused_by_name() {
        let (images, mut others) = (Images::new(Level::Sm90a, &[]), layouts(main()));
        images.check_file(&others, "a.cubin").unwrap();
        *others.get_mut("sample").unwrap() += 1;
        let error = images.check_file(&others, "a.cubin").unwrap_err().to_string();
        assert!(error.contains("kernel sample of a.cubin") && error.contains("--kernels"), "{error}");
        let error = images.check_file(&Layouts::new(), "a.cubin").unwrap_err().to_string();
        assert!(error.contains("a.cubin") && error.contains("no kernel of this program"), "{error}");
    }

    #[test]
    fn a_file_has_all_kernels_or_some() {
        static OTHERS: [Image; 1] = [Image {
            arch: "sm_80",
            module: "other",
            ptx_gz: b"",
            machine_code: None,
            report: None,
            layouts: &[("measure", 5)],
        }];
        let images = Images::new(Level::Sm80, &OTHERS);
        assert_eq!(images.find("other").map(|image| image.layouts), Some(OTHERS[0].layouts));
        let mut all: Layouts = images.0.iter().copied().flat_map(layouts).collect();
        images.check_file(&all, "all.ptx").unwrap();
        assert!([MAIN, "other"].iter().all(|module| images.is_whole(module, &all)));
        all.remove("sample");
        images.check_file(&all, "most.ptx").unwrap();
        assert!(!images.is_whole(MAIN, &all) && images.is_whole("other", &all));
        images.check_file(&Layouts::from([("measure".into(), 5)]), "one.ptx").unwrap();
        assert!(images.check_file(&Layouts::from([("measure".into(), 6)]), "one.ptx").is_err());
        // A level also has modules that were built only for an earlier one.
        assert!(Images::new(Level::Sm90, &OTHERS).find("other").is_some());
        assert_eq!(Images::new(Level::Sm90, &[]).find(MAIN).map(|image| image.arch), Some("sm_90"));
    }

    #[test]
    fn a_kernel_that_was_built_with_another_block_is_never_launched() {
        let layouts = Layouts::from([("accept".into(), 7)]);
        assert!(check_kernel("accept", 7, &layouts, &Origin::BuiltIn(ModuleFormat::Ptx)).is_ok());
        let error = check_kernel("accept", 8, &layouts, &Origin::BuiltIn(ModuleFormat::Ptx)).unwrap_err().to_string();
        assert!(error.contains("accept") && error.contains("cargo clean"), "{error}");
    }
}
