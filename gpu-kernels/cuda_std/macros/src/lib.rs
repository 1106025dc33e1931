//! The attributes `#[kernel]` and `#[device]`, and `#[derive(Layout)]`, of `cuda_std`, which re-exports them.

mod layout;

use proc_macro::TokenStream;
use proc_macro2::Span;
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{DeriveInput, Error, Expr, FnArg, Ident, ItemFn, LitStr, Pat, ReturnType, Safety, Token, Type, Visibility};

/// The module of a kernel that names none.
const MAIN: &str = "main";

/// The arguments of the attribute, as in `#[kernel(threads = 256, min_blocks = 2, cluster = 2, module = "bench")]`.
struct Arguments {
    threads: Expr,
    min_blocks: Option<Expr>,
    cluster: Option<Expr>,
    module: LitStr,
}

impl Parse for Arguments {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let (mut threads, mut min_blocks, mut cluster, mut module) = (None, None, None, None);
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            input.parse::<Token![=]>()?;
            match name.to_string().as_str() {
                "threads" => threads = Some(input.parse()?),
                "min_blocks" => min_blocks = Some(input.parse()?),
                "cluster" => cluster = Some(input.parse()?),
                "module" => module = Some(module_name(input)?),
                _ => return Err(Error::new(name.span(), "expected `threads`, `min_blocks`, `cluster` or `module`")),
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        let threads =
            threads.ok_or_else(|| input.error("a kernel names its block size: `#[kernel(threads = 256)]`"))?;
        let module = module.unwrap_or_else(|| LitStr::new(MAIN, Span::call_site()));
        Ok(Self { threads, min_blocks, cluster, module })
    }
}

/// Parses the name of a module. It becomes part of a file's name, so few characters are allowed.
fn module_name(input: ParseStream) -> syn::Result<LitStr> {
    let name: LitStr = input.parse()?;
    let text = name.value();
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') {
        return Err(Error::new(name.span(), "a module is named with small letters and `_`, such as \"bench\""));
    }
    Ok(name)
}

/// Makes an `unsafe fn` with one parameter block into a kernel.
///
/// - `threads` is the block size.
/// - `min_blocks` (optional) is how many blocks an SM must be able to hold at once.
/// - `cluster` (optional, sm_90 on) is how many blocks make a cluster.
/// - `module` (optional) names the PTX module that the kernel goes to; without it, that is `"main"`.
///
/// `module` is a string, the others are constant expressions.
///
/// The function is `pub` and not generic, takes exactly one parameter by value, and returns nothing. The parameter is a
/// `#[repr(C)]`, `Copy` parameter block that derives `Layout`, aligned to at most 16 bytes. The documentation of that
/// parameter block says what must hold for a launch, so the function needs no `# Safety` section.
///
/// On the device the function becomes an entry point of its own name, if its crate is the one that the build step
/// compiles. A crate that another kernel crate depends on contributes the functions that its kernels are made of, but
/// none of its kernels. What the build step must know is left in the PTX as comments:
/// `//@launch_bounds NAME THREADS MIN_BLOCKS CLUSTER` (0 for what is not asked) becomes `.maxntid`, `.minnctapersm` and
/// `.reqnctapercluster`, `//@module NAME MODULE` says where the kernel goes, and `//@layout NAME DIGEST` gives the
/// digest of its parameter block. On the host the function stays a plain function. On both, a marker type of the same
/// name implements `cuda_std::Kernel`, so a launch names its kernel as a type.
#[proc_macro_attribute]
pub fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let arguments = syn::parse_macro_input!(arguments as Arguments);
    let function = syn::parse_macro_input!(item as ItemFn);
    expand(arguments, function).unwrap_or_else(|error| error.into_compile_error().into())
}

/// Marks a function that kernels call, as `__device__ __forceinline__` does in CUDA C++. On the device it is inlined
/// wherever it is called, since shared registers and known constants matter more than code size there. On the host it
/// is an ordinary function: kernels that share it then share its machine code, so builds for the emulator are much
/// shorter.
#[proc_macro_attribute]
pub fn device(arguments: TokenStream, item: TokenStream) -> TokenStream {
    if !arguments.is_empty() {
        return Error::new(Span::call_site(), "`#[device]` takes no arguments").into_compile_error().into();
    }
    let item = proc_macro2::TokenStream::from(item);
    quote! {
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        #item
    }
    .into()
}

/// Implements `cuda_std::Layout`, which describes a type's layout in memory. It takes a `#[repr(C)]` or
/// `#[repr(transparent)]` struct, or an enum without fields whose `#[repr]` is `u8`, `u16`, `u32` or `u64`.
#[proc_macro_derive(Layout)]
pub fn layout(item: TokenStream) -> TokenStream {
    let item = syn::parse_macro_input!(item as DeriveInput);
    layout::derive(&item).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(arguments: Arguments, function: ItemFn) -> syn::Result<TokenStream> {
    let (parameter, params) = check(&function)?;
    let ItemFn { attrs, vis, sig, block, .. } = &function;
    let name = &sig.ident;
    let text = name.to_string();
    let docs: Vec<_> = attrs.iter().filter(|a| a.path().is_ident("doc")).collect();
    let Arguments { threads, min_blocks, cluster, module } = arguments;
    let or_zero = |value: Option<Expr>| value.map_or_else(|| quote!(0), |value| quote!(#value));
    let blocks = cluster.clone().map_or_else(|| quote!(1), |value| quote!(#value));
    let (min_blocks, cluster) = (or_zero(min_blocks), or_zero(cluster));
    let bounds = format!("//@launch_bounds {text} {{}} {{}} {{}}");
    let home = format!("//@module {text} {}", module.value());
    let digest = format!("//@layout {text} {{}}");
    let too_aligned = format!("the parameter block of `{text}` is aligned to more than 16 bytes");
    let argument = format_ident!("params");
    // Cargo sets this variable for the package that it was asked to build, and not for that package's dependencies.
    let entry = std::env::var_os("CARGO_PRIMARY_PACKAGE").map(|_| {
        // The build step can name the kernels that it wants. On the host nobody asks.
        let wanted = quote!(#[cfg(any(not(cuda_kernels), cuda_kernels = #text))]);
        quote! {
            #(#attrs)*
            #[allow(clippy::missing_safety_doc)]
            #[cfg(target_arch = "nvptx64")]
            #wanted
            #[unsafe(no_mangle)]
            #vis unsafe extern "ptx-kernel" fn #name(#parameter) #block

            #[cfg(target_arch = "nvptx64")]
            #wanted
            ::core::arch::global_asm!(
                #bounds,
                #home,
                #digest,
                const #threads,
                const #min_blocks,
                const #cluster,
                const <#params as ::cuda_std::Layout>::DIGEST,
            );
        }
    });

    Ok(quote! {
        #entry

        #(#attrs)*
        #[allow(clippy::missing_safety_doc)]
        #[cfg(not(target_arch = "nvptx64"))]
        #vis unsafe fn #name(#parameter) #block

        #(#docs)*
        #[allow(non_camel_case_types)]
        #vis struct #name {}

        impl ::cuda_std::Kernel for #name {
            type Params = #params;
            const NAME: &'static str = #text;
            const MODULE: &'static str = #module;
            const THREADS: u32 = #threads;
            const CLUSTER: u32 = #blocks;

            #[cfg(not(target_arch = "nvptx64"))]
            unsafe fn lane(#argument: #params) {
                // SAFETY: the caller keeps the contract of the kernel, which is this function's own.
                unsafe { #name(#argument) }
            }
        }

        const _: () = assert!(::core::mem::align_of::<#params>() <= 16, #too_aligned);
    }
    .into())
}

/// The kernel's one parameter and its type; or an error that says what is wrong with the signature.
fn check(function: &ItemFn) -> syn::Result<(&FnArg, &Type)> {
    let sig = &function.sig;
    let wrong = |span, message: &str| Err(Error::new(span, message));
    if !matches!(sig.safety, Safety::Unsafe(_)) {
        return wrong(sig.ident.span(), "a kernel trusts the addresses it is given: make it `unsafe fn`");
    }
    if !sig.generics.params.is_empty() {
        return wrong(sig.generics.span(), "a kernel is one entry point of the PTX module: it cannot be generic");
    }
    if sig.abi.is_some() || sig.asyncness.is_some() || sig.constness.is_some() {
        return wrong(sig.ident.span(), "a kernel is a plain `unsafe fn`");
    }
    if !matches!(sig.output, ReturnType::Default) {
        return wrong(sig.output.span(), "a kernel returns nothing");
    }
    if matches!(function.vis, Visibility::Inherited) {
        return wrong(sig.ident.span(), "a kernel is launched from elsewhere: make it `pub`");
    }
    match (sig.inputs.first(), sig.inputs.len()) {
        (Some(argument @ FnArg::Typed(typed)), 1) if matches!(*typed.pat, Pat::Ident(_) | Pat::Wild(_)) => {
            Ok((argument, &typed.ty))
        }
        _ => wrong(sig.ident.span(), "a kernel takes exactly one parameter block by value"),
    }
}
