//! The kernels in a card's context: loaded modules and their functions.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::path::Path;
use std::sync::Arc;

use cust::sys;

use super::cuda::check;
use super::images::{self, Images, Layouts, MAIN, ModuleFormat, Origin};
use super::{DeviceOptions, Entry, Level};
use crate::Error;
use crate::timed::timed;

/// The name of the variable with the table of layouts in every module (`cuda_builder::LAYOUTS`).
const LAYOUTS: &CStr = c"kernel_layouts";
/// How machine code begins.
const ELF: &[u8] = b"\x7fELF";
/// Dynamic shared memory that a kernel may have without an attribute, in bytes.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// The kernels for a card's level, as far as they are loaded. The card's context must be current for every method, and
/// when this is dropped.
pub(super) struct Kernels {
    images: Images,
    functions: HashMap<&'static str, Function>,
    modules: HashMap<&'static str, Arc<Loaded>>,
    /// A file whose kernels replace the built-in ones of the same name.
    file: Option<Arc<Loaded>>,
}

#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

// SAFETY: this is a handle that any thread may pass to the driver.
unsafe impl Send for Function {}

impl Kernels {
    /// Loads the main module for a level, and the file of kernels if the options name one. If the file has all kernels
    /// of the main module, that is not loaded.
    pub(super) fn load(level: Level, options: &DeviceOptions) -> Result<Self, Error> {
        let images = Images::new(level, options.modules);
        let file = options.kernels.as_ref().map(|file| Loaded::file(&images, file.path())).transpose()?.map(Arc::new);
        let mut modules = HashMap::new();
        if !file.as_ref().is_some_and(|file| images.is_whole(MAIN, &file.layouts)) {
            modules.insert(MAIN, Arc::new(Loaded::built_in(&images, MAIN)?));
        }
        Ok(Self { images, functions: HashMap::new(), modules, file })
    }

    /// Whether the main module is built-in machine code, and no file replaces any kernel.
    pub(super) fn has_machine_code(&self) -> bool {
        let main = self.modules.get(MAIN).filter(|_| self.file.is_none());
        main.is_some_and(|main| main.origin == Origin::BuiltIn(ModuleFormat::MachineCode))
    }

    /// The function of a kernel, which may then use `shared_bytes` of dynamic shared memory. If this is above the
    /// default, it must be the same at every launch. At the kernel's first launch its module is loaded, if necessary,
    /// and its layout is compared with the host's.
    pub(super) fn function(&mut self, kernel: Entry, shared_bytes: u32) -> Result<sys::CUfunction, Error> {
        let Entry { name, module, layout, .. } = kernel;
        if let Some(function) = self.functions.get(name) {
            return Ok(function.0);
        }
        let loaded = match self.file.as_ref().filter(|file| file.layouts.contains_key(name)) {
            Some(file) => file.clone(),
            None => self.module(module)?,
        };
        images::check_kernel(name, layout, &loaded.layouts, &loaded.origin)?;
        let function = loaded.module.function(name)?;
        if shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is the module's.
            check(name, unsafe { sys::cuFuncSetAttribute(function, attribute, shared_bytes as i32) })?;
        }
        self.functions.insert(name, Function(function));
        Ok(function)
    }

    /// A built-in module, which is loaded now if it was not before.
    fn module(&mut self, module: &'static str) -> Result<Arc<Loaded>, Error> {
        if let Some(loaded) = self.modules.get(module) {
            return Ok(loaded.clone());
        }
        let loaded = Arc::new(Loaded::built_in(&self.images, module)?);
        self.modules.insert(module, loaded.clone());
        Ok(loaded)
    }
}

/// A loaded module, with the layouts that it states for its kernels.
struct Loaded {
    module: Module,
    layouts: Layouts,
    origin: Origin,
}

impl Loaded {
    /// Loads a module and every kernel in it. The driver would otherwise load a kernel only when it is first asked for,
    /// and the memory might be taken by then.
    fn new(bytes: Cow<'_, [u8]>, origin: Origin) -> Result<Self, Error> {
        let module = Module::load(bytes)?;
        let layouts = module.layouts()?;
        layouts.keys().try_for_each(|kernel| module.function(kernel).map(drop))?;
        Ok(Self { module, layouts, origin })
    }

    /// Loads a file of kernels.
    fn file(images: &Images, path: &Path) -> Result<Self, Error> {
        let name = path.display().to_string();
        let bytes =
            std::fs::read(path).map_err(|error| Error::Kernels { path: name.clone(), reason: error.to_string() })?;
        let loaded = Self::new(bytes.into(), Origin::File(name.clone()))?;
        images.check_file(&loaded.layouts, &name)?;
        tracing::debug!("{} kernels come from {name}", loaded.layouts.len());
        Ok(loaded)
    }

    /// Loads a built-in module.
    fn built_in(images: &Images, module: &str) -> Result<Self, Error> {
        let unknown = || Error::NoModule { module: module.to_owned() };
        let image = images.find(module).ok_or_else(unknown)?;
        let what = |format: ModuleFormat| format!("loading {format} of module {module} for {}", image.arch);
        let loaded = image.load(|bytes, format| timed(&what(format), || Self::new(bytes, Origin::BuiltIn(format))))?;
        image.check(&loaded.layouts, &loaded.origin)?;
        Ok(loaded)
    }
}

/// A module of the driver. (The module type of `cust` does not tell the size of a variable.)
struct Module(sys::CUmodule);

// SAFETY: this is a handle that any thread may pass to the driver.
unsafe impl Send for Module {}
// SAFETY: the same, and the driver does its own locking.
unsafe impl Sync for Module {}

impl Module {
    /// Loads machine code or PTX. The driver recognises which of the two it is.
    fn load(mut image: Cow<'_, [u8]>) -> Result<Self, Error> {
        // PTX must end with a zero byte.
        if !image.starts_with(ELF) {
            image.to_mut().push(0);
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is valid for a write, and the image complete: as long as its own headers say, or a text with
        // an end.
        check("loading the kernels", unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) })?;
        Ok(Self(module))
    }

    fn function(&self, name: &str) -> Result<sys::CUfunction, Error> {
        let text = CString::new(name).unwrap_or_default();
        let mut function = std::ptr::null_mut();
        // SAFETY: `function` is valid for a write, and the module is loaded.
        check(name, unsafe { sys::cuModuleGetFunction(&mut function, self.0, text.as_ptr()) })?;
        Ok(function)
    }

    /// The layouts that the module states for its kernels. Empty if it has no table.
    fn layouts(&self) -> Result<Layouts, Error> {
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: both are valid for writes, and the module is loaded.
        let code = unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, self.0, LAYOUTS.as_ptr()) };
        if code == sys::cudaError_enum::CUDA_ERROR_NOT_FOUND {
            return Ok(Layouts::new());
        }
        check("reading what kernels take", code)?;
        let mut table = vec![0u8; bytes];
        // SAFETY: both the variable and `table` have `bytes` bytes.
        let code = unsafe { sys::cuMemcpyDtoH_v2(table.as_mut_ptr().cast(), address, bytes) };
        check("reading what kernels take", code)?;
        Ok(images::parse_layouts(&table))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once; nothing can be done about a failure here.
        unsafe { sys::cuModuleUnload(self.0) };
    }
}
