//! `#[derive(Layout)]`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Attribute, Data, DeriveInput, Error, Field, Ident, Index, Member, parse_quote};

/// The implementation of `cuda_std::Layout` for `item`.
pub fn derive(item: &DeriveInput) -> syn::Result<TokenStream> {
    let digest = match &item.data {
        Data::Struct(data) => {
            if !is_repr(&item.attrs, &["C", "transparent"]) {
                return Err(Error::new(item.ident.span(), "both sides lay out only a `#[repr(C)]` struct alike"));
            }
            of_fields(data.fields.iter())
        }
        Data::Enum(data) => {
            if !is_repr(&item.attrs, &["u8", "u16", "u32", "u64"]) {
                return Err(Error::new(item.ident.span(), "both sides lay out only a `#[repr(u32)]` enum alike"));
            }
            if let Some(variant) = data.variants.iter().find(|v| !v.fields.is_empty()) {
                return Err(Error::new(variant.ident.span(), "an enum that the device reads has no fields"));
            }
            of_variants(data.variants.iter().map(|v| &v.ident))
        }
        Data::Union(_) => return Err(Error::new(item.ident.span(), "a union has no layout of its own")),
    };
    let name = &item.ident;
    let mut generics = item.generics.clone();
    for parameter in generics.type_params_mut() {
        parameter.bounds.push(parse_quote!(::cuda_std::Layout));
    }
    let (implemented, arguments, conditions) = generics.split_for_impl();
    Ok(quote! {
        impl #implemented ::cuda_std::Layout for #name #arguments #conditions {
            const DIGEST: u64 = #digest;
        }
    })
}

/// The digest of a struct: its size and alignment, and each field's name, offset and layout.
fn of_fields<'f>(fields: impl Iterator<Item = &'f Field>) -> TokenStream {
    let fields = fields.enumerate().map(|(i, field)| {
        let member = field.ident.clone().map_or_else(|| Member::Unnamed(Index::from(i)), Member::Named);
        let name = field.ident.as_ref().map_or_else(|| i.to_string(), Ident::to_string);
        let kind = &field.ty;
        quote!(.field(#name, ::core::mem::offset_of!(Self, #member), <#kind as ::cuda_std::Layout>::DIGEST))
    });
    quote!(::cuda_std::layout::Digest::of::<Self>() #(#fields)* .finish())
}

/// The digest of an enum: its size and alignment, and each variant's name and number.
fn of_variants<'v>(variants: impl Iterator<Item = &'v Ident>) -> TokenStream {
    let variants = variants.map(|variant| {
        let name = variant.to_string();
        quote!(.field(#name, Self::#variant as usize, 0))
    });
    quote!(::cuda_std::layout::Digest::of::<Self>() #(#variants)* .finish())
}

/// Whether the attributes hold a `#[repr(…)]` with one of these words.
fn is_repr(attributes: &[Attribute], wanted: &[&str]) -> bool {
    let mut found = false;
    for attribute in attributes.iter().filter(|a| a.path().is_ident("repr")) {
        // The compiler itself refuses attributes that cannot be parsed.
        let _ = attribute.parse_nested_meta(|meta| {
            found |= wanted.iter().any(|word| meta.path.is_ident(word));
            // Skips the parentheses of `align(16)`.
            if meta.input.peek(syn::token::Paren) {
                let inside;
                syn::parenthesized!(inside in meta.input);
                inside.parse::<TokenStream>()?;
            }
            Ok(())
        });
    }
    found
}
