//! Expansion of `#[kernel]`, and the checks of what a kernel may be given.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Error, FnArg, Ident, ItemFn, LitInt, Result, ReturnType, Token, Type};

/// Arguments of the attribute, as the builder knows them.
const BOUNDS: [&str; 4] = ["threads", "registers", "blocks_per_sm", "cluster"];

pub fn expand(arguments: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let bounds = bounds(arguments)?;
    let function: ItemFn = syn::parse2(item)?;
    check_signature(&function)?;
    let types: Vec<&Type> = function.sig.inputs.iter().map(argument_type).collect::<Result<_>>()?;

    let ItemFn { attrs, sig, block, .. } = &function;
    let (name, inputs) = (&sig.ident, &sig.inputs);
    let note = format!("// cuda_std::kernel {name}{bounds}");
    Ok(quote! {
        #[cfg(target_arch = "nvptx64")]
        ::core::arch::global_asm!(#note);
        #[cfg(target_arch = "nvptx64")]
        const _: () = {
            const fn argument<T: ::core::marker::Copy>() {
                assert!(
                    ::core::mem::align_of::<T>() <= 16,
                    "a kernel argument is aligned to more than 16 bytes: pass a pointer to it"
                );
            }
            #(argument::<#types>();)*
        };
        #[cfg(target_arch = "nvptx64")]
        #(#attrs)*
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn #name(#inputs) #block
    })
}

/// One argument: `hot`, or `name = number`.
struct Bound(Ident, Option<LitInt>);

impl syn::parse::Parse for Bound {
    fn parse(input: syn::parse::ParseStream<'_>) -> Result<Self> {
        let name = input.parse::<Ident>()?;
        if name == "hot" {
            return Ok(Bound(name, None));
        }
        input.parse::<Token![=]>()?;
        Ok(Bound(name, Some(input.parse()?)))
    }
}

/// The attribute's arguments as ` name=value` or ` hot` each.
fn bounds(arguments: TokenStream) -> Result<String> {
    let mut text = String::new();
    let given: Vec<Bound> = Punctuated::<Bound, Token![,]>::parse_terminated.parse2(arguments)?.into_iter().collect();
    if let Some(Bound(name, _)) = given.iter().find(|bound| bound.0 == "blocks_per_sm")
        && (given.iter().any(|bound| bound.0 == "registers") || !given.iter().any(|bound| bound.0 == "threads"))
    {
        return Err(Error::new(name.span(), "blocks_per_sm goes with threads and without registers"));
    }
    for Bound(name, value) in given {
        let Some(value) = value else {
            text.push_str(" hot");
            continue;
        };
        if !BOUNDS.iter().any(|known| name == known) {
            return Err(Error::new(name.span(), format!("unknown bound {name}; known are hot, {}", BOUNDS.join(", "))));
        }
        if value.base10_parse::<u32>()? == 0 {
            return Err(Error::new(value.span(), format!("{name} must be at least 1")));
        }
        if text.contains(&format!(" {name}=")) {
            return Err(Error::new(name.span(), format!("{name} is given twice")));
        }
        text.push_str(&format!(" {name}={}", value.base10_digits()));
    }
    Ok(text)
}

fn check_signature(function: &ItemFn) -> Result<()> {
    let sig = &function.sig;
    let refuse = |span: proc_macro2::Span, what: &str| Err(Error::new(span, what));
    if sig.unsafety.is_none() {
        return refuse(sig.fn_token.span, "a kernel must be an unsafe fn: its caller vouches for the pointers");
    }
    if !sig.generics.params.is_empty() {
        return refuse(sig.generics.span(), "a kernel cannot be generic: write one entry point per instance");
    }
    if sig.asyncness.is_some() || sig.constness.is_some() || sig.abi.is_some() || sig.variadic.is_some() {
        return refuse(sig.span(), "a kernel is a plain unsafe fn, neither async, const, extern nor variadic");
    }
    if let ReturnType::Type(_, ty) = &sig.output {
        return refuse(ty.span(), "a kernel returns nothing: write results through a pointer");
    }
    Ok(())
}

fn argument_type(argument: &FnArg) -> Result<&Type> {
    let FnArg::Typed(argument) = argument else {
        return Err(Error::new(argument.span(), "a kernel has no self"));
    };
    // A type that a macro_rules macro passed on is in an invisible group.
    let mut ty = &*argument.ty;
    while let Type::Group(group) = ty {
        ty = &group.elem;
    }
    match ty {
        Type::Ptr(pointer) => match &*pointer.elem {
            Type::Slice(_) | Type::TraitObject(_) => {
                Err(Error::new(pointer.span(), "a launch passes thin pointers only: pass pointer and length"))
            }
            _ => Ok(&argument.ty),
        },
        Type::Path(_) | Type::Array(_) => Ok(&argument.ty),
        other => Err(Error::new(
            other.span(),
            "a launch can pass raw pointers, numbers and Copy structs; use a raw pointer in place of a reference",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(arguments: &str, item: &str) -> String {
        expand(arguments.parse().unwrap(), item.parse().unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn a_kernel_becomes_an_entry_point() {
        let text = expand(
            "threads = 128, registers = 168, hot".parse().unwrap(),
            "/// Doubles.\npub unsafe fn double(out: *mut f32, n: u32) { }".parse().unwrap(),
        )
        .unwrap()
        .to_string();
        assert!(text.contains("\"// cuda_std::kernel double threads=128 registers=168 hot\""), "{text}");
        assert!(text.contains("unsafe extern \"ptx-kernel\" fn double (out : * mut f32 , n : u32)"), "{text}");
        assert!(text.contains("argument :: < u32 > ()"), "{text}");
    }

    #[test]
    fn what_a_launch_cannot_pass_is_refused_with_advice() {
        assert!(refused("", "fn k() {}").contains("unsafe fn"));
        assert!(refused("", "unsafe fn k<T>(x: T) {}").contains("one entry point per instance"));
        assert!(refused("", "unsafe fn k(x: &mut f32) {}").contains("raw pointer in place of a reference"));
        assert!(refused("", "unsafe fn k(x: *const [f32]) {}").contains("pointer and length"));
        assert!(refused("", "unsafe fn k() -> u32 { 0 }").contains("through a pointer"));
        assert!(refused("thread = 1", "unsafe fn k() {}").contains("unknown bound thread; known are hot, threads"));
        assert!(refused("blocks_per_sm = 2", "unsafe fn k() {}").contains("goes with threads"));
        assert!(refused("threads = 0", "unsafe fn k() {}").contains("at least 1"));
        assert!(refused("threads = 1, threads = 2", "unsafe fn k() {}").contains("given twice"));
    }
}
